"""Runs one point in its own fresh process and says how it ended."""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.sweep import memory
from stepscope.sweep.checks import refused_backends
from stepscope.sweep.protocol import CRASHED, OOM, SKIPPED, CannotRun, Report, Request, first_line


def run_point(request: Request) -> None:
    """Run one point in this process and write its result to `result_path`."""
    report = Report(Path(request.result_path))
    report.stage("start")
    with refused_backends.recorded_warnings() as messages:
        try:
            # Imported here: the process that only spawns points does not need torch.
            if request.shapes is not None:
                from stepscope.sweep.checks.compile_check import check

                check(request, report)
            else:
                from stepscope.sweep.point_stages import run_stages

                run_stages(request, report)
        except BaseException as error:
            _classify(error, report, request, messages)
    report.write()


def _classify(error: BaseException, report: Report, request: Request, messages: list[str]) -> None:
    fields = report.fields
    traceback.print_exception(error)  # to the point's log
    shortage = memory.read_error(error)
    if isinstance(error, CannotRun | StepscopeError):
        fields.update(status=SKIPPED, reason=str(error))
    elif shortage is not None:
        fields.update(status=OOM, oom=dataclasses.asdict(shortage), reason=first_line(error))
    elif (refusal := refused_backends.refusal(error, messages, request.run, request.config)) is not None:
        fields.update(status=SKIPPED, reason=refusal.reason, refused=refusal.torch_reasons)
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        fields.update(status=CRASHED, exit_code=code, reason=f"the workload called sys.exit({error.code!r})")
    else:
        stage = fields.get("stage")
        fields.update(status=CRASHED, reason=f"{type(error).__name__} in stage {stage}: {first_line(error)}")

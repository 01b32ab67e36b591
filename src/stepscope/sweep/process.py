"""Turns a process into a point's process (its own output, its own exit), runs the point and says how it ended."""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from stepscope.errors import StepscopeError
from stepscope.rows import KILLED
from stepscope.sweep import memory, protocol
from stepscope.sweep.protocol import CRASHED, EXIT_CANNOT_WRITE, SKIPPED, CannotRun, CannotWrite, Report, Request

_REFUSALS = ("No available kernel", "No viable backend")
"""What torch says when the only allowed backend cannot run, on a GPU and on a CPU."""
_BECAUSE = "not used because"
MAX_MESSAGES = 1000


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Collect the warnings raised inside; they are still shown."""
    messages: list[str] = []
    show = warnings.showwarning

    def listen(message: Any, *args: Any, **kwargs: Any) -> None:
        if len(messages) < MAX_MESSAGES:
            messages.append(str(message))
        show(message, *args, **kwargs)

    with mock.patch.object(warnings, "showwarning", listen):
        yield messages


def refusal(
    error: BaseException, messages: list[str], run: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[str, list[str]] | None:
    """Return why torch refused a backend, in one line and as its own reasons; None if no forced backend failed.

    >>> words = ["Flash attention kernel not used because:", "Both fused kernels do not support non-zero dropout."]
    >>> refusal(RuntimeError("No available kernel."), words, {"sdpa": "flash", "device": "cpu"}, {})[0]
    'sdpa=flash: PyTorch refused it: Both fused kernels do not support non-zero dropout.'
    """
    from stepscope.recorder.precision.attention_calls import FUSED, ON_CPU, reasons

    if not any(words in str(error) for words in _REFUSALS):
        return None
    knob, name = ("sdpa", run.get("sdpa")) if run.get("sdpa") != "free" else ("implementation", None)
    name = config.get("implementation") if name is None else name
    if name not in (*FUSED, "math"):
        return None
    found = reasons(str(name), messages) if any(_BECAUSE in text for text in messages) else []
    if run.get("device") == "cpu" and name not in (*ON_CPU, "math"):
        return f"{knob}={name}: PyTorch has no such kernel for CPUs", found
    why = f"PyTorch refused it: {' '.join(found)}" if found else "PyTorch refused it without a reason"
    return f"{knob}={name}: {why}", found


# Of prctl(2).
PARENT_DEATH_SIGNAL = 1
CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork


def begin(request: Request, parent_id: int) -> None:
    """Make this child of `parent_id` the point's process and run the point. Never returns."""
    die_with_parent(parent_id)
    try:
        log = os.open(request.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    except OSError:
        os._exit(EXIT_CANNOT_WRITE)
    for source, *targets in ((log, 1, 2), (os.open(os.devnull, os.O_RDONLY), 0)):
        for target in targets:
            os.dup2(source, target)
        os.close(source)
    _close_inherited()
    # Python's own streams may have been closed or replaced in the parent process.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  (open until the process ends)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115  (open until the process ends)
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115  (open until the process ends)
    faulthandler.enable(sys.stderr)
    with contextlib.suppress(OSError):  # if the machine runs out of memory, the kernel kills the point, not the sweep
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        run_point(request)
    except CannotWrite:
        with contextlib.suppress(OSError):  # a result that is not there says that the exit code is ours
            Path(request.result_path).unlink()
        os._exit(EXIT_CANNOT_WRITE)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the workload may have closed it
            stream.flush()
    os._exit(0)  # skip exit handlers: they must not turn a finished point into a crash


def die_with_parent(parent_id: int) -> None:
    """On Linux, kill this process when its parent ends."""
    set_process(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent_id:
        os._exit(1)  # the parent has already ended


def set_process(option: int, value: int) -> None:
    """Set a prctl option of this process; does nothing on other systems."""
    if _LIBC is not None:
        _LIBC.prctl(option, value, 0, 0, 0)


def _close_inherited() -> None:
    """Close all descriptors but the three streams: a point must not write into the server's pipes."""
    listed = Path("/proc/self/fd")
    if not listed.is_dir():
        os.closerange(3, 1024)
        return
    for entry in list(listed.iterdir()):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            # After counting GPUs the driver's library keeps its device open and uses it again.
            if int(entry.name) > 2 and not str(entry.readlink()).startswith("/dev/"):
                os.close(int(entry.name))


def run_point(request: Request) -> None:
    """Run one point in this process and write its result to `result_path`."""
    report = Report(Path(request.result_path))
    report.stage("start")
    with recorded_warnings() as messages:
        try:
            # Imported here: the process that only spawns points does not need torch.
            if request.shapes is not None:
                from stepscope.sweep.checks.compile_check import check

                check(request, report)
            else:
                from stepscope.sweep.point_stages import run_stages

                run_stages(request, report)
        except CannotWrite:
            raise
        except BaseException as error:
            _classify(error, report, request, messages)
    report.write()


def _classify(error: BaseException, report: Report, request: Request, messages: list[str]) -> None:
    fields = report.fields
    if protocol.is_full_disk(error):  # the log is on the same disk, so even a print fails
        raise CannotWrite from error
    with contextlib.suppress(OSError):
        traceback.print_exception(error)  # to the point's log
    shortage = memory.read_error(error)
    if isinstance(error, CannotRun | StepscopeError):
        fields.update(status=SKIPPED, reason=str(error))
    elif shortage is not None:
        fields.update(status=protocol.OOM, oom=shortage, reason=protocol.first_line(error))
    elif (refused := refusal(error, messages, request.run, request.config)) is not None:
        fields.update(status=SKIPPED, reason=refused[0], refused=refused[1])
    elif isinstance(error, KeyboardInterrupt):
        reason = f"interrupted from outside in stage {fields.get('stage')}"
        fields.update({"status": CRASHED, KILLED: True, "signal": "SIGINT", "reason": reason})
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        fields.update(status=CRASHED, exit_code=code, reason=f"the workload called sys.exit({error.code!r})")
    else:
        stage = fields.get("stage")
        reason = f"{type(error).__name__} in stage {stage}: {protocol.first_line(error)}"
        fields.update(status=CRASHED, reason=reason)


if __name__ == "__main__":
    begin(Request(**json.loads(sys.argv[1])), int(sys.argv[2]))

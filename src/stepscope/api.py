"""The Python interface: `record`, `step`, `phase` for scripts, `read` for recordings."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from stepscope.displays import register_displays
from stepscope.errors import MissingDependencyError, RecordingError, UsageError
from stepscope.recorder import current

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from stepscope.analysis.comparison.gates import Comparison
    from stepscope.analysis.comparison.verified import Verification
    from stepscope.analysis.precision.dtype_audit import DtypeAudit
    from stepscope.analysis.ranks.all_ranks import Analysis
    from stepscope.document.card import Card
    from stepscope.document.model import Document
    from stepscope.findings.diagnose import Diagnosis
    from stepscope.findings.what_if import WhatIf
    from stepscope.recorder.precision.settings import PrecisionChange
    from stepscope.recorder.session import Session
    from stepscope.recorder.windows import Windows

register_displays()


def is_disabled() -> bool:
    """Whether STEPSCOPE_DISABLE switches recording off."""
    return os.environ.get("STEPSCOPE_DISABLE", "") not in ("", "0")


def step(tokens: int | None = None, loss: Any = None) -> None:
    """Say that a step ends here. Free when nothing is being recorded.

    >>> step()
    """
    if current.session is not None:
        current.session.explicit_step(tokens, loss)


def phase(name: str) -> AbstractContextManager[None]:
    """Say that the time inside belongs to `data`, `forward`, `backward`, `optimizer` or `other`.

    >>> with phase("data"):
    ...     batch = [1, 2, 3]
    """
    return current.session.phase(name) if current.session is not None else nullcontext()


def read(folder: str | os.PathLike[str] | None = None) -> Card:
    """The card of a recording: figures as attributes, text as `str()`, a table in a notebook."""
    from stepscope.document.card import Card
    from stepscope.session import open_session

    return Card.of(open_session(folder))


def analyze(
    *paths: str | os.PathLike[str],
    step: int | None = None,
    rank: int | None = None,
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Analysis:
    """Where the time in traces goes: files, folders of ranks, or recordings; needs no torch.

    `progress` is told the share of the work that is done.
    """
    from stepscope.session import open_session

    session = open_session(paths or None, rank=rank, use_cache=use_cache, progress=progress)
    return session.analyze(step)


def compare(
    base: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    new: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    threshold: float = 0.02,
    allow: Collection[str] = (),
    fail_on: Collection[str] = (),
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Comparison:
    """Whether two recordings, bench results or traces differ; `.pairs[0].change("step_time").verdict` says it.

    A list of paths is several runs of one thing, three at the least: whole runs are then what is tested.
    `threshold` is the share below which a change is none. `allow` names what the comparison is about (`device`,
    `dtype` …), `fail_on` gates as on the command line (`step_time:3%`): see `.gates` and `.exit_code`.
    """
    from stepscope.analysis.comparison.gates import parse_gate
    from stepscope.session.compare import compare as compare_sessions
    from stepscope.session.compare import open_sides

    gates = [parse_gate(text) for text in ([fail_on] if isinstance(fail_on, str) else fail_on)]
    sides = [
        [Path(path) for path in ([side] if isinstance(side, (str, os.PathLike)) else side)] for side in (base, new)
    ]
    if not all(sides):
        raise UsageError("compare: a side is an empty list")
    sessions = open_sides(sides[0], sides[1], use_cache, progress)
    return compare_sessions(*sessions, threshold, allow, gates)


def diagnose(
    path: str | os.PathLike[str] | None = None,
    *,
    rank: int | None = None,
    ignore: Collection[str] = (),
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Diagnosis:
    """What is wrong with a step of a recording or a trace: `.findings`, those that save most first."""
    from stepscope.session import open_session

    case = open_session(path, rank=rank, use_cache=use_cache, progress=progress).case
    from stepscope.findings.diagnose import diagnose as ask

    return ask(case, [ignore] if isinstance(ignore, str) else ignore)


def what_if(
    path: str | os.PathLike[str] | None = None,
    *,
    scale: Sequence[tuple[str, float]] = (),
    drop_launches: Sequence[str] = (),
    host: float | None = None,
    waits: bool = True,
    clean: bool = False,
    rank: int | None = None,
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> WhatIf:
    """What a step would take with a change, as `stepscope whatif`: `scale` is pairs of work and factor."""
    from stepscope.session import open_session

    case = open_session(path, rank=rank, use_cache=use_cache, progress=progress).case
    from stepscope.findings.what_if import what_if as replay

    return replay(case, scale, drop_launches, host, waits, clean)


def verify(
    target: str | os.PathLike[str],
    *arguments: str,
    fix: str | Sequence[str],
    rounds: int = 4,
    warmup: int = 8,
    clean: int = 20,
    tolerance: float | None = None,
    timeout_s: float = 1800,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """What fixes bring, as `stepscope verify`: `.fixes[0].status` and `.change` say it, `.losses` whether they agree.

    `target` is a recording, whose command is run again, or a script with its `arguments`; every run is a process of
    its own. `progress` is told what is being done.
    """
    from stepscope.sweep.rerun import Options
    from stepscope.verify_fixes import verify_fixes

    return verify_fixes(
        [os.fspath(target), *arguments],
        [fix] if isinstance(fix, str) else fix,
        rounds=rounds,
        options=Options(warmup=warmup, clean=clean, timeout_s=timeout_s),
        tolerance=tolerance,
        output=None if output is None else Path(output),
        doing=progress,
    )


def report(
    path: str | os.PathLike[str] | None = None,
    *,
    rank: int | None = None,
    ignore: Collection[str] = (),
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Document:
    """The report of a recording, a trace, a folder of ranks or a sweep: a notebook shows it, `.save(path)` keeps it.

    The path's ending says as what: .html, .md, .json, or a folder with all of them, tables as CSV and charts as PNG.
    """
    from stepscope.session import need_read_side, open_session

    need_read_side()
    from stepscope.document.build import report_of

    ignored = [ignore] if isinstance(ignore, str) else ignore
    return report_of(open_session(path, rank=rank, use_cache=use_cache, progress=progress), ignored)


def configure_precision(
    *,
    allow_tf32: bool | None = None,
    allow_bf16_reduced_precision_reduction: bool | None = None,
    allow_fp16_reduced_precision_reduction: bool | None = None,
    matmul_precision: str | None = None,
) -> PrecisionChange:
    """Set torch's switches of precision in one call, before or after the model is made; what is left out stays.

    Returns what changed, old → new: print it, `undo()` it, or use it as a context manager that undoes it.
    `allow_tf32` is of matrix products and of cuDNN's convolutions; `matmul_precision` ("highest", "high", "medium")
    is `torch.set_float32_matmul_precision`.
    """
    _need_torch()
    from stepscope.recorder.precision.settings import configure_precision as configure

    reductions = (allow_bf16_reduced_precision_reduction, allow_fp16_reduced_precision_reduction)
    try:
        return configure(allow_tf32, *reductions, matmul_precision)
    except ValueError as error:
        raise UsageError(str(error)) from None


def audit(
    module: Any,
    *inputs: Any,
    autocast: Any = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    micro_batches: int = 1,
    **named_inputs: Any,
) -> DtypeAudit:
    """Return the dtype of everything in one step of a module, as `stepscope audit`: print it or use its attributes.

    The module is called with `inputs` and `named_inputs`, under autocast in the dtype `autocast`; `loss` makes a
    number of what it returns. `optimizer` (AdamW) gets copies of the parameters: the module stays as it was.
    """
    _need_torch()
    from stepscope.analysis.precision.dtype_audit import DtypeAudit
    from stepscope.recorder.precision.dtype_audit import BadAudit, audit_module

    try:
        return DtypeAudit(audit_module(module, inputs, named_inputs, autocast, loss, optimizer, micro_batches))
    except BadAudit as error:
        raise UsageError(str(error)) from None


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("PyTorch is not installed here: pip install torch")


class Recorder(ContextDecorator):
    """A recording of a block of your own code; what `stepscope.record(...)` returns."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: Any,
        optimizer: Any,
        windows: Windows | None,
        tokens_per_step: int | None,
        force: bool,
    ) -> None:
        self.folder = Path(folder)
        self._model, self._optimizer, self._windows = model, optimizer, windows
        self._tokens_per_step, self._force = tokens_per_step, force
        self._session: Session | None = None

    def __enter__(self) -> Recorder:
        if is_disabled():
            return self
        if current.session is not None and current.session.is_script:
            return self  # under `stepscope run` the steps of this block go to its recording
        if current.session is not None:
            raise UsageError(f"already recording to {current.session.folder}: one recording at a time in a process")
        from stepscope.recorder.files import prepare_folder
        from stepscope.recorder.origin import run_facts
        from stepscope.recorder.session import Session
        from stepscope.recorder.windows import Windows

        try:
            prepare_folder(self.folder, self._force)
            windows = self._windows or Windows()
            self._session = Session(
                self.folder,
                windows=windows,
                model=self._model,
                optimizer=self._optimizer,
                tokens_per_step=self._tokens_per_step,
                facts=run_facts(sys.argv, windows, self._tokens_per_step, Path.cwd(), module=False),
            )
        except ValueError as error:
            raise RecordingError(str(error)) from None
        self._session.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            from stepscope.recorder.files import STATUS_FAILED, STATUS_FINISHED, STATUS_INTERRUPTED
            from stepscope.recorder.origin import now

            status = STATUS_FINISHED if error is None else STATUS_FAILED
            self._session.close(STATUS_INTERRUPTED if kind is KeyboardInterrupt else status, finished_at=now())

    def step(self, tokens: int | None = None, loss: Any = None) -> None:
        """Say that a step ends here, and, if you like, how many tokens it had and its loss."""
        step(tokens, loss)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Say that the time inside belongs to one phase."""
        return phase(name)

    @property
    def result(self) -> Card | None:
        """The card of what was recorded; None when recording is disabled or goes to `stepscope run`."""
        return read(self.folder) if self._session is not None else None


def record(
    folder: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    windows: Windows | None = None,
    tokens_per_step: int | None = None,
    force: bool = False,
) -> Recorder:
    """Record the steps of a block of code; a context manager and a decorator.

    Costs nothing when STEPSCOPE_DISABLE=1 is set. `model` and `optimizer` are found by
    themselves in most loops; giving the model makes the first steps count too.
    """
    return Recorder(folder, model, optimizer, windows, tokens_per_step, force)

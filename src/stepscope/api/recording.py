"""Functions for your own code: `record`, `step` and `phase`, `audit` and `configure_precision`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from stepscope.errors import RecordingError, UsageError, need_torch
from stepscope.recorder import current

if TYPE_CHECKING:
    from stepscope.analysis.precision.dtype_audit import DtypeAudit
    from stepscope.document.card import Card
    from stepscope.recorder.precision.settings import PrecisionChange
    from stepscope.recorder.session import Session
    from stepscope.recorder.windows import Windows
    from stepscope.trackers.follow import LiveLog
    from stepscope.trackers.tracker import Target


def _peak_flops(name: str) -> Mapping[str, int] | None:
    from stepscope.devices import find_device, load_ceilings

    if (device := find_device(name)) is not None:
        return device.peak_flops
    ceilings = load_ceilings(name)
    return None if ceilings is None else ceilings.matmul_flops


current.peak_flops = _peak_flops  # for the MFU of live_metrics


def step(tokens: int | None = None, loss: Any = None) -> None:
    """Return nothing; end a step here, with its number of tokens and its loss if you like.

    Costs nothing if nothing is being recorded.

    >>> step()
    """
    if current.session is not None:
        current.session.explicit_step(tokens, loss)


def phase(name: str) -> AbstractContextManager[None]:
    """Return a context manager that assigns its time to `data`, `forward`, `backward`, `optimizer` or `other`.

    >>> with phase("data"):
    ...     batch = [1, 2, 3]
    """
    return current.session.phase(name) if current.session is not None else nullcontext()


def check_tokens(tokens_per_step: Any) -> None:
    """Raise UsageError unless this is a number of tokens, or None."""
    if tokens_per_step is not None and not (isinstance(tokens_per_step, int) and tokens_per_step > 0):
        raise UsageError(f"tokens_per_step is {tokens_per_step!r}: it must be a positive integer")


def check_windows(windows: Any) -> None:
    """Raise UsageError unless these are windows, or None."""
    from stepscope.recorder.windows import Windows

    if not isinstance(windows, (Windows, type(None))):
        raise UsageError(f"windows is {windows!r}: it must be a stepscope.Windows, such as Windows(trace=0)")


class Recorder(ContextDecorator):
    """A recording of a block of your code: a context manager and a decorator."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: Any,
        optimizer: Any,
        windows: Windows | None,
        tokens_per_step: int | None,
        force: bool,
        log_to: Sequence[str] = (),
        metrics_file: str | os.PathLike[str] | None = None,
        otlp: bool = False,
        when: Sequence[str] = (),
        limit: int = 3,
    ) -> None:
        check_tokens(tokens_per_step)
        self.folder = Path(folder)
        self._when, self._limit = tuple(when), limit
        self._log_to, self._metrics_file, self._otlp = log_to, metrics_file, otlp
        self._live_log: LiveLog | None = None
        self._model, self._optimizer, self._windows = model, optimizer, windows
        self._tokens_per_step, self._force = tokens_per_step, force
        self._session: Session | None = None

    def __enter__(self) -> Recorder:
        if os.environ.get("STEPSCOPE_DISABLE", "") not in ("", "0"):
            return self
        if current.session is not None and current.session.is_script:
            return self  # under `stepscope run`, the steps of this block belong to its recording
        if current.session is not None:
            raise UsageError(f"already recording to {current.session.folder}: one recording per process at a time")
        from stepscope.recorder.files import prepare_folder
        from stepscope.recorder.history.conditions import parse
        from stepscope.recorder.processes.rank import rank_and_world_size
        from stepscope.recorder.run_facts import run_facts
        from stepscope.recorder.session import Session
        from stepscope.recorder.windows import Windows

        check_windows(self._windows)
        targets, rank = self._targets()
        try:
            for condition in self._when:
                parse(condition)
            prepare_folder(self.folder, self._force, keep_ranks=rank_and_world_size()[1] > 1)
            windows = self._windows or Windows()
            self._session = Session(
                self.folder,
                windows=windows,
                model=self._model,
                optimizer=self._optimizer,
                tokens_per_step=self._tokens_per_step,
                facts=run_facts(sys.argv, windows, self._tokens_per_step, Path.cwd(), module=False),
                when=self._when,
                limit=self._limit,
            )
        except ValueError as error:
            raise RecordingError(str(error)) from None
        self._session.start()
        if targets:
            from stepscope.trackers.follow import LiveLog

            self._live_log = LiveLog(self.folder, targets, rank)
        return self

    def _targets(self) -> tuple[Sequence[Target], int]:
        """Return what this process logs to while it records, and its rank."""
        if not (self._log_to or self._metrics_file or self._otlp):
            return (), 0
        from stepscope.recorder.processes.rank import rank_and_world_size
        from stepscope.trackers.follow import targets_of

        rank = rank_and_world_size()[0] or 0
        return targets_of(self._log_to, self._metrics_file, self._otlp, rank), rank

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            from stepscope.recorder.processes.ending import ending

            status, facts = ending(error)
            del facts["exit_code"]  # the process goes on
            self._session.close(status, error, **facts)
            if self._live_log is not None:
                from stepscope.recorder.wall import tell

                self._live_log.end(tell)

    def step(self, tokens: int | None = None, loss: Any = None) -> None:
        """Return nothing; end a step here, with its number of tokens and its loss if you like."""
        step(tokens, loss)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that assigns its time to one phase."""
        return phase(name)

    @property
    def result(self) -> Card | None:
        """The card of the recording; None if recording is disabled or belongs to `stepscope run`."""
        from stepscope.api.reading import read

        return read(self.folder) if self._session is not None else None


def record(
    folder: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    windows: Windows | None = None,
    tokens_per_step: int | None = None,
    force: bool = False,
    log_to: str | Sequence[str] = (),
    metrics_file: str | os.PathLike[str] | None = None,
    otlp: bool = False,
    when: str | Sequence[str] = (),
    limit: int = 3,
) -> Recorder:
    """Return a recorder of the steps of a block of code: a context manager and a decorator.

    Its `.result` is the card. Stepscope finds the model and the optimizer by itself in most loops; naming the model
    includes the first steps too. `windows` sets how many steps are warm-up, timed and traced. `force` replaces a
    recording that exists. `log_to` names trackers that show the run live (`"tensorboard:logs"`), `metrics_file` is
    written for Prometheus, and `otlp` sends to an OpenTelemetry collector: see docs/trackers.md. `when`
    names conditions for further windows (`"step_time > 1.5x"`), each taken at most `limit` times: see
    docs/whole-run.md. With STEPSCOPE_DISABLE=1 it costs nothing.

    >>> with record("runs/example", model=model) as rec:  # doctest: +SKIP
    ...     for batch in batches:
    ...         rec.step(loss=train_step(batch))
    """
    names = [log_to] if isinstance(log_to, str) else log_to
    conditions = (when,) if isinstance(when, str) else when
    logs = names, metrics_file, otlp
    return Recorder(folder, model, optimizer, windows, tokens_per_step, force, *logs, conditions, limit)


def audit(
    module: Any,
    *inputs: Any,
    named_inputs: Mapping[str, Any] | None = None,
    autocast: Any = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    micro_batches: int = 1,
) -> DtypeAudit:
    """Return the dtype of everything in one step of a module, like `stepscope bench --check dtypes`.

    The module is called with `inputs` and `named_inputs`, under autocast in the dtype `autocast`; `loss` turns its
    output into a scalar. `optimizer` (default: AdamW) gets copies of the parameters, so the module does not change.

    >>> audit(model, tokens, autocast=torch.bfloat16).cast_bytes()  # doctest: +SKIP
    """
    need_torch()
    import torch

    from stepscope.analysis.precision.dtype_audit import DtypeAudit
    from stepscope.recorder.precision.dtype_audit import BadAudit, audit_dtypes

    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"audit needs a torch.nn.Module, not {type(module).__name__}")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise UsageError(
            f"autocast={autocast!r} is not supported: use torch.bfloat16, torch.float16, or leave it out"
        )
    if micro_batches < 1:
        raise UsageError(f"micro_batches={micro_batches} must be 1 or more")
    named = dict(named_inputs or {})
    try:
        facts = audit_dtypes(
            module,
            lambda: module(*inputs, **named),
            inputs=(inputs, named),
            loss=loss,
            autocast=autocast,
            optimizer=optimizer or torch.optim.AdamW,
            num_micro_batches=micro_batches,
        )
    except BadAudit as error:
        raise UsageError(str(error)) from None
    return DtypeAudit({**facts, "workload": type(module).__name__})


def configure_precision(
    *,
    allow_tf32: bool | None = None,
    allow_bf16_reduced_precision_reduction: bool | None = None,
    allow_fp16_reduced_precision_reduction: bool | None = None,
    matmul_precision: str | None = None,
) -> PrecisionChange:
    """Return the change that was made to torch's precision switches; arguments left out stay as they are.

    Print it to see old and new values, call `undo()`, or use it as a context manager that undoes it. `allow_tf32`
    covers matrix products and cuDNN's convolutions; `matmul_precision` ("highest", "high", "medium") is
    `torch.set_float32_matmul_precision`.

    >>> with configure_precision(allow_tf32=True):  # doctest: +SKIP
    ...     train()
    """
    need_torch()
    from stepscope.recorder.precision.settings import configure_precision as configure

    reductions = {
        "allow_bf16_reduced_precision_reduction": allow_bf16_reduced_precision_reduction,
        "allow_fp16_reduced_precision_reduction": allow_fp16_reduced_precision_reduction,
    }
    try:
        return configure(allow_tf32, matmul_precision, reductions)
    except ValueError as error:
        raise UsageError(str(error)) from None

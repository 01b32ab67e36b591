"""What passes between a sweep and the process of one point: the request, the row so far, the statuses."""

import dataclasses
import errno
import signal
from pathlib import Path
from typing import Any

from stepscope.recorder.files import write_json
from stepscope.rows import Row

OK, OOM, WRONG, UNPROVEN, SKIPPED, CRASHED, TIMEOUT = (
    "ok", "oom", "wrong", "unproven", "skipped", "crashed", "timeout",
)  # fmt: skip

FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What a user, a scheduler or the kernel ends a process with: it says nothing about the point."""

EXIT_CANNOT_WRITE = 74
"""Exit code of a point's process that could not write; it then leaves no result either. EX_IOERR of sysexits.h."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Everything a point's process needs to know; JSON with `dataclasses.asdict`."""

    workload: str
    preset: str | None
    config: dict[str, Any]  # every knob of the workload
    run: dict[str, Any]  # every run knob
    result_path: str
    log_path: str
    trace_path: str | None = None  # where to keep the Chrome trace, if anywhere
    memory_limit_bytes: int | None = None  # limit on host memory (CPU) or device memory (GPU); None: no limit
    known_gate: dict[str, Any] | None = None
    """The gate's verdict from another point of this sweep with the same variant."""
    probe: bool = False  # only check whether it fits: no gate, no FLOPs, no trace
    timeout_s: float = 600.0
    compares_dtypes: bool = False  # whether to run the measurements of `sweep/checks/precision_probe.py` too
    layers: bool = False
    """Time each layer in the first call and once warm. Skips the gate, which would warm up the process."""
    shapes: list[dict[str, Any]] | None = None
    """Knobs of the shapes at which compiled code is only compared with eager code (`compile_check.py`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a point's process ended, and where it ran."""

    exit_code: int  # negative if a signal ended it
    timed_out: bool
    memory_kill: bool  # whether the kernel killed a process for lack of memory meanwhile
    seconds: float
    lost: bool = False  # whether the server itself ended, and its point with it
    lost_because: str = ""  # why an engine has no answer
    node: str = ""  # empty: this machine
    num_neighbors: int = 0  # other points that ran on the node meanwhile
    attempts: int = 1


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a command that records has failed."""

    reason: str
    is_timeout: bool = False
    signal: int | None = None  # what ended it
    is_lost: bool = False  # whether its node was lost, however often it was tried


class CannotWrite(BaseException):
    """Writing failed, so nothing is known about the point. Not an Exception: no workload may catch it."""


def is_full_disk(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, is a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


class CannotRun(Exception):
    """The point makes no sense or cannot run on this machine; the message becomes the row's reason."""


def first_line(error: BaseException) -> str:
    """Return an error as one line. For Triton that is its first line (the place) and its last (the reason)."""
    text = str(error).split("\nSet TORCHDYNAMO_VERBOSE=1")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = f"{lines[0]} {lines[-1]}" if "CompilationError: at " in lines[0] and len(lines) > 1 else lines[0]
    return line[:500]


class Report:
    """The row so far, on disk after each stage."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fields: Row = {"notes": []}

    def stage(self, name: str) -> None:
        self.fields["stage"] = name
        self.write()

    def write(self) -> None:
        try:
            write_json(self._path, self.fields)
        except OSError as error:
            raise CannotWrite from error

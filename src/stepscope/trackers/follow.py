"""Logs a recording while it is written, in a process of its own: no tracker can slow down or end the training."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from stepscope.errors import StepscopeError, UsageError, failure
from stepscope.session import Session, open_session
from stepscope.trackers.tracker import TRACKERS, Target

PAUSE_VARIABLE, PAUSE_S = "STEPSCOPE_LOG_SECONDS", 5.0  # between two updates
LEAST_PAUSES = 20  # reading a long recording again takes at most this part of the time
MOST_RETRY_S = 600.0  # between attempts to reach a tracker that is down
QUIET_S = 10.0  # how long to wait before saying why
WAIT_S = 60.0  # at the end of the script, for trackers to send the rest
# Not `-m stepscope`: it would look for packages in the script's folder first.
_PROGRAM = (
    "import sys; sys.path[:] = [*filter(None, sys.path), {!r}]; from stepscope.cli.main import main; sys.exit(main())"
)


def targets_of(
    log_to: Sequence[str], metrics_file: str | os.PathLike[str] | None, otlp: bool, rank: int
) -> list[Target]:
    """Return what a rank of a run logs to. UsageError for a name or a folder that does not exist."""
    found = [Target.of(name, TRACKERS) for name in log_to]
    found = found if not rank else []
    if otlp:
        found.insert(0, Target.of("otlp"))
    if found or metrics_file is not None:
        _pause()
    if metrics_file is not None:
        path = Path(metrics_file).absolute()
        if not path.parent.is_dir():
            raise UsageError(f"the folder of the metrics file does not exist: {path.parent}")
        path = path.with_name(f"{path.stem}-rank{rank}{path.suffix}") if rank else path
        found.insert(0, Target("prometheus", str(path)))  # the quick ones first
    return found


def _pause() -> float:
    """Return the least number of seconds between two updates."""
    text = os.environ.get(PAUSE_VARIABLE) or PAUSE_S
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{PAUSE_VARIABLE} must be a number of seconds, not {text!r}") from None


class LiveLog:
    """The process that logs a recording of this process."""

    def __init__(self, folder: Path, targets: Sequence[Target], rank: int) -> None:
        program = _PROGRAM.format(str(Path(__file__).parents[2]))
        options = [word for target in targets for word in ("--to", str(target))]
        self._pid = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, "log", str(folder.absolute()), *options, "--follow", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the script, and this logs how it ended
        )

    def end(self, tell: Callable[[str], None]) -> None:
        """Let it send the rest. It goes on by itself if that takes long."""
        if os.getpid() != self._pid:
            return
        if self._process.stdin is not None:
            with suppress(OSError), self._process.stdin as pipe:  # an error: it has ended
                pipe.write(b"\n")
        try:
            try:
                self._process.wait(QUIET_S)
            except subprocess.TimeoutExpired:
                tell(f"waiting up to {WAIT_S:.0f} s for trackers to receive the end of this run")
                self._process.wait(WAIT_S - QUIET_S)
            if self._process.returncode:
                tell(f"logging failed (exit code {self._process.returncode}): log this run with `stepscope log`")
        except subprocess.TimeoutExpired:
            tell(f"process {self._process.pid} still logs the end of this run in the background")
            self._process.returncode = 0  # nobody waits for it


def follow(
    folder: Path, targets: Sequence[Target], rank: int, write_report: Callable[[Session, Path], object]
) -> None:
    """Log a recording until a line arrives on standard input, or the process that started this one has ended."""
    from tempfile import TemporaryDirectory

    from stepscope.trackers.log import Logged, Report

    os.nice(5)
    stderr = _silence()
    parent, pause_s, is_over = os.getppid(), 0.0, False
    least_s = _pause()
    logs = [Logged(target, folder, rank) for target in targets]

    def attempt(log: Logged, action: Callable[[], object]) -> None:
        if time.monotonic() < log.retry_s and not is_over:
            return
        try:
            action()
            log.num_failures = 0
        except Exception as error:
            log.num_failures += 1
            log.retry_s = time.monotonic() + min(MOST_RETRY_S, least_s * 2 ** min(log.num_failures, 10))
            if not log.has_warned:
                log.has_warned = True
                text = (str(error) if isinstance(error, StepscopeError) else failure(error)).rstrip(".")
                then = "" if is_over else ". Training goes on, and so do attempts"
                line = f"stepscope: logging to {log.target} failed: {text}{then}\n"
                with suppress(OSError):  # nobody reads it
                    os.write(stderr, line.encode(errors="replace"))

    with TemporaryDirectory(prefix="stepscope-") as temporary:
        while not is_over:
            is_over = bool(select.select([0], [], [], pause_s)[0]) or os.getppid() != parent
            began = time.monotonic()
            session = _recorded(folder)
            if session is not None:
                _ = session.summary
            pause_s = max(least_s, LEAST_PAUSES * (time.monotonic() - began))
            if session is None:
                continue
            if is_over:
                report = Report(Path(temporary), session, write_report)
                for log in logs:
                    attempt(log, partial(log.finish, session, report))
            elif any(sample.window == "clean" for sample in session.recording.samples):
                # Before, steps may still be taken back: what ends a step becomes clear in the first ones.
                for log in logs:
                    attempt(log, partial(log.update, session))


def _recorded(folder: Path) -> Session | None:
    """Return the recording in a folder; while its processes still run, that of the first of them which trains."""
    found = None
    for path in (folder, *sorted(folder.glob("rank*")), *sorted(folder.glob("process*"))):
        try:
            session = open_session(path)
            if session.recording.samples:
                return session
            found = found or session
        except StepscopeError:
            continue  # it is being written
    return found


def _silence() -> int:
    """Send what libraries print to nowhere, and return a descriptor for our own lines."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return kept

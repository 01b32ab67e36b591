"""The whole run as typed data, finished or still growing.

`load(folder)` reads all of it. `follow(folder)` reads what was added since the last look.
"""

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from stepscope.errors import RecordingError
from stepscope.formatting import plural
from stepscope.trace.history_file import (
    HISTORY_FILE,
    OLDER_RECENT_FILE,
    RECENT_FILE,
    Block,
    Event,
    Lines,
    Process,
    Tail,
    most_lines,
    steps_of,
)
from stepscope.trace.recording import RECORDING_FILE, SAMPLES_FILE, StepSample

_BLOCK_BEGINS = b'{"step":'  # as the recorder writes them


@dataclass(frozen=True)
class History:
    """A rank's whole run, as far as it has been written."""

    folder: Path
    processes: tuple[Process, ...] = ()
    blocks: tuple[Block, ...] = ()
    events: tuple[Event, ...] = ()
    num_unread: int = 0  # lines that could not be read
    num_left_out: int = 0  # lines beyond the limit, at the beginning

    @property
    def problems(self) -> tuple[str, ...]:
        """What was not read, and why."""
        found = [f"{plural(self.num_unread, 'line')} could not be read"] if self.num_unread else []
        if self.num_left_out:
            all_lines = self.num_left_out + most_lines()
            found.append(
                f"only the last {most_lines():,} of {all_lines:,} lines were read; set "
                f"STEPSCOPE_MAX_HISTORY_LINES={all_lines} to read all"
            )
        return tuple(found)


@dataclass(frozen=True)
class Update:
    """What was added to a history since the last look."""

    processes: tuple[Process, ...] = ()
    blocks: tuple[Block, ...] = ()
    events: tuple[Event, ...] = ()
    steps: tuple[StepSample, ...] = ()  # exact recent steps; the device times are not known
    num_unread: int = 0
    num_left_out: int = 0
    starts_over: bool = False  # forget what was read before: steps are counted anew, or the file was replaced


def load(folder: Path) -> History:
    """Return the whole run of the rank in `folder`; RecordingError if it has no history."""
    if not (folder / HISTORY_FILE).is_file():
        raise RecordingError(f"{folder} has no {HISTORY_FILE}: it is not a recording, or it has no steps yet")
    found, tail = Lines(), Tail(folder / HISTORY_FILE)
    try:
        found.add(tail.lines(to_the_end=True))
    except OSError as error:
        raise RecordingError(f"{folder} cannot be read: {error.strerror or error}") from None
    lines = tuple(found.processes), tuple(found.blocks), tuple(found.events)
    return History(folder, *lines, found.num_unread, tail.num_left_out)


def recent_steps(folder: Path, most: int = 20_000) -> tuple[StepSample, ...]:
    """Return the last exact steps of the rank in `folder`, at most so many."""
    found: list[StepSample] = []
    for name in (RECENT_FILE, OLDER_RECENT_FILE, SAMPLES_FILE):
        if len(found) < most and (folder / name).is_file():
            found[:0] = steps_of(Tail(folder / name, most_bytes=most * 400).lines(to_the_end=True))
    return tuple(found[-most:])


def host_of(folder: Path) -> str | None:
    """Return the machine on which a history was begun; None if that is not known."""
    try:
        processes = Lines().add(Tail(folder / HISTORY_FILE).first_line()).processes
    except OSError:
        return None
    return processes[0].host if processes else None


def rank_folders(folder: Path) -> list[Path]:
    """Return the folders of a run's ranks, in order; the first is `folder` itself.

    Folders of processes without a rank come last.
    """
    found = [path for path in folder.iterdir() if (path / RECORDING_FILE).is_file() and _order(path.name)[0] < 2]
    return [folder, *sorted(found, key=lambda path: _order(path.name))]


def _order(name: str) -> tuple[int, int]:
    for i, prefix in enumerate(("rank", "process")):
        number = name.removeprefix(prefix).split("-")[0]
        if name.startswith(prefix) and number.isascii() and number.isdigit():
            return i, int(number)
    return 2, 0


def follow(folder: Path) -> "Follower":
    """Return what reads a run that is still going on. Its folder may not exist yet."""
    return Follower(folder)


def spread_blocks(lines: list[bytes], most: int) -> list[bytes]:
    """Return all lines that are no blocks, and about `most` that are: half of them the last, the others spread."""
    is_block = [line.startswith(_BLOCK_BEGINS) for line in lines]
    num = sum(is_block)
    if num <= most:
        return lines
    first, every = num - most // 2, -(-2 * num // most)
    numbers = accumulate(is_block)  # of the block that a line is, or the last one before it
    return [line for line, is_one, i in zip(lines, is_block, numbers) if not is_one or i > first or i % every == 1]


class Follower:
    """Reads what is added to a rank's history, whenever `read` is called. Never raises OSError."""

    def __init__(self, folder: Path, most_blocks: int | None = None) -> None:
        self.folder = folder
        self._most_blocks = most_blocks  # of the first look: the last ones, and evenly spread ones before them
        self._history = Tail(folder / HISTORY_FILE)
        self._steps = [Tail(folder / name, most_bytes=1 << 18) for name in (SAMPLES_FILE, RECENT_FILE)]
        self._num_processes = 0

    def read(self) -> Update:
        """Return what was added since the last call; the first call returns the whole history."""
        found = Lines(self._num_processes)
        steps: list[StepSample] = []
        try:
            lines = self._history.lines()
            if self._most_blocks is not None:
                lines = spread_blocks(lines, self._most_blocks)
            if self._history.was_replaced:
                found = Lines(restarts=True)
            found.add(lines)
            for tail in self._steps:
                steps += steps_of(tail.lines())
        except OSError:
            pass  # deleted, or on a server that does not answer: there is nothing new
        self._num_processes = found.num_processes
        return Update(
            *(tuple(found.processes), tuple(found.blocks), tuple(found.events), tuple(steps)),
            num_unread=found.num_unread,
            num_left_out=self._history.num_left_out,
            starts_over=found.restarts,
        )

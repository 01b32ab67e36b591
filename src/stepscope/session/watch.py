"""A run that still goes on: the history of every rank in bounded memory, and whether the rank still writes.

Ranks may run on other machines, whose clocks differ from ours. Whether one is silent is therefore measured by our own
clock from when we last saw its files change, and only for the first look by the files' time.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from stepscope.errors import RecordingError
from stepscope.session.blocks import blocks_of, thinned
from stepscope.session.history import Follower, History, rank_folders, recent_steps
from stepscope.session.process import writer_runs
from stepscope.trace.history_file import HISTORY_FILE, RECENT_FILE, Block, Event, Process
from stepscope.trace.recording import RECORDING_FILE, SAMPLES_FILE, StepSample, began_s, read_facts
from stepscope.trace.recording_facts import RecordingFacts

MOST_BLOCKS = 16_000  # kept of all ranks together; of a longer run, older ones are merged
LEAST_BLOCKS = 400  # of one rank
MOST_GLANCE, LEAST_GLANCE = 2_000, 100  # blocks of all ranks, and of one, that a first look reads
MOST_STEPS = 100_000  # read of a recording without a history: all that it has
MOST_EVENTS = 5_000  # of one rank; the last ones
SILENT_S = 60.0  # the least time without a write after which a rank is called silent
MOST_SILENT_S = 3600.0  # and the most, if steps or evaluations are long
DEAD_S = 15.0  # without a write, if the process is gone
RECENT_NS, MOST_RECENT = 60_000_000_000, 2_000  # exact steps that are kept: as long, and as many
GONE_S = 10.0  # that a folder may be missing: a file server may be slow

State = Literal["starting", "running", "silent", "died", "finished", "failed"]


@dataclass(frozen=True)
class Rank:
    """One rank of a run, as far as it has written."""

    number: int | None  # None for a process without a rank
    history: History
    steps: tuple[StepSample, ...]  # the newest exact steps; they may be newer than the last block
    facts: RecordingFacts
    state: State
    silent_s: float  # since it last wrote, by our clock if we saw it
    is_alive: bool | None  # whether its process runs; None if that is on another machine

    @property
    def name(self) -> str:
        return self.history.folder.name if self.number is None else f"rank {self.number}"

    @property
    def num_steps(self) -> int:
        """How many steps have ended, counted from the first process, or from the beginning of a triggered window."""
        block = self.history.blocks[-1] if self.history.blocks else None
        last = max(block.step + block.num_steps if block else 0, self.steps[-1].step + 1 if self.steps else 0)
        return max(0, last - int((self.facts.get("triggered") or {}).get("first_step", 0)))

    @property
    def is_over(self) -> bool:
        return self.state in ("died", "finished", "failed")


class Watch:
    """Follows a run. `update()` reads what is new and returns the ranks."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self._clock, self._wall_clock = clock, wall_clock
        self._followed: dict[Path, _Followed] = {}
        self._missing_since: float | None = None

    def glance(self) -> tuple[Rank, ...]:
        """Return every rank as a part of its blocks shows it, sooner than `update`, which then reads all of them."""
        folders = self._folders()
        most = max(LEAST_GLANCE, MOST_GLANCE // len(folders))
        found = (_Followed(folder, self._clock, self._wall_clock, most) for folder in folders)
        return tuple(each.update(MOST_BLOCKS) for each in found)

    def update(self) -> tuple[Rank, ...]:
        """Return every rank, in order; RecordingError if the folder was deleted."""
        for folder in self._folders():
            if folder not in self._followed:
                self._followed[folder] = _Followed(folder, self._clock, self._wall_clock)
        most = max(LEAST_BLOCKS, MOST_BLOCKS // len(self._followed))
        return tuple(each.update(most) for each in self._followed.values())

    def _folders(self) -> list[Path]:
        try:
            folders = rank_folders(self.folder)
            self._missing_since = None if (self.folder / RECORDING_FILE).exists() else self._missing_since
        except OSError:
            folders = list(self._followed)
        if any(folder.name == "rank0" for folder in folders[1:]) and not (self.folder / HISTORY_FILE).exists():
            folders.remove(self.folder)  # a launcher, which trains nothing: its first rank has a folder of its own
            self._followed.pop(self.folder, None)
        if not (self.folder / RECORDING_FILE).exists():
            now = self._clock()
            self._missing_since = now if self._missing_since is None else self._missing_since
            if now - self._missing_since >= GONE_S or not self._followed:
                raise RecordingError(f"{self.folder} is not a recording any more: it was deleted or moved")
        return folders


class _Followed:
    """One rank's files."""

    def __init__(
        self, folder: Path, clock: Callable[[], float], wall_clock: Callable[[], float], most: int | None = None
    ) -> None:
        self._folder, self._clock, self._wall_clock = folder, clock, wall_clock
        self._follower = Follower(folder, most)
        self._processes: list[Process] = []
        self._blocks: list[Block] = []
        self._has_history = False  # else the blocks are made of exact steps
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._steps: list[StepSample] = []
        self._num_unread = self._num_left_out = 0
        self._facts: RecordingFacts = {"schema_version": 1, "status": "interrupted"}
        self._facts_file: tuple[int, int] | None = None
        self._seen_at: float | None = None  # when something new was read after the first look, on our clock
        self._began_at: float | None = None

    def update(self, most: int) -> Rank:
        self._read_facts()
        update = self._follower.read()
        is_first, self._began_at = self._began_at is None, self._began_at or self._clock()
        if is_first and not update.blocks:  # an old recording, or one that has just begun
            update = replace(update, steps=recent_steps(self._folder, MOST_STEPS))
        elif update.blocks or update.steps or update.events or update.processes:
            self._seen_at = None if is_first else self._clock()
        if update.starts_over:
            self._processes, self._blocks, self._steps, self._has_history = [], [], [], False
            self._events.clear()
        new = update.blocks
        if new and not self._has_history:
            self._blocks, self._has_history = [], True
        if not self._has_history:
            begin_s = self._blocks[-1].t if self._blocks else began_s(self._facts)
            new = tuple(blocks_of(update.steps, begin_s))
        self._blocks = thinned([*self._blocks, *new], most) if new else self._blocks
        self._processes += update.processes
        self._events.extend(update.events)
        self._steps = _newest([*self._steps, *update.steps])
        self._num_unread += update.num_unread
        self._num_left_out += update.num_left_out
        lines = tuple(self._processes), tuple(self._blocks), tuple(self._events)
        history = History(self._folder, *lines, self._num_unread, self._num_left_out)
        silent_s, is_alive = self._silent_s(), writer_runs(self._folder, self._facts)
        state = self._state(silent_s, is_alive)
        return Rank(self._number(), history, tuple(self._steps), self._facts, state, silent_s, is_alive)

    def _read_facts(self) -> None:
        try:
            status = (self._folder / RECORDING_FILE).stat()
            file = status.st_mtime_ns, status.st_ino
            if file != self._facts_file:
                self._facts = read_facts(self._folder, [])
                self._facts_file = file
        except (OSError, RecordingError):
            pass  # deleted, or on a server that does not answer: what was read before holds

    def _number(self) -> int | None:
        name = self._folder.name
        if name.startswith("process"):
            return None
        if name.startswith("rank") and name[4:].isascii() and name[4:].isdigit():
            return int(name[4:])
        rank: int = self._facts.get("environment", {}).get("rank", 0)
        return rank

    def _silent_s(self) -> float:
        """Return the seconds since it last wrote: by our clock if we saw it, else by the time of its files."""
        if self._seen_at is not None:
            return self._clock() - self._seen_at
        times = []
        for name in (HISTORY_FILE, RECENT_FILE, SAMPLES_FILE, RECORDING_FILE):
            try:
                times.append((self._folder / name).stat().st_mtime)
            except OSError:
                continue
        # A file of a machine whose clock is ahead is from the future.
        watched_s = self._clock() - (self._began_at or 0.0)
        return max(watched_s, self._wall_clock() - max(times, default=math.inf))

    def _state(self, silent_s: float, is_alive: bool | None) -> State:
        if (status := self._facts["status"]) in ("finished", "failed"):
            return "finished" if status == "finished" else "failed"
        if is_alive is False and silent_s >= DEAD_S:
            return "died"
        if not self._blocks:
            return "starting" if silent_s < MOST_SILENT_S or is_alive else "silent"
        longest_s = max(block.max_ns for block in self._blocks) / 1e9
        return "silent" if silent_s > min(MOST_SILENT_S, max(SILENT_S, 3 * longest_s)) else "running"


def _newest(steps: list[StepSample]) -> list[StepSample]:
    """Return the last steps of one process, of the last minute."""
    kept = steps[-MOST_RECENT:]
    last = kept[-1] if kept else None
    return [
        step
        for step in kept
        if last and last.end_ns - RECENT_NS < step.end_ns <= last.end_ns and step.step <= last.step
    ]

"""A whole run as series: its time in blocks of steps, and every other figure at the steps where it is known."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import NamedTuple

from stepscope.analysis.time.loop_time import BETWEEN
from stepscope.trace.recording import StepSample

MOST_BLOCKS = 500
"""Blocks that exact steps are joined into."""
_FEWEST_VALUES = 8
_LEAST_OTHERS = 0.05  # of all cores: every machine has a few other processes
FREE = "free"
RESTART = "restart"


class TimeBlock(NamedTuple):
    """The time of consecutive steps of one window."""

    step: int  # the first
    num_steps: int
    window: str
    start_ns: int  # since the beginning of the run
    end_ns: int
    wall_ns: int  # sum over the steps
    median_ns: float  # of a step, without what lies between steps if each step is known
    max_ns: int
    max_step: int
    host_ns: Mapping[str, int]  # sums; they add up to `wall_ns`
    num_times: Mapping[str, int]
    num_compiles: int
    num_tokens: int
    num_samples: int


class Happening(NamedTuple):
    """One thing that took long enough to be noted by itself."""

    kind: str  # an event of history.jsonl, or `restart`: another process goes on
    step: int
    start_ns: int  # since the beginning of the run
    ns: int
    place: str | None
    status: str | None = None  # of an `end`: how the process ended


@dataclass(frozen=True)
class Track:
    """One figure at the steps where it is known, in order."""

    steps: Sequence[int]
    ns: Sequence[int]  # since the beginning of the run
    values: Sequence[float]

    @classmethod
    def of(cls, points: Iterable[tuple[int, int, float]]) -> "Track":
        """Return the figure that has these values, each with its step and time."""
        known = list(points)
        return cls(*zip(*known)) if known else cls((), (), ())

    def mean(self, first: int, last: int) -> float | None:
        """Return the mean from one step to before another; None if it is not known there."""
        begin, end = bisect_left(self.steps, first), bisect_left(self.steps, last)
        return sum(self.values[begin:end]) / (end - begin) if end > begin else None

    def at(self, step: int) -> float | None:
        """Return the first value at a step or after it: readings are of the steps before them."""
        place = bisect_left(self.steps, step)
        return self.values[place] if place < len(self.values) else None

    def rises_by(self, per_step: float) -> bool | None:
        """Return whether the figure rises by so much per step from its first quarter to its last; None if too few
        values are known."""
        if len(self.values) < _FEWEST_VALUES:
            return None
        part = len(self.values) // 4
        begin, end = ((median(known[:part]), median(known[-part:])) for known in (self.steps, self.values))
        return end[1] - end[0] >= per_step * (begin[1] - begin[0])


@dataclass(frozen=True)
class Run:
    """A run of one rank, from its beginning to the last step that is known."""

    blocks: Sequence[TimeBlock]
    began: float | None = None  # Unix time in seconds of its beginning; None if it is unknown
    end_ns: int = 0  # of what is known, since the beginning
    tracks: Mapping[str, Track] = field(default_factory=dict)
    """By name: `loss`, `allocated_bytes`, `reserved_bytes`, `resident_bytes`, `total_bytes`, `num_collections`,
    `sm_clock_mhz`, `power_watts`, `gpu_busy_share`, `num_gpu_processes`, `energy_joules` …"""
    happenings: Sequence[Happening] = ()
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Lines that do what lies between steps, by kind."""
    tail_ns: Mapping[str, int] = field(default_factory=dict)
    """What the loop did after its last step, by kind, such as a last checkpoint."""
    tail_times: Mapping[str, int] = field(default_factory=dict)
    problems: Sequence[str] = ()
    """What of the history could not be read."""
    has_ended: bool = False
    """Whether the last process has said so; one that was killed has not."""

    @property
    def core_wait_share(self) -> float | None:
        """The share of time in which training waited for a CPU core, as a rule; None if it was not read."""
        track = self.tracks.get("core_wait_share")
        return median(track.values) if track is not None and track.values else None

    def core_wait_share_of(self, steps: Sequence[int]) -> float | None:
        """Return the share of time in which training waited for a CPU core in some steps; that of the run if it was
        not read there; None if it was never read."""
        waits = self.tracks.get("core_wait_share")
        known = [] if waits is None else [share for step in steps if (share := waits.at(step)) is not None]
        return sum(known) / len(known) if known else self.core_wait_share

    def core_wait_ns(self, steps: Sequence[StepSample]) -> float:
        """Return how long training waited for a CPU core in a step on average, as far as that was read."""
        waits = self.tracks.get("core_wait_share")
        if waits is None or not steps:
            return 0.0
        return sum(sample.wall_ns * (waits.at(sample.step) or 0.0) for sample in steps) / len(steps)

    def share_of_others(self, steps: Sequence[int]) -> float:
        """Return the share of time in which training waited for a CPU core in some steps, if other processes used the
        cores too; else 0."""
        waits, others = self.tracks.get("core_wait_share"), self.tracks.get("others_share")
        if waits is None or others is None or not steps:
            return 0.0
        known = [waits.at(step) or 0.0 for step in steps if (others.at(step) or 0.0) >= _LEAST_OTHERS]
        return sum(known) / len(steps)

    @property
    def num_steps(self) -> int:
        return sum(block.num_steps for block in self.blocks)

    @property
    def first_step(self) -> int:
        return self.blocks[0].step if self.blocks else 0

    @property
    def last_step(self) -> int:
        return self.blocks[-1].step + self.blocks[-1].num_steps - 1 if self.blocks else 0

    @property
    def free(self) -> Sequence[TimeBlock]:
        """The blocks that no probe disturbs, without those that compile; of free running if most are."""
        quiet = [block for block in self.blocks if not block.num_compiles]
        free = [block for block in quiet if block.window == FREE]
        if free and len(free) >= len(quiet) // 2:
            return free
        return [block for block in quiet if block.window == "clean"] or quiet

    def ns_of(self, step: int) -> int:
        """Return when a step began, in ns since the beginning of the run."""
        place = bisect_left(self.blocks, step + 1, key=lambda block: block.step) - 1
        if place < 0:
            return 0
        block = self.blocks[place]
        share = min(1.0, (step - block.step) / block.num_steps)
        return block.start_ns + round(share * (block.end_ns - block.start_ns))

    def when(self, step: int) -> str:
        """Return a step and the time of day when it ran: `step 1,200 (14:32:07)`."""
        return f"step {step:,}{self.clock_text(self.ns_of(step), ' ({})')}"

    def clock_text(self, ns: int, form: str = "{}") -> str:
        """Return the local time of day in `form`, with the date on another day than the first; empty if unknown."""
        if self.began is None:
            return ""
        try:
            moment, first = (datetime.fromtimestamp(self.began + at / 1e9) for at in (ns, 0))
        except (OverflowError, OSError, ValueError):
            return ""
        day = "" if moment.date() == first.date() else "%b %d, "
        return form.format(moment.strftime(f"{day}%H:%M:%S"))


def blocks_of_steps(
    samples: Iterable[StepSample], origin_ns: int, num_steps: int, ends: Container[int] = ()
) -> list[TimeBlock]:
    """Return exact steps as at most `MOST_BLOCKS` blocks, and more where windows end, and after the steps `ends`."""
    length = max(1, num_steps // MOST_BLOCKS)
    found: list[TimeBlock] = []
    pending: list[StepSample] = []
    for sample in samples:
        if pending and (
            len(pending) >= length
            or pending[-1].step in ends
            or sample.window != pending[0].window
            or bool(sample.num_compiles) != bool(pending[0].num_compiles)
        ):
            found.append(_joined(pending, origin_ns))
            pending = []
        pending.append(sample)
    return [*found, _joined(pending, origin_ns)] if pending else found


def _joined(samples: Sequence[StepSample], origin_ns: int) -> TimeBlock:
    first, last, longest = samples[0], samples[-1], max(samples, key=lambda sample: sample.wall_ns)
    return TimeBlock(
        step=first.step,
        num_steps=len(samples),
        window=first.window,
        start_ns=first.start_ns - origin_ns,
        end_ns=last.end_ns - origin_ns,
        wall_ns=sum(sample.wall_ns for sample in samples),
        median_ns=median(own_ns(sample.wall_ns, sample.host_ns) for sample in samples),
        max_ns=longest.wall_ns,
        max_step=longest.step,
        host_ns=summed(sample.host_ns for sample in samples),
        num_times=summed(sample.num_times for sample in samples),
        num_compiles=sum(sample.num_compiles for sample in samples),
        num_tokens=sum(sample.num_tokens or 0 for sample in samples),
        num_samples=sum(sample.num_samples or 0 for sample in samples),
    )


def own_ns(wall_ns: int, host_ns: Mapping[str, int]) -> int:
    """Return the time of steps without what lies between them."""
    return wall_ns - sum(host_ns.get(kind, 0) for kind in BETWEEN)


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)

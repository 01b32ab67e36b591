"""A recording's whole run as series: exact steps where all of them were kept, otherwise the blocks of its history."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

from stepscope.analysis.run.series import (
    MOST_BLOCKS,
    RESTART,
    Happening,
    Run,
    TimeBlock,
    Track,
    blocks_of_steps,
    own_ns,
)
from stepscope.analysis.time.loop_time import BETWEEN
from stepscope.session.history import History, load
from stepscope.trace.history_file import HISTORY_FILE, Block, Event, Process
from stepscope.trace.recording import CounterSample, Recording

_OF_BLOCK = (
    "allocated_bytes", "reserved_bytes", "peak_bytes", "resident_bytes", "total_bytes", "available_bytes",
    "num_collections", "core_share", "core_wait_share", "others_share",
)  # fmt: skip
_OF_GPU = {
    "power_watts": "power_watts", "sm_clock_mhz": "sm_clock_mhz", "gpu_busy_share": "busy_share",
    "gpu_memory_bytes": "memory_bytes", "energy_joules": "energy_joules", "num_gpu_processes": "num_processes",
}  # fmt: skip
_COUNTERS = {"power_watts": "power_watts", "sm_clock_mhz": "sm_clock_mhz", "gpu_busy_share": "gpu_busy_share"}


def read_history(folder: Path) -> History | None:
    """Return the history of a rank; None if it has none, as before Stepscope recorded whole runs."""
    return load(folder) if (folder / HISTORY_FILE).is_file() else None


def run_of(recording: Recording | None, history: History | None) -> Run:
    """Return the whole run of a recording, of a history that still grows, or of both."""
    samples = recording.samples if recording is not None else ()
    firsts = samples or (history.blocks if history is not None else ())
    position = _Position(history, firsts[0].start_ns if firsts else 0)
    blocks = position.blocks(history.blocks) if history is not None else []
    tracks = {name: track for name, track in position.tracks(history) if track.values} if history is not None else {}
    last = blocks[-1].step + blocks[-1].num_steps if blocks else 0
    if recording is not None and samples and len(position.processes) < 2 and samples[-1].step + 1 >= last:
        waits = tracks.get("core_wait_share")  # is that of the steps since it was read before
        read_at = frozenset(waits.steps if waits is not None else ())
        blocks = blocks_of_steps(samples, position.origin_ns, len(samples), read_at)  # exact
        tracks |= _tracks_of_steps(recording, position.origin_ns, tracks)
    facts: Any = recording.facts if recording is not None else {}
    events = position.happenings(history.events) if history is not None else ()
    happenings = sorted(events, key=lambda each: each.start_ns)
    tail = recording.tail if recording is not None else None
    after_ns, after_times = _after_last_step(history) if history is not None else ({}, {})
    ends = [block.end_ns for block in blocks[-1:]] + [each.start_ns + each.ns for each in happenings]
    if tail is not None and len(position.processes) < 2:
        ends.append(tail.start_ns + tail.wall_ns - position.origin_ns)
    return Run(
        blocks,
        began=position.began,
        end_ns=max(ends, default=0),
        tracks=tracks,
        happenings=happenings,
        places={kind: tuple(sorted(places, key=lambda place: -places[place]))
                for kind, places in (facts.get("between") or {}).items()},
        tail_ns=after_ns if tail is None else tail.host_ns,
        tail_times=after_times if tail is None else tail.num_times,
        problems=tuple(f"{HISTORY_FILE}: {problem}" for problem in history.problems) if history is not None else (),
        has_ended=any(each.kind == "end" for each in happenings[-1:])
        or (recording is not None and recording.status != "interrupted"),
    )  # fmt: skip


def _after_last_step(history: History) -> tuple[dict[str, int], dict[str, int]]:
    """Return what the last process did after its last step, and how often."""
    ns, times = Counter[str](), Counter[str]()
    last = history.blocks[-1] if history.blocks else None
    for event in history.events:
        if last is not None and event.process == last.process and event.start_ns >= last.end_ns:
            num = event.details.get("num_times")
            if event.event in BETWEEN and isinstance(num, int):
                ns[event.event] += event.ns
                times[event.event] += num
    return ns, times


class _Position:
    """Where the moments and steps of several processes are in one run.

    Each process has a monotonic clock, which stands still while the machine sleeps, and counts its steps from 0.
    """

    def __init__(self, history: History | None, first_ns: int) -> None:
        self.processes: Sequence[Process] = history.processes if history is not None else ()
        self.began = self.processes[0].began if self.processes else None
        self.origin_ns = self.processes[0].start_ns if self.processes else first_ns
        steps: dict[int, int] = {}
        for block in history.blocks if history is not None else ():
            steps[block.process] = max(steps.get(block.process, 0), block.step + block.num_steps)
        num = max([len(self.processes), *(process + 1 for process in steps)])
        self._first_steps = [0, *accumulate(steps.get(process, 0) for process in range(num))]
        slept: dict[int, list[tuple[int, int]]] = {}
        for event in history.events if history is not None else ():
            if event.event == "suspended":
                slept.setdefault(event.process, []).append((event.start_ns, event.ns))
        ordered = {process: sorted(naps) for process, naps in slept.items()}
        # By process: when each nap was noted, and how long all until then were.
        self._slept = {
            process: ([at for at, _ in naps], [0, *accumulate(ns for _, ns in naps)])
            for process, naps in ordered.items()
        }

    def step(self, each: Block | Event) -> int:
        return self._first_steps[each.process] + each.step

    def ns(self, process: int, ns: int) -> int:
        """Return a moment in ns since the beginning; if the machine slept then, the moment it woke up."""
        if process >= len(self.processes) or self.began is None:
            return ns - self.origin_ns
        naps, sums = self._slept.get(process, ((), (0,)))
        slept_ns = sums[bisect_right(naps, ns)]
        own = self.processes[process]
        return ns - own.start_ns + slept_ns + round((own.began - self.began) * 1e9)

    def blocks(self, blocks: Sequence[Block]) -> list[TimeBlock]:
        found = []
        for block in blocks:
            start_ns = self.ns(block.process, block.start_ns)
            between = block.wall_ns - own_ns(block.wall_ns, block.host_ns)
            # If most steps do something else between them, the median contains it.
            is_usual = sum(block.num_times.values()) > block.num_steps / 2
            middle = block.median_ns - (between / block.num_steps if is_usual else 0)
            middle = block.wall_ns - between if block.num_steps == 1 else middle
            found.append(
                TimeBlock(
                    step=self.step(block),
                    num_steps=block.num_steps,
                    window=block.window,
                    start_ns=start_ns,
                    end_ns=max(start_ns + block.wall_ns, self.ns(block.process, block.end_ns - 1) + 1),
                    wall_ns=block.wall_ns,
                    median_ns=max(1.0, middle),
                    max_ns=block.max_ns,
                    max_step=self._first_steps[block.process] + block.max_step,
                    host_ns=block.host_ns,
                    num_times=block.num_times,
                    num_compiles=block.num_compiles,
                    num_tokens=block.num_tokens or 0,
                    num_samples=block.num_samples or 0,
                )
            )
        return found

    def tracks(self, history: History) -> Iterator[tuple[str, Track]]:
        blocks = history.blocks
        # At the last step of each block; a week has 10,000 of them.
        ends = [(self.step(block) + block.num_steps - 1, self.ns(block.process, block.end_ns)) for block in blocks]
        for name in _OF_BLOCK:
            yield name, _track(ends, map(attrgetter(name), blocks))
        for name, field in _OF_GPU.items():
            yield name, _track(ends, (None if block.gpu is None else getattr(block.gpu, field) for block in blocks))
        yield "loss", self._losses(blocks)

    def _losses(self, blocks: Sequence[Block]) -> Track:
        found = {}
        for block in blocks:
            first = self._first_steps[block.process]
            for step, loss in ((block.max_loss_step, block.max_loss), (block.loss_step, block.loss)):
                if step is not None and loss is not None:
                    share = (step + 1 - block.step) / block.num_steps
                    ns = block.start_ns + round(share * (block.end_ns - block.start_ns))
                    found[first + step] = self.ns(block.process, ns), loss
        return Track.of((step, *point) for step, point in sorted(found.items()))

    def happenings(self, events: Sequence[Event]) -> Iterator[Happening]:
        for number, process in enumerate(self.processes[1:], 1):
            ns = round((process.began - self.processes[0].began) * 1e9)
            yield Happening(RESTART, self._first_steps[number], ns, 0, None)
        for event in events:
            ns = self.ns(event.process, event.start_ns)
            status = event.details.get("status")
            status = status if isinstance(status, str) else None
            yield Happening(event.event, self.step(event), ns, event.ns, event.place, status)


def _track(ends: Sequence[tuple[int, int]], values: Iterable[float | None]) -> Track:
    """Return a figure at the steps and times where it is known."""
    return Track.of((step, ns, value) for (step, ns), value in zip(ends, values) if value is not None)


def _tracks_of_steps(recording: Recording, origin_ns: int, known: dict[str, Track]) -> Iterator[tuple[str, Track]]:
    """Yield the losses of exact steps, and NVML's counters where no history has them."""
    losses: dict[int, tuple[int, float]] = {}
    if (track := known.get("loss")) is not None:
        losses = {step: (ns, loss) for step, ns, loss in zip(track.steps, track.ns, track.values)}
    losses |= {one.step: (one.end_ns - origin_ns, one.loss) for one in recording.samples if one.loss is not None}
    if losses:
        yield "loss", Track.of((step, *point) for step, point in sorted(losses.items()))
    for name, field in _COUNTERS.items():
        if name not in known and (track := _counter_track(recording, field, origin_ns)).values:
            yield name, track


def _counter_track(recording: Recording, field: str, origin_ns: int) -> Track:
    """Return a counter of NVML as means of stretches, each at the step during which it ends."""
    counters: list[CounterSample] = [one for one in recording.counters if getattr(one, field) is not None]
    length = max(1, len(counters) // MOST_BLOCKS)
    steps, times, values = [], [], []
    samples, at = recording.samples, 0
    for i in range(0, len(counters), length):
        group = counters[i : i + length]
        while at + 1 < len(samples) and samples[at + 1].start_ns <= group[-1].t_ns:
            at += 1
        steps.append(samples[at].step)
        times.append(group[-1].t_ns - origin_ns)
        values.append(sum(getattr(one, field) for one in group) / len(group))
    return Track(steps, times, values)

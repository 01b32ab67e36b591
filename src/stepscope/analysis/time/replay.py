"""Replays a trace with changes: how long a step takes if a kernel is faster or a launch is gone.

The host is a sequence of ticks: the start and return of every call that launches GPU work or waits for it. The time
between two ticks is the host's own and is kept. GPU work starts when it has been launched, its stream is free, and
work of another stream that it waits for is done. A call that waits returns when that work is done; a launch into a
full queue when there is room. Additional delays of a launch or stream in the trace are kept if they decided the
start, and replaced by typical ones otherwise.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from statistics import median, median_low
from typing import Any

import polars as pl

from stepscope.analysis.structure.intervals import covered_before, length_ns, spans, union
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import matches
from stepscope.analysis.structure.once import once
from stepscope.analysis.time.idle_causes import ALLOCATING, PLANNING_NS
from stepscope.analysis.time.overhead import MOST_SLOWER, NOTHING, PROFILER_SHARE, Overhead, recorded_ns
from stepscope.analysis.time.syncs import syncs

_QUEUE_LENGTH = 1024  # queued GPU events before the next launch blocks
_HELD_NS = 10_000  # A stream that could continue but does not for longer than this is blocked by something
_STOOD_NS = 1_000_000  # pauses between queued GPU work are shorter
_NEVER, _PARTS = 2**62, 2**12
_LEAST_SHARE = 0.2  # the profiler's part never reduces the host time between two ticks below this share
_MOST_STEPS = 8  # for long traces: more steps add little, but cost time in each replay
_LIKE = 1.25  # steps within this factor are alike
_LATENCY_NS, _PAUSE_NS, _NUM_TYPICAL = 5_000, 1_500, 8
"""Launch to start and kernel to kernel, if a trace has too few to tell."""

_START, _RETURN, _BORDER = 0, 1, 2
_FREEING = r"^(cuda|hip)Free$"


@dataclass(frozen=True)
class Change:
    """Changes in a replay; nothing by default."""

    duration_ns: Mapping[int, float] = field(default_factory=dict)  # new duration by `event` of GPU work
    gone: frozenset[int] = frozenset()  # the `event`s of GPU work that is removed
    host: pl.DataFrame | None = None
    """Host time that shrinks: `start_ns`, `end_ns`, disjoint and ordered, and the `factor` that is left."""
    unwaited: frozenset[int] = frozenset()  # the `event`s of calls that no longer wait
    overhead: Overhead = NOTHING  # subtracted from host time; by default the trace is replayed as recorded


@dataclass(frozen=True)
class Replayed:
    """A window of steps as replayed; a trace without steps counts as one."""

    step_ns: float  # from the first step's start to the last one's end on the host, per step
    done_ns: float  # the same between ends of GPU work, at least `host_ns`: the step time of a long run
    device_ns: float  # sum of GPU work per step
    host_ns: float  # A step if the host never waits for the GPU


@dataclass(frozen=True)
class _Tick:
    time_ns: int
    kind: int
    call: int  # the call's `event`; for work without a launch in the trace, a negative number of its own
    num_events: int  # what the profiler recorded since the tick before, in usual events


class Replay:
    """Consecutive steps of a trace, ready to be replayed: all, or `steps`."""

    def __init__(self, linked: Linked, steps: pl.DataFrame | None = None) -> None:
        steps = linked.steps.table if steps is None else steps
        self.num_steps = max(1, steps.height)
        bounds = steps if steps.height else _without_steps(linked)
        self.start_ns, self.end_ns = _least(bounds["start_ns"].min()), _least(bounds["end_ns"].max())
        self._read_device(linked)
        self._read_calls(linked)
        self._settle_starts()

    def _read_device(self, linked: Linked) -> None:
        """Return GPU work by launch, then by start.

        Unfinished work from before the window is launched at its beginning. Work without a launch in the trace is
        launched with the work before it on its stream; or before the trace, if the following work on its stream was
        launched before it started or if the GPU was never idle until then; else when it starts.
        """
        issued = pl.when(pl.col("launch").is_not_null()).then("issued_ns")
        work = linked.device.with_columns(
            pl.struct("device", "stream").rank("dense").alias("lane"), issued.alias("given")
        ).sort("start_ns", "event")
        next_given = pl.col("given").backward_fill().over("lane")
        is_queued = (pl.col("start_ns") > next_given) | (
            (pl.col("start_ns") < _first_idle_ns(work)) & next_given.is_not_null()
        )
        queued = pl.when(is_queued).then(self.start_ns - 1)
        given = pl.coalesce(pl.col("given").forward_fill().over("lane"), queued, "start_ns")
        work = work.with_columns(pl.col("given").is_not_null().alias("is_launched"), given.alias("given"))
        is_before = pl.col("given") < self.start_ns
        work = work.filter(pl.col("given") < self.end_ns, ~is_before | (pl.col("end_ns") > self.start_ns))
        work = work.sort(~is_before, "given", "start_ns", "event")
        before = work.filter(is_before)
        self._num_before = before.height
        self._busy_before = _busy_until(before, self.start_ns)
        inside = work.with_columns(pl.col("given").clip(self.start_ns))
        columns = (inside[name].to_list() for name in ("event", "lane", "stream", "start_ns", "end_ns", "given"))
        self._events, self._lane, self._stream, self._starts, self._ends, self._issued = columns
        self._durations = [float(end - start) for start, end in zip(self._starts, self._ends)]
        calls = linked.host["event"].gather(inside["launch"]).to_list()
        returned = linked.host["end_ns"].gather(inside["launch"]).fill_null(inside["given"])
        self._returned: list[int] = returned.clip(self.start_ns).to_list()
        self._work: dict[int, list[int]] = {}
        for index, call in enumerate(calls):
            is_alone = call is None or index < self._num_before
            self._work.setdefault(-1 - self._events[index] if is_alone else call, []).append(index)

    def _read_calls(self, linked: Linked) -> None:
        """Read the host's ticks, and until when each call waited."""
        host = linked.host
        waits = syncs(linked).filter(pl.col("kind") == "host_wait", pl.col("thread").is_not_null())
        until = pl.col("start_ns") + pl.col("wait_ns").fill_null(0)
        self._waits: dict[int, tuple[int, int | None]] = {
            event: (until_ns, stream)
            for event, until_ns, stream in waits.select("event", until, "wait_on_stream").rows()
        }
        self._waits |= self._frees(host)
        calls = host.filter(
            pl.col("event").is_in([call for call in self._work if call >= 0] + list(self._waits)),
            pl.col("start_ns") >= self.start_ns,
            pl.col("start_ns") < self.end_ns,
        )
        ticks = [(self._issued[work[0]], _START, call) for call, work in self._work.items() if call < 0]
        for event, start, end in calls.select("event", "start_ns", "end_ns").iter_rows():
            ticks += [(start, _START, event), (min(end, self.end_ns), _RETURN, event)]
        # Work without a launch at the same moment keeps its order.
        ticks.sort(key=lambda tick: (tick[0], tick[1], max(tick[2], -1)))
        ticks = [(self.start_ns, _BORDER, 0), *ticks, (self.end_ns, _BORDER, 0)]
        # The driver's allocator does not run faster without the profiler.
        inside = (pl.col("start_ns") >= self.start_ns) & (pl.col("end_ns") <= self.end_ns)
        length = pl.col("end_ns") - pl.col("start_ns")
        allocating = host.filter(host["kind"].is_in(["runtime", "driver"]) & matches(host["name"], ALLOCATING))
        self._allocating_ns = int(allocating.filter(inside, length < PLANNING_NS).select(length.sum()).item())
        times = pl.Series([time for time, _, _ in ticks], dtype=pl.Int64)
        counts = recorded_ns(host).search_sorted(times, side="right").to_list()
        self._ticks = [
            _Tick(time, kind, call, max(0, after - before))
            for (time, kind, call), before, after in zip(ticks, [counts[0], *counts], counts)
        ]

    def _frees(self, host: pl.DataFrame) -> dict[int, tuple[int, int | None]]:
        """Return until when each call that frees memory of the GPU waited for all of its work."""
        found = host.filter(matches(host["name"], _FREEING)).select("event", "start_ns", "end_ns")
        found = found.filter(pl.col("start_ns") >= self.start_ns, pl.col("start_ns") < self.end_ns)
        reach = list(accumulate(self._ends, max))
        waits: dict[int, tuple[int, int | None]] = {}
        for event, start_ns, end_ns in found.iter_rows():
            place = bisect_left(self._issued, start_ns)
            waits[event] = (min(max(reach[place - 1] if place else 0, start_ns), end_ns), None)
        return waits

    def _settle_starts(self) -> None:
        """Determine what decided the start of each GPU event, and the additional delay."""
        count = len(self._events)
        free = [self.start_ns] * count
        end_of: dict[int, int] = {}
        for i in range(count):  # in launch order, which is the replay order
            free[i] = end_of.get(self._lane[i], self.start_ns)
            end_of[self._lane[i]] = self._ends[i]
        latencies = [start - issued for start, issued in zip(self._starts, self._issued)]
        pauses = [start - end for start, end in zip(self._starts, free)]
        idle = [latencies[i] for i in range(count) if self._issued[i] > free[i]]
        queued = [pauses[i] for i in range(count) if free[i] > self._issued[i] + 2 * _LATENCY_NS]
        self.latency_ns = median(idle) if len(idle) >= _NUM_TYPICAL else _LATENCY_NS
        self.pause_ns = max(0.0, median(queued)) if len(queued) >= _NUM_TYPICAL else _PAUSE_NS
        self._latency: list[float] = [min(self.latency_ns, latency) for latency in latencies]
        self._pause: list[float] = [min(self.pause_ns, pause) for pause in pauses]
        self._holder: list[int | None] = [None] * count
        in_order = sorted(range(count), key=lambda i: self._ends[i])
        ends = [self._ends[i] for i in in_order]
        for i in range(count):
            ready = max(free[i], self._issued[i] + self.latency_ns)
            if self._starts[i] - ready > _HELD_NS:
                other = in_order[bisect_right(ends, self._starts[i]) - 1]
                if self._lane[other] != self._lane[i] and self._ends[other] > ready and other < i:
                    self._holder[i] = other
                    continue
            if free[i] > self._issued[i] + self.latency_ns:
                self._pause[i] = pauses[i]
            else:
                self._latency[i] = latencies[i]
        # When a launch returned, all but a queue's length of the earlier work had started.
        started = list(accumulate(self._starts, max))
        waiting = (i + 1 - bisect_right(started, returned) for i, returned in enumerate(self._returned))
        self._queue_length = max([_QUEUE_LENGTH, *waiting])

    @cached_property
    def _own(self) -> list[tuple[_Tick, int, int]]:
        """Each tick with the time of the one before, and when the host's own time since then begins: after a wait."""
        times = [self.start_ns, *(tick.time_ns for tick in self._ticks)]
        return [
            (tick, last_ns, min(max(last_ns, self._released_ns(tick)), tick.time_ns))
            for tick, last_ns in zip(self._ticks, times)
        ]

    @cached_property
    def usual_overhead(self) -> Overhead:
        """What the profiler adds, from this trace's host time per event without pauses and the driver's allocator."""
        time, last, since, num = self._times
        own_ns = (time - since).cast(pl.Float64)
        is_short = (last < time) & (own_ns < PLANNING_NS)
        num_events = (num * own_ns / (time - last)).filter(is_short).sum()
        spent_ns = PROFILER_SHARE * max(0.0, own_ns.filter(is_short).sum() - self._allocating_ns)
        return Overhead(spent_ns / num_events if num_events else 0.0)

    def overhead_at(self, clean_ns: float) -> Overhead:
        """Return the overhead if a clean step takes so long: less per event than usual, or a host that was slower."""
        usual_ns = self.usual_overhead.ns_per_event
        is_enough = self.play(Change(overhead=self.usual_overhead)).done_ns <= clean_ns

        def change(share: float) -> Change:
            ns, factor = (usual_ns * share, 1.0) if is_enough else (usual_ns, 1 - MOST_SLOWER * share)
            return Change(overhead=Overhead(ns, factor))

        shares = [part / _PARTS for part in range(_PARTS + 1)]
        least = bisect_left(shares, True, hi=_PARTS, key=lambda share: self.play(change(share)).done_ns <= clean_ns)
        return change(shares[least]).overhead

    @property
    def events(self) -> list[int]:
        """GPU work launched within the window, by `event`."""
        return self._events[self._num_before :]

    @property
    def waits(self) -> list[int]:
        """Calls that wait for the GPU, by `event`."""
        return [tick.call for tick in self._ticks if tick.kind == _RETURN and tick.call in self._waits]

    @property
    def recorded(self) -> Replayed:
        """The window with the trace's own times, not replayed."""
        device_ns = sum(self._ends[self._num_before :]) - sum(self._starts[self._num_before :])
        return self._replayed(
            self.end_ns, max([self.end_ns, *self._ends]), device_ns, length_ns(self.host_stretches())
        )

    def _replayed(self, end_ns: float, done_ns: float, device_ns: float, host_ns: float) -> Replayed:
        totals = (end_ns - self.start_ns, max(done_ns - self._busy_before, host_ns), device_ns, host_ns)
        return Replayed(*(ns / self.num_steps for ns in totals))

    @once
    def host_stretches(self) -> pl.DataFrame:
        """Return host time by tick: `start_ns`, `end_ns`, and the `call` that ends it (null at the window's end),
        without waits."""
        rows = [
            (since, tick.time_ns, None if tick.kind == _BORDER or tick.call < 0 else tick.call)
            for tick, _, since in self._own
            if tick.time_ns > since
        ]
        return pl.DataFrame(rows, schema=dict.fromkeys(("start_ns", "end_ns", "call"), pl.Int64), orient="row")

    def _room(self, call: int) -> int | None:
        """Return the GPU work that must start before a launch into the queue returns; None if there is room."""
        work = self._work.get(call)
        return work[-1] - self._queue_length if work and work[-1] >= self._queue_length else None

    def _released_ns(self, tick: _Tick) -> int:
        """Return when a waiting call was released by the GPU, in the trace."""
        if tick.kind != _RETURN:
            return 0
        if tick.call in self._waits:
            return self._waits[tick.call][0]
        room = self._room(tick.call)
        return 0 if room is None else self._starts[room]

    @cached_property
    def _times(self) -> pl.DataFrame:
        """The ticks' times: each tick's own, that of the one before, the begin of the host's own time, its events."""
        rows = [(tick.time_ns, last_ns, since, tick.num_events) for tick, last_ns, since in self._own]
        return pl.DataFrame(rows, schema=dict.fromkeys(("time", "last", "since", "num"), pl.Int64), orient="row")

    @cached_property
    def _deeds(self) -> list[tuple[int | None, int | None, int | None, list[tuple[Any, ...]]]]:
        """What each tick does: the call that waits and its stream; the work that must start; the work launched, with
        its lane, stream, holder, pause and latency."""
        deeds: list[tuple[int | None, int | None, int | None, list[tuple[Any, ...]]]] = []
        facts = list(zip(range(len(self._lane)), self._lane, self._stream, self._holder, self._pause, self._latency))
        for tick in self._ticks:
            is_wait = tick.kind == _RETURN and tick.call in self._waits
            room = self._room(tick.call) if tick.kind == _RETURN and not is_wait else None
            waits = (tick.call, self._waits[tick.call][1]) if is_wait else (None, None)
            work = self._work.get(tick.call, []) if tick.kind == _START else []
            deeds.append((*waits, room, [facts[i] for i in work]))
        return deeds

    @cached_property
    def _place(self) -> dict[int, int]:
        return {event: place for place, event in enumerate(self._events)}

    def _own_ns(self, change: Change) -> list[float]:
        """Return the host's own time before each tick."""
        time, last, since, num = self._times
        own: pl.Series = (time - since).cast(pl.Float64)
        if change.host is not None and change.host.height:
            share = 1 - change.host["factor"]
            covered = covered_before(change.host, pl.concat([time, since]), share)
            own -= covered.head(len(own)) - covered.tail(len(own))
        if change.overhead.ns_per_event:
            written = num.cast(pl.Float64) * change.overhead.ns_per_event * own / (time - last)
            least, rest = own * _LEAST_SHARE, own - written
            own = own.zip_with(own == 0, least.zip_with(least > rest, rest))
        if change.overhead.factor < 1:  # a pause does not depend on the host's speed
            own = own.zip_with(time - since >= PLANNING_NS, own * change.overhead.factor)
        return own.to_list()

    def play(self, change: Change) -> Replayed:
        durations = [*self._durations]
        gone = {self._place[event] for event in change.gone if event in self._place}
        for event, ns in (*change.duration_ns.items(), *((event, 0.0) for event in change.gone)):
            if event in self._place:
                durations[self._place[event]] = float(ns)
        starts, ends = [0.0] * len(durations), [0.0] * len(durations)
        lane_end = dict.fromkeys(self._lane, float(self.start_ns))
        stream_end = dict.fromkeys(self._stream, 0.0)
        last_end = now = float(self.start_ns)
        times_ns, unwaited = self._own_ns(change), change.unwaited
        for own, (call, stream, room, work) in zip(times_ns, self._deeds):
            if room is not None:
                now = starts[room] if starts[room] > now else now
            elif call is not None and call not in unwaited:
                now = max(now, last_end if stream is None else stream_end.get(stream, 0.0))
            now += own
            for i, lane, stream, holder, pause, latency in work:
                start = lane_end[lane]
                if i in gone:
                    starts[i] = ends[i] = start
                    continue
                start += pause
                if (ready := now + latency) > start:
                    start = ready
                if holder is not None:
                    start = max(start, ends[holder] + self._starts[i] - self._ends[holder])
                end = start + durations[i]
                starts[i] = start
                ends[i] = lane_end[lane] = end
                if end > stream_end[stream]:
                    stream_end[stream] = end
                if end > last_end:
                    last_end = end
        *_, host_end = accumulate(times_ns, initial=float(self.start_ns))  # as `now` adds it up, without the waits
        return self._replayed(now, max(now, last_end), sum(durations[self._num_before :]), host_end - self.start_ns)


def typical_steps(linked: Linked) -> pl.DataFrame:
    """Return the last eight of the longest run of consecutive steps with similar times.

    The profiler or a one-time event may slow down a step, and a step may be empty. Steps are compared with the
    median, or with the faster of two.
    """
    steps = linked.steps.table
    lengths = (steps["end_ns"] - steps["start_ns"]).to_list()
    working = set(linked.device["step"].drop_nulls())
    is_working = [not working or step in working for step in steps["step"]]
    typical = median_low([length for length, works in zip(lengths, is_working) if works] or [0])
    best, first = (0, 0), 0
    for i, length in enumerate(lengths):
        if not is_working[i] or not typical / _LIKE <= length <= typical * _LIKE:
            first = i + 1
        elif i + 1 - first >= best[1] - best[0]:
            best = (first, i + 1)
    return steps.slice(best[0], best[1] - best[0]).tail(_MOST_STEPS)


def _without_steps(linked: Linked) -> pl.DataFrame:
    """Return the window of a trace without steps: from the first launch on, if there is one."""
    whole = pl.concat([spans(linked.host, linked.host["kind"] != "overhead"), spans(linked.device)])
    return whole.with_columns(pl.col("start_ns").clip(_least(linked.device["launch_start_ns"].min())))


def _first_idle_ns(work: pl.DataFrame) -> int:
    """Return when the GPU was first idle for longer than between queued events."""
    reach = work["end_ns"].cum_max().shift(1)
    stood = work["start_ns"].filter((work["start_ns"] - reach > _STOOD_NS).fill_null(False))
    return int(stood[0]) if len(stood) else _NEVER


def _busy_until(before: pl.DataFrame, start_ns: int) -> int:
    """Return when the GPU finishes earlier work, from a window's beginning on.

    Work without a known launch may have been launched late: only its busy time counts.
    """
    known = _least(before.filter("is_launched")["end_ns"].max(), start_ns)
    joined = union(before.select(pl.col("start_ns").clip(start_ns), pl.col("end_ns") + _HELD_NS))
    return max(known, start_ns + length_ns(joined) - _HELD_NS * joined.height)


def _least(value: object, least: int = 0) -> int:
    return max(value, least) if isinstance(value, int) else least

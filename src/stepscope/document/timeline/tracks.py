"""Tracks of the timeline from top to bottom, each with lanes on which nothing overlaps."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import ancestor, matches
from stepscope.document.timeline.colors import host_colors, module_colors, named_colors, range_colors
from stepscope.formatting import plural, safe

MOST_LANES = 96  # lanes of a track; deeper events are only counted
_MOST_BESIDE = 24  # lanes of a stream whose work runs in parallel

LANE = {"lane": pl.UInt32, "table": pl.UInt8, "place": pl.UInt32, "start_ns": pl.Int64, "end_ns": pl.Int64,
        "color": pl.UInt8, "weight_ns": pl.Int64}  # fmt: skip
"""Columns of the events: `table` is an index into `TABLES`, `place` the row there; heavier events are kept first."""
TABLES = ("steps", "phases", "modules", "runs", "host", "ranges", "gpu")


@dataclass(frozen=True)
class Track:
    """A group of lanes that begins at `first_lane`."""

    kind: str
    title: str
    detail: str  # what the track shows
    first_lane: int
    num_lanes: int
    is_copy: bool = False  # whether another track shows the same events


@dataclass
class Lanes:
    """The tracks of a trace, and every event that is on one of them."""

    tracks: list[Track] = field(default_factory=list)
    events: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=LANE))
    runs: pl.DataFrame = field(default_factory=pl.DataFrame)  # modules on the GPU
    left_out: list[str] = field(default_factory=list)  # sentences about what is on no track
    num_left_out: int = 0  # events that are on no track

    @property
    def num(self) -> int:
        return sum(track.num_lanes for track in self.tracks)

    def leave_out(self, num_events: int, text: str) -> None:
        """Count events that are on no track, and say which."""
        self.left_out.append(text)
        self.num_left_out += num_events

    def add_nested(self, kind: str, title: str, detail: str, events: pl.DataFrame, table: str) -> None:
        """Add a track of nested events, one lane per `depth`."""
        deepest = int(events["depth"].max()) + 1  # type: ignore[arg-type]  # numbers
        if num_deep := events.filter(pl.col("depth") >= MOST_LANES).height:
            self.leave_out(num_deep, f"{plural(num_deep, 'event')} of {title} nested deeper than {MOST_LANES}")
            events = events.filter(pl.col("depth") < MOST_LANES)
        self.add(kind, title, detail, [events_of(events, table, events["depth"])], min(deepest, MOST_LANES))

    def add_beside(
        self, kind: str, title: str, detail: str, events: pl.DataFrame, table: str, is_copy: bool = False
    ) -> None:
        """Add a track of events that may run in parallel."""
        ordered = events.sort("start_ns", "end_ns", descending=[False, True])
        lane, num_lanes = _beside(ordered)
        if num_beyond := lane.null_count():
            self.leave_out(num_beyond, f"{plural(num_beyond, 'event')} of {title} beside {num_lanes} others")
            ordered, lane = ordered.filter(lane.is_not_null()), lane.drop_nulls()
        self.add(kind, title, detail, [events_of(ordered, table, lane)], num_lanes, is_copy)

    def add(
        self, kind: str, title: str, detail: str, parts: list[pl.DataFrame], num_lanes: int, is_copy: bool = False
    ) -> None:
        """Add a track of events whose lanes are known."""
        first = self.num
        self.tracks.append(Track(kind, title, detail, first, num_lanes, is_copy))
        moved = [part.with_columns(pl.col("lane") + first) for part in parts]
        self.events = pl.concat([self.events, *moved], rechunk=False)


def events_of(frame: pl.DataFrame, table: str, lane: pl.Series | int) -> pl.DataFrame:
    """Return events of a table (`LANE`) from those with `color` and maybe `place` and `weight_ns`."""
    place = frame["place"] if "place" in frame.columns else pl.int_range(frame.height, dtype=pl.UInt32, eager=True)
    weight = pl.col("weight_ns") if "weight_ns" in frame.columns else pl.col("end_ns") - pl.col("start_ns")
    return frame.select(
        (pl.lit(lane) if isinstance(lane, int) else lane).cast(pl.UInt32).alias("lane"),
        pl.lit(TABLES.index(table), pl.UInt8).alias("table"),
        place.cast(pl.UInt32).alias("place"),
        "start_ns",
        pl.max_horizontal("start_ns", "end_ns").alias("end_ns"),
        "color",
        weight.alias("weight_ns"),
    )


def _beside(ordered: pl.DataFrame) -> tuple[pl.Series, int]:
    """Return the first free lane of each event, null if none is free, and how many lanes there are."""
    starts, ends = ordered["start_ns"], ordered["end_ns"]
    if not (starts < ends.cum_max().shift(1)).any():
        return pl.zeros(ordered.height, pl.UInt32, eager=True), 1
    lanes, free, taken, num_lanes = list[int | None](), list[int](), list[tuple[int, int]](), 0
    for start, end in zip(starts, ends):
        while taken and taken[0][0] <= start:
            heappush(free, heappop(taken)[1])
        if not free and num_lanes < _MOST_BESIDE:
            heappush(free, num_lanes)
            num_lanes += 1
        lane = heappop(free) if free else None
        lanes.append(lane)
        if lane is not None:
            heappush(taken, (end, lane))
    return pl.Series(lanes, dtype=pl.UInt32), num_lanes


def depths(parent: pl.Series) -> pl.Series:
    """Return the depth of each row from the row of its parent; the distance looked up doubles each time."""
    depth: pl.Series = parent.is_not_null().cast(pl.UInt32)
    above = parent
    while above.null_count() < len(above):
        depth += depth.gather(above).fill_null(0)
        above = above.gather(above)
    return depth


MOST_TRACKS = {"modules": 4, "communication": 16, "host": 32, "ranges": 16, "gpu": 48}
"""Tracks per kind: the busiest are shown, the rest are counted."""
_COLLECTIVES = "^(nccl|gloo|mpi|ucc):"
_STREAM = ["device", "stream"]
_MOST_DEPTH = 12
RUN = {"device": pl.Int32, "stream": pl.Int64, "depth": pl.UInt32, "module": pl.String, "phase": pl.String,
       "step": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64}  # fmt: skip


def lanes_of(linked: Linked) -> Lanes:
    """Return steps and phases, modules, communication, GPU streams and host threads, in this order."""
    lanes = Lanes()
    for add in (_add_steps, _add_modules, _add_gpu_modules, _add_device, _add_host):
        add(lanes, linked)
    return lanes


def _add_steps(lanes: Lanes, linked: Linked) -> None:
    steps, phases = linked.steps.table, linked.steps.phases
    names = {"steps": pl.repeat("step", steps.height, eager=True), "phases": phases["phase"]}
    tables = {name: frame for name, frame in (("steps", steps), ("phases", phases)) if frame.height}
    known = {name: frame.with_columns(color=named_colors(names[name], "step")) for name, frame in tables.items()}
    if parts := [events_of(frame, name, lane) for lane, (name, frame) in enumerate(known.items())]:
        lanes.add("steps", "Steps and phases" if steps.height else "Phases", "on the host", parts, len(parts))


def _add_modules(lanes: Lanes, linked: Linked) -> None:
    host, calls = linked.host, linked.modules.calls
    if calls.is_empty():
        return
    numbers = pl.int_range(calls.height, dtype=pl.UInt32, eager=True)
    is_call = pl.zeros(host.height, pl.Boolean, eager=True).scatter(calls["row"], True)
    number = pl.zeros(host.height, pl.UInt32, eager=True).scatter(calls["row"], numbers)
    around = ancestor(host, is_call).gather(host["parent"].gather(calls["row"]))
    placed = host.select("thread", "start_ns", "end_ns")[calls["row"]].with_columns(
        place=calls["row"], depth=depths(number.gather(around)), color=module_colors(calls["module"])
    )
    titles = _thread_titles(linked)
    for (thread,), events in _busiest(lanes, placed, ["thread"], "modules", "thread with modules", linked):
        where = "" if thread == linked.steps.main_thread else f" · {titles[thread]}"
        lanes.add_nested("modules", f"Modules{where}", "calls on the host", events, "modules")


def _add_gpu_modules(lanes: Lanes, linked: Linked) -> None:
    """Add one stretch per module and run of kernels; unlike the calls on the host it shows the backward too."""
    lanes.runs = _module_runs(linked)
    placed = lanes.runs.with_row_index("place").with_columns(color=module_colors(lanes.runs["module"]))
    for (number, stream), events in _busiest(lanes, placed, _STREAM, "modules", "stream with modules"):
        title = f"Modules on GPU{f' {number}' if number else ''} · stream {stream}"
        lanes.add_nested("modules", title, "by the kernels, backward too", events, "runs")


def _add_host(lanes: Lanes, linked: Linked) -> None:
    # The span of the profiler over everything says nothing.
    host, shown = linked.host, linked.host["kind"] != "other"
    kernels = linked.device.select("launch", "duration_ns").drop_nulls()
    longest = kernels.group_by("launch").agg(pl.col("duration_ns").max())
    # A launch is as important as the kernel it launched.
    weight = pl.zeros(host.height, pl.Int64, eager=True).scatter(longest["launch"], longest["duration_ns"])
    placed = host.select(
        "thread",
        "start_ns",
        "end_ns",
        place="row",
        depth=depths(host["parent"]),
        color=host_colors(host),
        weight_ns=pl.max_horizontal("duration_ns", weight),
    ).filter(shown)
    titles = _thread_titles(linked)
    for (thread,), events in _busiest(lanes, placed, ["thread"], "host", "host thread", linked):
        lanes.add_nested("host", titles[thread], "host thread", events, "host")


def _add_device(lanes: Lanes, linked: Linked) -> None:
    work, ranges = (
        frame.with_row_index("place").with_columns(pl.col(*_STREAM).fill_null(0))
        for frame in (linked.device, linked.trace.device_ranges)
    )
    work = work.select(*_STREAM, "start_ns", "end_ns", "place", "activity", color=named_colors(work["class"]))
    names = linked.trace.facts.devices
    is_communication = pl.col("activity") == "communication"
    # A stream with only communication is shown once, as communication.
    is_apart = work.select(is_communication.all().over(_STREAM)).to_series()
    communication = work.filter(is_communication)
    apart = set(work.filter(is_apart).select(_STREAM).unique().rows())
    for key, events in _busiest(lanes, communication, _STREAM, "communication", "stream with communication"):
        title, detail = f"Communication · stream {key[1]}", f"GPU {key[0]}"
        lanes.add_beside("communication", title, detail, events, "gpu", is_copy=key not in apart)
    if communication.is_empty():
        _add_host_communication(lanes, linked)
    end = pl.col("start_ns") + pl.col("duration_ns")
    ranges = ranges.with_columns(end_ns=end, color=range_colors(ranges["name"]))
    for (number, stream), events in _busiest(lanes, ranges, _STREAM, "ranges", "stream with labels"):
        title, detail = f"GPU labels · stream {stream}", f"GPU {number}: first to last kernel of a label"
        lanes.add_beside("ranges", title, detail, events, "ranges")
    for (number, stream), events in _busiest(lanes, work.filter(~is_apart), _STREAM, "gpu", "stream"):
        name = names[number] if 0 <= number < len(names) else "GPU"
        lanes.add_beside("gpu", f"GPU {number} · stream {stream}", safe(name, 60), events, "gpu")


def _add_host_communication(lanes: Lanes, linked: Linked) -> None:
    """Add collectives that run on the CPU: by their labels, else those with figures in the trace."""
    host = linked.host
    found = host.filter((host["kind"] == "annotation") & matches(host["name"], _COLLECTIVES))
    if found.is_empty():
        found = host.filter(pl.col("event").is_in(linked.trace.collectives["event"].implode()))
    if found.height:
        color = named_colors(pl.repeat("communication", found.height, eager=True))
        events = found.select("start_ns", "end_ns", place="row", color=color)
        lanes.add_beside("communication", "Communication", "collectives on the host", events, "host", is_copy=True)


def _busiest(
    lanes: Lanes, events: pl.DataFrame, by: list[str], kind: str, noun: str, linked: Linked | None = None
) -> Iterator[tuple[tuple[int, ...], pl.DataFrame]]:
    """Yield the events of each thread or stream, in order; if there are too many, of the busiest."""
    busy = events.group_by(by).agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("busy_ns"), pl.len())
    main = -1 if linked is None or linked.steps.main_thread is None else linked.steps.main_thread
    descending = [linked is not None, True, *(False for _ in by)]
    busy = busy.sort(pl.col(by[0]) == main, "busy_ns", *by, descending=descending)
    if rest := busy.rows(named=True)[MOST_TRACKS[kind] :]:
        num_events = sum(row["len"] for row in rest)
        text = f"{plural(len(rest), noun)} of {busy.height:,}, the least busy, with {plural(num_events, 'event')}"
        lanes.leave_out(num_events, text)
    keys: list[tuple[int, ...]] = busy.select(by).rows()[: MOST_TRACKS[kind]]
    parts = events.partition_by(by, as_dict=True)
    for key in keys if linked is not None else sorted(keys):
        yield key, parts[key]


def _thread_titles(linked: Linked) -> dict[int, str]:
    titles = {}
    for thread, tid, name in linked.trace.threads.select("thread", "tid", "thread_name").iter_rows():
        found = re.fullmatch(r"thread (-?\d+) \((.+)\)", name or "", re.DOTALL)
        what = "main thread" if thread == linked.steps.main_thread else found and found[2]
        titles[thread] = safe(f"{what} · {tid}" if what else name or f"thread {tid}", 60)
    for thread in linked.host["thread"].unique():
        titles.setdefault(thread, f"thread {thread}")
    return titles


def _module_runs(linked: Linked) -> pl.DataFrame:
    """Return runs of consecutive kernels of one module, at every depth of the module tree (`RUN`).

    A new module, phase or step begins another run, as does a kernel of none. A number belongs to the word before it:
    `blocks.3.mlp` is `mlp` in `blocks.3`, never in `3`.
    """
    # A collective would belong to the module that happened to wait for it.
    device = linked.device.filter(pl.col("activity") != "communication")
    names = device["module"].cast(pl.String)
    paths = {name: _prefixes(name) for name in names.unique().drop_nulls()}
    texts = pl.col("phase", "step").cast(pl.String)
    work = device.select(pl.col(*_STREAM).fill_null(0), texts, "start_ns", "end_ns")
    found = [pl.DataFrame(schema=RUN)]
    for depth in range(min(_MOST_DEPTH, max(map(len, paths.values()), default=0))):
        known = [name for name, path in paths.items() if len(path) > depth]
        module = names.replace_strict(known, [paths[name][depth] for name in known], default=None)
        found.append(_runs(work.with_columns(module=module.cast(pl.String)), depth))
    return pl.concat(found)


def _runs(work: pl.DataFrame, depth: int) -> pl.DataFrame:
    same = (*_STREAM, "module", "phase", "step")
    is_new = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in same)
    ordered = work.sort(*_STREAM, "start_ns", maintain_order=True).with_columns(run=is_new.cum_sum())
    runs = ordered.group_by("run", maintain_order=True).agg(
        pl.col(*same).first(), pl.col("start_ns").min(), pl.col("end_ns").max()
    )
    end = pl.min_horizontal("end_ns", pl.col("start_ns").shift(-1).over(_STREAM))
    named = runs.filter(pl.col("module").is_not_null())
    return named.with_columns(depth=pl.lit(depth, pl.UInt32), end_ns=end).select(RUN.keys())


def _prefixes(name: str) -> list[str]:
    """Return a module and those around it.

    >>> _prefixes("model.blocks.3.mlp")
    ['model', 'model.blocks.3', 'model.blocks.3.mlp']
    """
    words = name.split(".")
    ends = [at for at in range(1, len(words) + 1) if at == len(words) or not words[at].isdigit()]
    return [".".join(words[:end]) for end in ends]

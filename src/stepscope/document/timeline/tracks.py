"""Tracks of the timeline from top to bottom, each with lanes on which nothing overlaps."""

import re
from collections.abc import Iterator

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.names import matches
from stepscope.analysis.structure.nesting import ancestor
from stepscope.document.timeline.colors import host_colors, module_colors, named_colors, range_colors
from stepscope.document.timeline.lanes import Lanes, depths, events_of
from stepscope.formatting import plural, safe

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
    _add_steps(lanes, linked)
    _add_modules(lanes, linked)
    _add_gpu_modules(lanes, linked)
    _add_device(lanes, linked)
    _add_host(lanes, linked)
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
    busy = busy.sort(
        pl.col(by[0]) == main, "busy_ns", *by, descending=[linked is not None, True, *(False for _ in by)]
    )
    if rest := busy.rows(named=True)[MOST_TRACKS[kind] :]:
        num_events = sum(row["len"] for row in rest)
        text = f"{plural(len(rest), noun)} of {busy.height:,}, the least busy, with {plural(num_events, 'event')}"
        lanes.leave_out(num_events, text)
    keys: list[tuple[int, ...]] = busy.select(by).rows()[: MOST_TRACKS[kind]]
    parts = events.partition_by(by, as_dict=True)
    for key in keys if linked is not None else sorted(keys):
        yield key, parts[key]


def _thread_titles(linked: Linked) -> dict[int, str]:
    """Return the title of each thread, from its name in the trace."""
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

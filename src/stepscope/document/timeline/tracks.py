"""Tracks of the timeline from top to bottom, each with lanes on which nothing overlaps."""

from __future__ import annotations

import re
from collections.abc import Iterable

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.names import matches
from stepscope.analysis.structure.nesting import ancestor
from stepscope.document.timeline.colors import (
    host_colors,
    kernel_colors,
    module_colors,
    phase_colors,
    range_colors,
)
from stepscope.document.timeline.lanes import Lanes, add, add_beside, add_nested, depths, events_of
from stepscope.document.timeline.runs import module_runs
from stepscope.formatting import plural, safe

MOST_TRACKS = {"modules": 4, "communication": 16, "host": 32, "ranges": 16, "gpu": 48}
"""Tracks per kind: the busiest are shown, the rest are counted."""
_COLLECTIVES = "^(nccl|gloo|mpi|ucc):"


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
    parts = [
        events_of(frame, table, colors, lane)
        for lane, (frame, table, colors) in enumerate(
            (frame, table, colors)
            for frame, table, colors in (
                (steps, "steps", phase_colors(pl.repeat(None, steps.height, dtype=pl.String, eager=True))),
                (phases, "phases", phase_colors(phases["phase"])),
            )
            if not frame.is_empty()
        )
    ]
    if parts:
        add(lanes, "steps", "Steps and phases" if steps.height else "Phases", "on the host", parts, len(parts))


def _add_modules(lanes: Lanes, linked: Linked) -> None:
    host, calls = linked.host, linked.modules.calls
    if calls.is_empty():
        return
    is_call = pl.zeros(host.height, pl.Boolean, eager=True).scatter(calls["row"], True)
    number = pl.zeros(host.height, pl.UInt32, eager=True).scatter(
        calls["row"], pl.int_range(calls.height, dtype=pl.UInt32, eager=True)
    )
    around = ancestor(host, is_call).gather(host["parent"].gather(calls["row"]))
    placed = host.select("thread", "start_ns", "end_ns")[calls["row"]].with_columns(
        calls["row"].alias("place"),
        depths(number.gather(around)).alias("depth"),
        module_colors(calls["module"]).alias("color"),
    )
    titles = _thread_titles(linked)
    for thread, events in _busiest(lanes, placed, ["thread"], "modules", "thread with modules", linked):
        where = "" if thread[0] == linked.steps.main_thread else f" · {titles[thread[0]]}"
        add_nested(lanes, "modules", f"Modules{where}", "calls on the host", events, "modules")


def _add_gpu_modules(lanes: Lanes, linked: Linked) -> None:
    """Add one stretch per module and run of kernels; unlike the calls on the host it shows the backward too."""
    runs = module_runs(linked)
    lanes.runs = runs
    placed = runs.with_row_index("place").with_columns(module_colors(runs["module"]).alias("color"))
    for (number, stream), events in _busiest(lanes, placed, ["device", "stream"], "modules", "stream with modules"):
        where = "" if number == 0 else f" {number}"
        title, detail = f"Modules on GPU{where} · stream {stream}", "by the kernels, backward too"
        add_nested(lanes, "modules", title, detail, events, "runs")


def _add_host(lanes: Lanes, linked: Linked) -> None:
    host = linked.host
    # The span of the profiler over everything says nothing.
    shown = host["kind"] != "other"
    if not shown.any():
        return
    kernels = linked.device.select("launch", "duration_ns").drop_nulls()
    longest = kernels.group_by("launch").agg(pl.col("duration_ns").max())
    # A launch is as important as the kernel it launched.
    weight = pl.zeros(host.height, pl.Int64, eager=True).scatter(longest["launch"], longest["duration_ns"])
    placed = host.select(
        "thread",
        "start_ns",
        "end_ns",
        pl.col("row").alias("place"),
        depths(host["parent"]).alias("depth"),
        host_colors(host).alias("color"),
        pl.max_horizontal("duration_ns", weight).alias("weight_ns"),
    ).filter(shown)
    titles = _thread_titles(linked)
    for thread, events in _busiest(lanes, placed, ["thread"], "host", "host thread", linked):
        add_nested(lanes, "host", titles[thread[0]], "host thread", events, "host")


def _add_device(lanes: Lanes, linked: Linked) -> None:
    device = linked.device.with_row_index("place").with_columns(
        pl.col("device").fill_null(0), pl.col("stream").fill_null(0)
    )
    columns = ["device", "stream", "start_ns", "end_ns", "place", "activity"]
    work = device.select(*columns, kernel_colors(device).alias("color"))
    names = linked.trace.facts.devices
    by = ["device", "stream"]
    is_communication = pl.col("activity") == "communication"
    # A stream with only communication is shown once, as communication.
    is_apart = work.select(is_communication.all().over(by)).to_series()
    communication = work.filter(is_communication)
    apart = set(work.filter(is_apart).select(by).unique().rows())
    for key, events in _busiest(lanes, communication, by, "communication", "stream with communication"):
        title, detail = f"Communication · stream {key[1]}", f"GPU {key[0]}"
        add_beside(lanes, "communication", title, detail, events, "gpu", is_copy=key not in apart)
    if communication.is_empty():
        _add_host_communication(lanes, linked)
    work = work.filter(~is_apart)
    ranges = linked.trace.device_ranges.with_row_index("place").with_columns(
        pl.col("device").fill_null(0),
        pl.col("stream").fill_null(0),
        (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"),
    )
    ranges = ranges.with_columns(range_colors(ranges).alias("color"))
    for (number, stream), events in _busiest(lanes, ranges, by, "ranges", "stream with labels"):
        add_beside(
            lanes,
            "ranges",
            f"GPU labels · stream {stream}",
            f"GPU {number}: first to last kernel of a label",
            events,
            "ranges",
        )
    for (number, stream), events in _busiest(lanes, work, by, "gpu", "stream"):
        name = names[number] if 0 <= number < len(names) else "GPU"
        add_beside(lanes, "gpu", f"GPU {number} · stream {stream}", safe(name, 60), events, "gpu")


def _add_host_communication(lanes: Lanes, linked: Linked) -> None:
    """Add collectives that run on the CPU: by their labels, else those with figures in the trace."""
    host = linked.host
    found = host.filter((host["kind"] == "annotation") & matches(host["name"], _COLLECTIVES))
    if found.is_empty():
        found = host.filter(pl.col("event").is_in(linked.trace.collectives["event"].implode()))
    if found.is_empty():
        return
    found = found.with_columns(pl.lit("communication").alias("class"))
    events = found.select(pl.col("row").alias("place"), "start_ns", "end_ns", kernel_colors(found).alias("color"))
    add_beside(lanes, "communication", "Communication", "collectives on the host", events, "host", is_copy=True)


def _busiest(
    lanes: Lanes, events: pl.DataFrame, by: list[str], kind: str, noun: str, linked: Linked | None = None
) -> Iterable[tuple[tuple[int, ...], pl.DataFrame]]:
    """Yield the events of each thread or stream, in order; if there are too many, of the busiest."""
    if events.is_empty():
        return
    busy = events.group_by(by).agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("busy_ns"), pl.len())
    main = -1 if linked is None or linked.steps.main_thread is None else linked.steps.main_thread
    busy = busy.sort(
        pl.col(by[0]) == main, "busy_ns", *by, descending=[linked is not None, True, *(False for _ in by)]
    )
    most = MOST_TRACKS[kind]
    if busy.height > most:
        rest = busy.slice(most)
        num_events = int(rest["len"].sum())
        lanes.left_out.append(
            f"{plural(rest.height, noun)} of {busy.height:,}, the least busy, with {plural(num_events, 'event')}"
        )
        lanes.num_left_out += num_events
        busy = busy.head(most)
    events = events.join(busy.select(by), on=by, how="semi")
    parts = events.partition_by(by, as_dict=True)
    keys: list[tuple[int, ...]] = busy.select(by).rows()
    if linked is None:
        keys.sort()
    for key in keys:
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

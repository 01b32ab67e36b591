"""The timeline of a trace: what a page needs to draw it at any zoom, in a few hundred kilobytes."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from typing import Any

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.time.replay import typical_steps
from stepscope.document.model import Timeline
from stepscope.document.timeline.bytes import Bytes
from stepscope.document.timeline.clock import Clock
from stepscope.document.timeline.colors import colors
from stepscope.document.timeline.details import KINDS, TEXTS, details, strings
from stepscope.document.timeline.lanes import TABLES, Lanes
from stepscope.document.timeline.levels import Kept, Level, keep, levels
from stepscope.document.timeline.memory import Curve, memory_curves
from stepscope.document.timeline.tracks import lanes_of
from stepscope.formatting import duration, listed, plural

MOST_EVENTS = 150_000
"""Events drawn one by one."""
MOST_BLOCKS = 30_000
"""Blocks on a level."""
MOST_BYTES = 1_500_000
"""Size of the compressed blob: 2 MB as base64."""
_FAR, _MINUTE_NS = 1000, 60 * 10**9


def timeline_of(linked: Linked, most_events: int = MOST_EVENTS, most_bytes: int = MOST_BYTES) -> Timeline:
    """Return the timeline of a rank's trace, with a blob of at most `most_bytes` if enough can be left out.

    Every moment that a lane is busy is on every level of detail exactly once: as an event or in a block.
    """
    lanes = lanes_of(linked)
    start_ns, end_ns = _window(lanes.events)
    is_near = (pl.col("start_ns") >= start_ns) & (pl.col("end_ns") <= end_ns)
    near = lanes.events.filter(is_near)
    num_far = lanes.events.height - near.height
    clock = Clock.of(start_ns, end_ns)
    events = near.with_columns(
        clock.ticks(pl.col("start_ns")).alias("start"), clock.ticks(pl.col("end_ns")).alias("end")
    )
    curves = memory_curves(linked, clock)
    typical = typical_steps(linked)
    in_step = _in_step(events, linked, typical)
    while True:
        kept = keep(events, typical, in_step, most_events)
        most_blocks = max(1000, min(MOST_BLOCKS, most_events))
        found = levels(events, kept.is_kept, clock.total, most_blocks)
        made = _packed(linked, lanes, events, kept, found, curves, clock, num_far)
        if len(made.blob) <= most_bytes or most_events < 1000:
            return made
        most_events = int(min(most_events, kept.num) * min(0.8, most_bytes / len(made.blob)))


def _window(events: pl.DataFrame) -> tuple[int, int]:
    """Return the first start and the last end, without events that are far away from almost all others."""
    if events.is_empty():
        return 0, 1
    low = int(events["start_ns"].quantile(0.05, "nearest"))  # type: ignore[arg-type]
    high = int(events["start_ns"].quantile(0.95, "nearest"))  # type: ignore[arg-type]
    reach = max(_FAR * (high - low), _MINUTE_NS)
    near = events.filter(pl.col("start_ns") >= low - reach, pl.col("end_ns") <= high + reach)
    near = near if near.height else events
    return int(near["start_ns"].min()), int(near["end_ns"].max())  # type: ignore[arg-type]


def _in_step(events: pl.DataFrame, linked: Linked, typical: pl.DataFrame) -> pl.Series:
    """Return the typical step of each event: of GPU work that of its launch, else the one it starts in."""
    place = typical["start_ns"].search_sorted(events["start_ns"], side="right").cast(pl.Int64) - 1
    place = place.set(place < 0, None).cast(pl.UInt32)
    by_time = typical["step"].gather(place)
    is_over = (events["start_ns"] >= typical["end_ns"].gather(place)).fill_null(True)
    by_time = by_time.set(is_over, None)
    is_work = events["table"] == TABLES.index("gpu")
    row = events["place"].set(~is_work, None)
    step: pl.Series = linked.device["step"].gather(row).zip_with(is_work, by_time)
    return step


def _packed(
    linked: Linked,
    lanes: Lanes,
    events: pl.DataFrame,
    kept: Kept,
    found: list[Level],
    curves: list[Curve],
    clock: Clock,
    num_far: int,
) -> Timeline:
    drawn = events.filter(kept.is_kept).sort("lane", "start", "end").with_row_index("at")
    described = details(linked, drawn, lanes.runs)
    texts, labels, codes = strings(described)
    data = Bytes()
    columns = {
        "start": data.add(drawn["start"], delta=True),
        "length": data.add(drawn["end"] - drawn["start"]),
        "color": data.add(drawn["color"]),
        "kind": data.add(described["kind"]),
        "launch": data.add(described["launch"], delta=True),
        **{name: data.add(codes[name]) for name in TEXTS},
    }
    meta: dict[str, Any] = {
        "version": 1,
        "origin_ns": str(clock.origin_ns),  # more digits than a number of JavaScript has
        "tick_ns": clock.tick_ns,
        "total": clock.total,
        "num_events": lanes.events.height + lanes.num_left_out,
        "num_drawn": drawn.height,
        "note": _note(linked, lanes, kept, drawn.height, curves, clock.tick_ns, num_far),
        "tracks": [asdict(track) for track in lanes.tracks],
        "num_lanes": lanes.num,
        "kinds": list(KINDS),
        "colors": colors(),
        "used_colors": sorted(events["color"].unique().to_list()),
        "events": {**columns, "lanes": data.add(_offsets(drawn["lane"], lanes.num), delta=True)},
        "levels": [_level(data, level, lanes.num) for level in found],
        "memory": [_curve(data, curve) for curve in curves],
        "steps": _steps(data, linked, clock),
        "strings": data.add_text(json.dumps(texts, ensure_ascii=False)),
        "labels": data.add_text(json.dumps(labels, ensure_ascii=False)),
    }
    return Timeline(meta, gzip.compress(data.joined(), 6, mtime=0), page_only=True)


def _offsets(lane: pl.Series, num_lanes: int) -> pl.Series:
    """Return where each lane begins in an ordered column, and where the last one ends."""
    return lane.search_sorted(pl.int_range(num_lanes + 1, dtype=pl.UInt32, eager=True), side="left")


def _level(data: Bytes, level: Level, num_lanes: int) -> dict[str, Any]:
    blocks = level.blocks
    return {
        "width": level.width,
        "lanes": data.add(_offsets(blocks["lane"], num_lanes), delta=True),
        "start": data.add(blocks["start"], delta=True),
        "length": data.add(blocks["end"] - blocks["start"]),
        "busy": data.add(blocks["busy"]),
        "num": data.add(blocks["num"]),
        "color": data.add(blocks["color"]),
    }


def _curve(data: Bytes, curve: Curve) -> dict[str, Any]:
    points = curve.points
    return {
        "title": curve.title,
        "detail": curve.detail,
        "unit_bytes": curve.unit_bytes,
        "time": data.add(points["time"], delta=True),
        "allocated": data.add(points["allocated"], delta=True),
        "reserved": data.add(points["reserved"], delta=True) if curve.has_reserved else None,
    }


def _steps(data: Bytes, linked: Linked, clock: Clock) -> dict[str, Any]:
    """Return where steps begin and end, for lines through all tracks."""
    steps = linked.steps.table.select(
        clock.ticks(pl.col("start_ns")).alias("start"), clock.ticks(pl.col("end_ns")).alias("end")
    )
    return {"start": data.add(steps["start"], delta=True), "end": data.add(steps["end"], delta=True)}


def _note(
    linked: Linked, lanes: Lanes, kept: Kept, num_drawn: int, curves: list[Curve], tick_ns: float, num_far: int
) -> str:
    """Return what the timeline leaves out, in a few sentences."""
    num_all = lanes.events.height
    if num_all == 0:
        return "The trace has no events to draw."
    sentences = [f"{num_drawn:,} of {plural(num_all, 'event')} drawn individually"]
    if num_drawn + num_far < num_all:
        which = [f"all of {'steps' if len(kept.steps) > 1 else 'step'} {listed(kept.steps)}"] if kept.steps else []
        if kept.least_ns is not None:
            which.append(f"elsewhere those of at least {duration(kept.least_ns, 3)} and the launches of such kernels")
        sentences[0] += f": {'; '.join(which)}. The rest is shaded"
    if lanes.left_out:
        sentences.append(f"Not shown: {'; '.join(lanes.left_out)}")
    if num_far:
        sentences.append(f"{plural(num_far, 'event')} not drawn because they are far away from all others in time")
    if thinned := [curve for curve in curves if curve.points.height < curve.num_all]:
        num_shown, num_changes = (
            sum(curve.points.height for curve in thinned),
            sum(curve.num_all for curve in thinned),
        )
        sentences.append(f"Memory shows {num_shown:,} of {num_changes:,} changes, with the extremes of every stretch")
    if tick_ns > 1:
        sentences.append(f"Times are rounded to {duration(tick_ns, 2)}")
    if linked.trace.facts.is_cut_off:
        sentences.append("The trace file is cut off, so later events are missing")
    return ". ".join(sentences) + "."

"""Lanes of the timeline: nested or parallel events, placed so that none covers another."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

import polars as pl

from stepscope.formatting import plural

MOST_LANES = 96
"""Lanes of a track; deeper events are only counted."""
_MOST_BESIDE = 24
"""Lanes of a stream whose work runs in parallel."""

LANE = {"lane": pl.UInt32, "table": pl.UInt8, "place": pl.UInt32, "start_ns": pl.Int64, "end_ns": pl.Int64,
        "color": pl.UInt8, "weight_ns": pl.Int64}  # fmt: skip
"""Columns of the events: `table` is an index into `TABLES`, `place` the row there; heavier events are kept first."""
TABLES = ("steps", "phases", "modules", "runs", "host", "ranges", "gpu")


@dataclass(frozen=True)
class Track:
    """A group of lanes that begins at `first_lane`."""

    kind: str
    title: str
    detail: str
    """What the track shows."""
    first_lane: int
    num_lanes: int
    is_copy: bool = False
    """Whether another track shows the same events."""


@dataclass
class Lanes:
    """The tracks of a trace, and every event that is on one of them."""

    tracks: list[Track] = field(default_factory=list)
    events: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=LANE))
    runs: pl.DataFrame = field(default_factory=pl.DataFrame)
    """Modules on the GPU (`runs.py`)."""
    left_out: list[str] = field(default_factory=list)
    """Sentences about what is on no track."""
    num_left_out: int = 0
    """Events that are on no track."""

    @property
    def num(self) -> int:
        """Return the number of lanes of all tracks."""
        return sum(track.num_lanes for track in self.tracks)


def add_nested(lanes: Lanes, kind: str, title: str, detail: str, events: pl.DataFrame, table: str) -> None:
    """Add a track of nested events, one lane per `depth`."""
    deepest = int(events["depth"].max()) + 1  # type: ignore[arg-type]
    if deepest > MOST_LANES:
        num_deep = events.filter(pl.col("depth") >= MOST_LANES).height
        lanes.left_out.append(f"{plural(num_deep, 'event')} of {title} nested deeper than {MOST_LANES}")
        lanes.num_left_out += num_deep
        events = events.filter(pl.col("depth") < MOST_LANES)
    parts = [events_of(events, table, events["color"], events["depth"])]
    add(lanes, kind, title, detail, parts, min(deepest, MOST_LANES))


def add_beside(
    lanes: Lanes, kind: str, title: str, detail: str, events: pl.DataFrame, table: str, is_copy: bool = False
) -> None:
    """Add a track of events that may run in parallel."""
    ordered = events.sort("start_ns", "end_ns", descending=[False, True])
    lane, num_lanes, num_beyond = _beside(ordered)
    if num_beyond:
        lanes.left_out.append(f"{plural(num_beyond, 'event')} of {title} beside {num_lanes} others")
        lanes.num_left_out += num_beyond
        ordered, lane = ordered.filter(lane < num_lanes), lane.filter(lane < num_lanes)
    add(lanes, kind, title, detail, [events_of(ordered, table, ordered["color"], lane)], num_lanes, is_copy)


def add(
    lanes: Lanes,
    kind: str,
    title: str,
    detail: str,
    parts: list[pl.DataFrame],
    num_lanes: int,
    is_copy: bool = False,
) -> None:
    first = lanes.num
    lanes.tracks.append(Track(kind, title, detail, first, num_lanes, is_copy))
    moved = [part.with_columns(pl.col("lane") + first) for part in parts]
    lanes.events = pl.concat([lanes.events, *moved], rechunk=False)


def events_of(frame: pl.DataFrame, table: str, colors: pl.Series, lane: pl.Series | int) -> pl.DataFrame:
    place = frame["place"] if "place" in frame.columns else pl.int_range(frame.height, dtype=pl.UInt32, eager=True)
    length = pl.col("end_ns") - pl.col("start_ns")
    return frame.select(
        (pl.lit(lane) if isinstance(lane, int) else lane).cast(pl.UInt32).alias("lane"),
        pl.lit(TABLES.index(table), pl.UInt8).alias("table"),
        place.cast(pl.UInt32).alias("place"),
        "start_ns",
        pl.max_horizontal("start_ns", "end_ns").alias("end_ns"),
        colors.alias("color"),
        (pl.col("weight_ns") if "weight_ns" in frame.columns else length).alias("weight_ns"),
    )


def _beside(ordered: pl.DataFrame) -> tuple[pl.Series, int, int]:
    """Return the first free lane of each event, how many lanes there are, and how many events find none."""
    starts, ends = ordered["start_ns"], ordered["end_ns"]
    if not (starts < ends.cum_max().shift(1)).any():
        return pl.zeros(ordered.height, pl.UInt32, eager=True), 1, 0
    lane, free, taken, num_lanes, num_beyond = [], list[int](), list[tuple[int, int]](), 0, 0
    for start, end in zip(starts, ends):
        while taken and taken[0][0] <= start:
            heappush(free, heappop(taken)[1])
        if free:
            own = heappop(free)
        elif num_lanes < _MOST_BESIDE:
            own, num_lanes = num_lanes, num_lanes + 1
        else:
            num_beyond += 1
            lane.append(_MOST_BESIDE)
            continue
        lane.append(own)
        heappush(taken, (end, own))
    return pl.Series(lane, dtype=pl.UInt32), num_lanes, num_beyond


def depths(parent: pl.Series) -> pl.Series:
    """Return the depth of each row from the row of its parent; the distance looked up doubles each time."""
    depth: pl.Series = parent.is_not_null().cast(pl.UInt32)
    above = parent
    while above.null_count() < len(above):
        depth += depth.gather(above).fill_null(0)
        above = above.gather(above)
    return depth

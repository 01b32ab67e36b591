"""Lanes of the timeline: nested or parallel events, placed so that none covers another."""

from dataclasses import dataclass, field
from heapq import heappop, heappush

import polars as pl

from stepscope.formatting import plural

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
        deepest = int(events["depth"].max()) + 1  # type: ignore[arg-type]
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

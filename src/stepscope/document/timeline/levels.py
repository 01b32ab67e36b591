"""Levels of detail: which events are drawn individually, and the blocks that replace the rest at each zoom.

A cell is a stretch of one lane, `width` ticks long. On each level, a kept event that is at least as long as a cell is
drawn individually; all others that begin in a cell are one block. On level 0 every kept event is drawn, and blocks
replace the others. So each moment that a lane is busy is on every level exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

FACTOR = 4
"""The width of a level's cells, in cells of the level below."""
_COARSEST = 256
"""Cells of the last level."""
_FINE_ENOUGH = 4096
"""Cells of the first level if every event is kept."""
_FINEST = 1 << 18

BLOCK = ("lane", "start", "end", "busy", "num", "color")
"""Columns of a block, in ticks: `busy` is the time that events cover, `color` the color of most of it."""


@dataclass(frozen=True)
class Level:
    """The blocks of one level, sorted by lane and start."""

    width: int
    """Shorter events are in blocks; 0: only events that are not kept are."""
    blocks: pl.DataFrame


@dataclass(frozen=True)
class Kept:
    """Which events are drawn individually."""

    is_kept: pl.Series
    steps: list[int]
    """Steps of which all events are kept."""
    least_ns: int | None
    """The shortest event kept elsewhere; None: no others, or all."""

    @property
    def num(self) -> int:
        return int(self.is_kept.sum())


def keep(events: pl.DataFrame, typical: pl.DataFrame, in_step: pl.Series, most: int) -> Kept:
    """Return which events to keep: all, or those of as many typical steps as fit, and the longest others."""
    everything = pl.repeat(True, events.height, dtype=pl.Boolean, eager=True)
    if events.height <= most:
        return Kept(everything, [], None)
    chosen: list[int] = []
    inside = ~everything
    for step in reversed(typical["step"].to_list()):  # the later, the further from the profiler's own beginning
        wider = inside | (in_step == step).fill_null(False)
        if int(wider.sum()) > most:
            break
        inside, chosen = wider, [step, *chosen]
    room = most - int(inside.sum())
    others = events.select("weight_ns", "start_ns").with_row_index("at").filter(~inside)
    longest = others.sort("weight_ns", "start_ns", descending=[True, False]).head(room)
    least = longest["weight_ns"].min()
    return Kept(inside.scatter(longest["at"], True), chosen, least if isinstance(least, int) else None)


def levels(events: pl.DataFrame, is_kept: pl.Series, total: int, most_blocks: int) -> list[Level]:
    """Return level 0 and those above it, of events with `lane`, `start`, `end` (ticks) and `color`.

    The cells of the first level are as fine as `most_blocks` allows.
    """
    width = max(1, -(-total // (_FINE_ENOUGH if is_kept.all() else _FINEST)))
    rest = _merged(_pieces(events.filter(~is_kept), width))
    while rest.select("lane", "cell").n_unique() > most_blocks and width < total:
        width *= FACTOR
        rest = _coarser(rest, FACTOR)
    found = [Level(0, _blocks(rest))]
    kept = events.filter(is_kept)
    length = kept["end"] - kept["start"]
    pieces, shortest = rest, 0
    while True:
        grown = _pieces(kept.filter((length >= shortest) & (length < width)), width)
        pieces = _merged(pl.concat([pieces, grown]))
        blocks = _blocks(pieces)
        # Where the events of whole steps are many, the first cells may be too fine for their blocks.
        if blocks.height <= most_blocks or width * _COARSEST >= total:
            found.append(Level(width, blocks))
        if width * _COARSEST >= total:
            return found
        pieces, shortest, width = _coarser(pieces, FACTOR), width, width * FACTOR


def _pieces(events: pl.DataFrame, width: int) -> pl.DataFrame:
    """Return each event as a block of its own."""
    return events.select(
        "lane",
        (pl.col("start") // width).alias("cell"),
        "color",
        "start",
        "end",
        (pl.col("end") - pl.col("start")).alias("busy"),
        pl.lit(1, pl.UInt32).alias("num"),
    )


def _coarser(pieces: pl.DataFrame, factor: int) -> pl.DataFrame:
    return _merged(pieces.with_columns(pl.col("cell") // factor))


def _merged(pieces: pl.DataFrame) -> pl.DataFrame:
    """Return one piece per cell and color."""
    return pieces.group_by("lane", "cell", "color").agg(
        pl.col("start").min(), pl.col("end").max(), pl.col("busy").sum(), pl.col("num").sum()
    )


def _blocks(pieces: pl.DataFrame) -> pl.DataFrame:
    """Return one block per cell."""
    return (
        pieces.sort("busy", "num", "color", descending=[True, True, False])
        .group_by("lane", "cell", maintain_order=True)
        .agg(
            pl.col("start").min(),
            pl.col("end").max(),
            pl.col("busy").sum(),
            pl.col("num").sum(),
            pl.col("color").first(),
        )
        .sort("lane", "start")
        .select(BLOCK)
    )

"""Levels of detail: which events are drawn one by one, and the blocks that stand for the rest at each zoom.

A cell is a stretch of one lane, `width` ticks long. On a level with cells of a width, an event that is kept and no
shorter than a cell is drawn by itself; all others that begin in a cell are one block. Level 0 has no shortest event:
its blocks are those of the events that are not kept. So each moment that a lane is busy is on every level once.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

FACTOR = 4
"""From one level's width to the next one's."""
_COARSEST = 256
"""Cells of the last level: enough for a page of this many pixels."""
_FINE_ENOUGH = 4096
"""Cells of the first level, where every event is drawn one by one on level 0."""
_FINEST = 1 << 18

BLOCK = ("lane", "start", "end", "busy", "num", "color")
"""Columns of a block, times in ticks: `busy` is the time in it that events cover, `color` that of most of it."""


@dataclass(frozen=True)
class Level:
    """The blocks of one level, by lane and start."""

    width: int
    """Events shorter than this many ticks are in blocks; 0: only those that are not kept."""
    blocks: pl.DataFrame


@dataclass(frozen=True)
class Kept:
    """Which events are drawn one by one."""

    is_kept: pl.Series
    steps: list[int]
    """Of these steps all."""
    least_ns: int | None
    """Elsewhere those that last so long; None: none of them, or all."""

    @property
    def num(self) -> int:
        return int(self.is_kept.sum())


def keep(events: pl.DataFrame, typical: pl.DataFrame, in_step: pl.Series, most: int) -> Kept:
    """At most so many events: all, or those of as many typical steps as there is room for, and the longest others."""
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
    """Level 0 and those above it, of events with `lane`, `start`, `end` (ticks) and `color`.

    The cells of the first level are as fine as so many blocks allow.
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
    """Events as parts of blocks: the blocks that each would be, alone."""
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
    """One piece a cell and color."""
    return pieces.group_by("lane", "cell", "color").agg(
        pl.col("start").min(), pl.col("end").max(), pl.col("busy").sum(), pl.col("num").sum()
    )


def _blocks(pieces: pl.DataFrame) -> pl.DataFrame:
    """One block a cell."""
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

"""Levels of detail: which events are drawn individually, and the blocks that replace the rest at each zoom.

A cell is a stretch of one lane, `width` ticks long. On each level, a kept event that is at least as long as a cell is
drawn individually; all others that begin in a cell are one block. On level 0 every kept event is drawn, and blocks
replace the others. So each moment that a lane is busy is on every level exactly once.
"""

from dataclasses import dataclass

import polars as pl

FACTOR = 4  # the width of a level's cells, in cells of the level below
_COARSEST = 256  # cells of the last level
_FINE_ENOUGH = 4096  # cells of the first level if every event is kept
_FINEST = 1 << 18

Level = tuple[int, pl.DataFrame]
"""The width of a level, and its blocks by lane and start. Shorter events are in blocks; if the width is 0, only those
that are not kept."""


@dataclass(frozen=True)
class Kept:
    """Which events a timeline shows."""

    is_kept: pl.Series
    steps: list[int]  # steps of which all events are kept
    least_ns: int | None  # the shortest event kept elsewhere; None: no others, or all


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
    least = others["weight_ns"].top_k(room).min()
    longest = others.filter(others["weight_ns"] >= least) if isinstance(least, int) else others.head(0)
    longest = longest.sort("weight_ns", "start_ns", descending=[True, False]).head(room)
    return Kept(inside.scatter(longest["at"], True), chosen, least if isinstance(least, int) else None)


def levels(events: pl.DataFrame, is_kept: pl.Series, total: int, most_blocks: int) -> list[Level]:
    """Return level 0 and those above it, of events with `lane`, `start`, `end` (ticks) and `color`.

    The cells of the first level are as fine as `most_blocks` allows.
    """
    width = max(1, -(-total // (_FINE_ENOUGH if is_kept.all() else _FINEST)))
    others = events.filter(~is_kept)
    cells = others.select("lane", cell=pl.col("start") // width).unique()
    while cells.height > most_blocks and width < total:
        width, cells = width * FACTOR, cells.with_columns(pl.col("cell") // FACTOR).unique()
    rest = _merged(_pieces(others, width))
    found = [(0, _blocks(rest))]
    kept = events.filter(is_kept)
    length = kept["end"] - kept["start"]
    pieces, shortest = rest, 0
    while True:
        grown = _pieces(kept.filter((length >= shortest) & (length < width)), width)
        pieces = _merged(pl.concat([pieces, grown]))
        blocks, is_last = _blocks(pieces), width * _COARSEST >= total
        # Where the events of whole steps are many, the first cells may be too fine for their blocks.
        if blocks.height <= most_blocks or is_last:
            found.append((width, blocks))
        if is_last:
            return found
        coarser = _merged(pieces.with_columns(pl.col("cell") // FACTOR))
        pieces, shortest, width = coarser, width, width * FACTOR


def _pieces(events: pl.DataFrame, width: int) -> pl.DataFrame:
    busy, cell = pl.col("end") - pl.col("start"), pl.col("start") // width
    pieces = events.with_columns(cell=cell, busy=busy, num=pl.lit(1, pl.UInt32))
    return pieces.select("lane", "cell", "color", "start", "end", "busy", "num")


_SUMS = (pl.col("start").min(), pl.col("end").max(), pl.col("busy").sum(), pl.col("num").sum())


def _merged(pieces: pl.DataFrame) -> pl.DataFrame:
    return pieces.group_by("lane", "cell", "color").agg(*_SUMS)


def _blocks(pieces: pl.DataFrame) -> pl.DataFrame:
    """Return one block per cell, in ticks: `busy` is the time that events cover, `color` the color of most of it."""
    ordered = pieces.sort("busy", "num", "color", descending=[True, True, False])
    blocks = ordered.group_by("lane", "cell", maintain_order=True).agg(*_SUMS, pl.col("color").first())
    return blocks.sort("lane", "start")

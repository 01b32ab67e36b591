"""Loops over independent matrix products, with the other work in each iteration.

A trace does not show data dependencies. Products are independent if the same weight shapes repeat with different
numbers of rows, as in a loop over experts, or if one shape repeats with nothing computed in between that could lead
from a result to an input, as with one product per head.
"""

from __future__ import annotations

import polars as pl

_LEAST_REPEATS = 4
_MOST_IN_LOOP = 3  # products per expert: up, gate and down
_MOST_ALIKE = 0.25
"""Share of iterations that may have as many rows as the one before: dependent layers always have the same."""
_SCHEMA = pl.Schema(
    {
        "loop": pl.Int64(), "num_repeats": pl.Int64(), "event": pl.Int64(), "phase": pl.String(), "op": pl.String(),
        "place": pl.Int64(), "ordinal": pl.UInt32(), "duration_ns": pl.Int64(),
    }
)  # fmt: skip


def product_loops(work: pl.DataFrame, products: pl.DataFrame) -> pl.DataFrame:
    """Return GPU work of loops, one row per event, from the work of some steps and its products (`tiled_products`).

    `num_repeats` is the number of iterations, `place` the product it follows in an iteration, `ordinal` its number
    among that op's events there. One kernel could do the work of all iterations for rows equal in these, `phase` and
    `op`. The backward includes work of ops in the forward's iterations.
    """
    named = work.with_columns(pl.col("phase", "op").cast(pl.String)).sort("start_ns")
    is_backward = pl.col("phase").eq_missing("backward")
    counted = products.with_columns(is_backward.cum_sum().cast(pl.Int64).alias("num_backward"))
    forward = counted.filter(~is_backward, pl.col("root").is_not_null())
    parts: list[pl.DataFrame] = []
    for _, of_step in forward.group_by("step", maintain_order=True):
        for place, length, period in _loops(of_step):
            parts.append(_turns(named, of_step[place : place + length], period, len(parts)))
    return pl.concat(parts) if parts else pl.DataFrame(schema=_SCHEMA)


def _turns(work: pl.DataFrame, loop: pl.DataFrame, period: int, number: int) -> pl.DataFrame:
    """Return the work of one loop from its first to its last product, and its backward."""
    starts = work.filter(pl.col("event").is_in(loop["event"].implode())).select("event", "start_ns", "stream", "step")
    first = starts.row(0, named=True)
    inside = work.filter(
        pl.col("phase").ne_missing("backward"), pl.col("stream") == first["stream"], pl.col("step") == first["step"],
        pl.col("start_ns").is_between(first["start_ns"], starts["start_ns"].max()),
    )  # fmt: skip
    count = starts["start_ns"].search_sorted(inside["start_ns"], side="right").cast(pl.Int64) - 1
    inside = inside.with_columns((count // period).alias("turn"), (count % period).alias("place"))
    roots = inside.filter(pl.col("root").is_not_null()).unique("root", keep="first").select("root", "turn", "place")
    after = work.filter(pl.col("phase").eq_missing("backward")).join(roots, on="root", maintain_order="left")
    columns = ("event", "phase", "op", "turn", "place", "duration_ns")
    both = pl.concat([inside.select(columns), after.select(columns)])
    return both.select(
        pl.lit(number, pl.Int64).alias("loop"), pl.lit(loop.height // period, pl.Int64).alias("num_repeats"), "event",
        "phase", "op", "place", pl.int_range(pl.len()).over("phase", "turn", "place", "op").alias("ordinal"),
        "duration_ns",
    ).cast(_SCHEMA)  # fmt: skip


def _loops(products: pl.DataFrame) -> list[tuple[int, int, int]]:
    """Return the loops in one step's forward products: first product, number of products, products per iteration."""
    weights = list(products.select("inner", "num_columns").iter_rows())
    borders = (products["has_attention_before"] | (products["num_backward"].diff() > 0).fill_null(False)).to_list()
    loops, place = [], 0
    while place < len(weights):
        lengths = [_length(weights, borders, place, period) for period in range(1, _MOST_IN_LOOP + 1)]
        length = max(lengths)
        period = lengths.index(length) + 1
        if length and _are_independent(products[place : place + length], period):
            loops.append((place, length, period))
        place += max(1, length)
    return loops


def _length(weights: list[tuple[int, int]], borders: list[bool], place: int, period: int) -> int:
    """Return how many products from here on repeat their weight shapes with a period; 0 if this is not a loop."""
    end = place + 1
    while end < len(weights) and not borders[end] and (
        end < place + period or weights[end] == weights[end - period]
    ):  # fmt: skip
        end += 1
    repeats = (end - place) // period
    return repeats * period if repeats >= _LEAST_REPEATS else 0


def _are_independent(loop: pl.DataFrame, period: int) -> bool:
    rows = loop["num_rows"].gather_every(period)
    if rows.n_unique() > 1:
        # Row counts that only decrease are a recurrence over sequences of different lengths.
        is_alike = rows.diff().drop_nulls() == 0
        is_sorted = rows.is_sorted() or rows.is_sorted(descending=True)
        return not is_sorted and is_alike.sum() <= _MOST_ALIKE * len(is_alike)
    is_one_shape = loop.select("inner", "num_columns").n_unique() == 1 and loop["inner"][0] != loop["num_columns"][0]
    return is_one_shape and not loop["has_work_before"][1:].any()

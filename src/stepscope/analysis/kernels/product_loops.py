"""Loops over independent matrix products, how much of the GPU each fills, and experts of a mixture.

A trace does not show data dependencies. Products are independent if the same weight shapes repeat with different
numbers of rows, as in a loop over experts, or if one shape repeats with nothing computed in between that could lead
from a result to an input, as with one product per head.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import argument_values, operands
from stepscope.analysis.structure.work import product

# nvjet_sm90_tst_192x128_64x5, cutlass_80_tensorop_bf16_s16816gemm_128x64_…, tilesize128x128x64
_TILE = re.compile(r"(?:_|tilesize|tile)(\d{1,3})x(\d{1,3})(?=[x_])")
_USUAL_TILE = (128, 128)
_GROUPED = ("aten::_grouped_mm", "aten::grouped_mm")
_MOVING = ("copy_cast", "memset_memcpy")
_PRODUCTS = {
    "root": pl.UInt32(), "step": pl.Int64(), "phase": pl.String(), "op": pl.String(), "batch": pl.Int64(),
    "num_rows": pl.Int64(), "inner": pl.Int64(), "num_columns": pl.Int64(), "num_tiles": pl.Int64(),
    "flops": pl.Int64(), "bytes": pl.Int64(), "peak_dtype": pl.String(), "duration_ns": pl.Int64(),
    "event": pl.Int64(), "has_work_before": pl.Boolean(), "has_attention_before": pl.Boolean(),
}  # fmt: skip
_READ = (
    "root", "step", "phase", "op", "flops", "bytes", "peak_dtype", "duration_ns", "event", "class", "shapes",
    "dtypes", "root_op", "name",
)  # fmt: skip
_LEAST_REPEATS = 4
_MOST_IN_LOOP = 3  # products per expert: up, gate and down
_MOST_ALIKE = 0.25
"""Share of iterations that may have as many rows as the one before: dependent layers always have the same."""
_LOOPS = pl.Schema(
    {
        "loop": pl.Int64(), "num_repeats": pl.Int64(), "event": pl.Int64(), "phase": pl.String(), "op": pl.String(),
        "place": pl.Int64(), "ordinal": pl.UInt32(), "duration_ns": pl.Int64(),
    }
)  # fmt: skip


def tiled_products(work: pl.DataFrame) -> pl.DataFrame:
    """Return products of two matrices by time.

    `root` is the op that the program called (of the forward, for a backward). `num_tiles` uses the tile size in the
    kernel's name, else 128 × 128. The last columns tell whether anything but copies and fills, and whether attention,
    ran on the stream since the previous product.
    """
    rows: list[dict[str, Any]] = []
    other, attention = False, False
    ordered = work.sort("device", "stream", "start_ns").select(_READ)
    for row in ordered.with_columns(pl.col(pl.Categorical).cast(pl.String)).iter_rows(named=True):
        attention |= str(row["class"]).startswith("attention")
        sizes = product(row["op"], operands(row["shapes"], row["dtypes"])) if row["flops"] else None
        # Without grouped products on a device, torch runs their parts one by one: the program cannot change that.
        if sizes is None or row["root_op"] in _GROUPED:
            other |= row["class"] not in _MOVING and row["flops"] is not None
            continue
        row |= zip(("batch", "num_rows", "inner", "num_columns"), sizes)
        num_tiles = row["batch"] * _tiles(str(row["name"]), row["num_rows"], row["num_columns"])
        rows.append({**row, "num_tiles": num_tiles, "has_work_before": other, "has_attention_before": attention})
        other, attention = False, False
    return pl.DataFrame(rows, schema=_PRODUCTS)


def _tiles(kernel: str, num_rows: int, num_columns: int) -> int:
    found = _TILE.search(kernel)
    # A library that computes the transpose swaps the sizes: use the smaller number of tiles.
    high, wide = (int(found[1]), int(found[2])) if found else _USUAL_TILE
    return min(-(-num_rows // first) * -(-num_columns // second) for first, second in ((high, wide), (wide, high)))


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
    return pl.concat(parts) if parts else pl.DataFrame(schema=_LOOPS)


def _turns(work: pl.DataFrame, loop: pl.DataFrame, period: int, number: int) -> pl.DataFrame:
    """Return the work of one loop from its first to its last product, and its backward."""
    starts = work.filter(pl.col("event").is_in(loop["event"].implode())).select("event", "start_ns", "stream", "step")
    first = starts.row(0, named=True)
    inside = work.filter(
        pl.col("phase").ne_missing("backward"),
        *(pl.col(name).eq_missing(first[name]) for name in ("stream", "step")),
        pl.col("start_ns").is_between(first["start_ns"], starts["start_ns"].max()),
    )
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
    ).cast(_LOOPS)  # fmt: skip


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


_CHOOSING = {"aten::topk": None, "aten::argmax": 1, "aten::max": 1}  # experts per token; None if an argument gives it
_MOST_EXPERTS = 1024


@dataclass(frozen=True)
class Router:
    """What chooses experts for tokens."""

    num_tokens: int
    num_experts: int
    num_chosen: int  # experts per token


@dataclass(frozen=True)
class Looped:
    """Experts called one after the other, each with its own tokens, in one or several similar layers."""

    loads: tuple[tuple[int, ...], ...]  # tokens of each call by layer; an expert without tokens may not be called
    calls: tuple[int, ...]  # op rows of all layers

    @property
    def num_experts(self) -> int:
        return max(len(layer) for layer in self.loads)

    @property
    def imbalance(self) -> float:
        """The busiest expert's tokens over the mean; the median over layers."""
        shares = sorted(max(layer) * self.num_experts / sum(layer) for layer in self.loads)
        return shares[len(shares) // 2]


@dataclass(frozen=True)
class Padded:
    """Experts in one batched product with equal capacity."""

    router: Router
    capacity: int  # slots per expert
    calls: tuple[int, ...]

    @property
    def filled_share(self) -> float:
        """The largest share of slots that tokens can fill; above 1, tokens are dropped."""
        router = self.router
        return router.num_tokens * router.num_chosen / (router.num_experts * self.capacity)


def routers(work: pl.DataFrame) -> list[Router]:
    """Return the distinct routers in GPU work (`work.py`)."""
    found = []
    rows = work.filter(pl.col("op").cast(pl.String).is_in(list(_CHOOSING)), pl.col("phase").ne_missing("backward"))
    for op, shapes, inputs in rows.select("op", "shapes", "inputs").unique().iter_rows():
        given = [one for one in operands(shapes, None)[:1] if isinstance(one, Tensor)]
        if not given or len(given[0].shape) < 2 or not 2 <= given[0].shape[-1] <= _MOST_EXPERTS:
            continue
        chosen, values = _CHOOSING[str(op)], argument_values(inputs) or ()
        if chosen is None:
            chosen = int(values[1]) if len(values) > 1 and values[1].isdigit() else None
        shape = given[0].shape
        if chosen and chosen < shape[-1] < prod(shape[:-1]):
            found.append(Router(prod(shape[:-1]), shape[-1], chosen))
    return list(dict.fromkeys(found))


def looped_experts(work: pl.DataFrame, known: list[Router]) -> list[Looped]:
    """Return products with the same weight shape that split a layer's tokens unevenly, in one step's forward.

    They are experts if their tokens add up to the same number in every layer, or to the router's number.
    """
    groups: dict[tuple[object, str, tuple[int, int]], list[tuple[int, int]]] = {}
    for step, op, call, (_, rows, inner, columns) in _products(work, ("aten::mm", "aten::addmm")):
        if rows:
            groups.setdefault((step, op, (inner, columns)), []).append((rows, call))
    given = {router.num_tokens * router.num_chosen for router in known}
    found: dict[tuple[str, tuple[int, int]], Looped] = {}
    for (_, op, weight), calls in groups.items():
        loads = [rows for rows, _ in calls]
        layers = _layers(loads, given) if len(set(loads)) > 2 else None
        if layers:
            before = found.get((op, weight), Looped((), ()))
            numbers = (call for _, call in calls)
            found[op, weight] = Looped((*before.loads, *layers), (*before.calls, *numbers))
    return list(found.values())


def padded_experts(work: pl.DataFrame, known: list[Router]) -> list[Padded]:
    """Return batched products over a router's experts by capacity, with the fullest router that fits."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for _, _, call, (batch, rows, _, _) in _products(work, ("aten::bmm", "aten::baddbmm")):
        by_size.setdefault((batch, rows), []).append(call)
    found = []
    for (num_experts, capacity), calls in by_size.items():
        fitting = [router for router in known if router.num_experts == num_experts]
        if fitting and capacity:
            most = max(fitting, key=lambda router: router.num_tokens * router.num_chosen)
            found.append(Padded(most, capacity, tuple(calls)))
    return found


def _products(
    work: pl.DataFrame, ops: Collection[str]
) -> Iterator[tuple[object, str, int, tuple[int, int, int, int]]]:
    """Return matrix products outside the backward in order: step, op, call row, sizes as from `product`."""
    is_product = pl.col("op").cast(pl.String).is_in(list(ops)) & pl.col("phase").ne_missing("backward")
    rows = work.filter(is_product, pl.col("call").is_not_null()).unique("call", keep="first", maintain_order=True)
    for step, op, call, shapes in rows.sort("call").select("step", "op", "call", "shapes").iter_rows():
        sizes = product(op, operands(shapes, None))
        if sizes is not None:
            yield step, str(op), call, sizes


def _layers(loads: list[int], given: set[int]) -> list[tuple[int, ...]] | None:
    """Return loads split into runs of equal sum with two or more calls each; None if impossible."""
    ends = {total: place for place, total in enumerate(accumulate(loads), 1)}
    whole = sum(loads)
    for part in sorted(ends):
        num = whole // part
        if whole % part or (num < 2 and part not in given):
            continue
        places = [ends.get(part * i) for i in range(1, num + 1)]
        if None in places:
            continue
        borders = [0, *(place for place in places if place is not None)]
        layers = [tuple(loads[a:b]) for a, b in pairwise(borders)]
        if all(len(layer) > 1 for layer in layers):
            return layers
    return None

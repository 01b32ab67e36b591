"""GPU work with the op that launched it, that op's cost, and the sizes of its tensors."""

from collections.abc import Sequence
from math import prod

import polars as pl

from stepscope.analysis.costs.op_calls import Operand, Tensor
from stepscope.analysis.costs.op_costs import COLUMNS, op_costs, operands
from stepscope.analysis.costs.roofline import costed_calls
from stepscope.analysis.kernels.extra_work import is_run_again
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import ancestor, matches, outermost, with_answers

PRODUCTS = {
    "aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::addmm_": 1, "aten::baddbmm_": 1,
    "aten::_addmm_activation": 1, "aten::_scaled_mm": 0,
}  # fmt: skip
"""Ops that multiply two matrices, with the position of the left operand; the right one follows."""
_BYTES = ("read_bytes", "written_bytes")


def with_sizes(work: pl.DataFrame) -> pl.DataFrame:
    """Return rows with `shape` (the op's largest operand, or result of a product), `read_bytes` and `written_bytes`.

    The bytes stand at a call's longest event. Null if the trace does not contain shapes.
    """
    costs = op_costs(work.select(pl.col("op").alias("name"), *COLUMNS[1:]))
    sized = with_answers(work, ["op", "shapes", "dtypes"], _largest, {"shape": pl.List(pl.Int64())})
    is_longest = pl.col("bytes").is_not_null()
    return sized.with_columns(pl.when(is_longest).then(costs[name]).alias(name) for name in _BYTES)


def product(op: str | None, given: Sequence[Operand]) -> tuple[int, int, int, int] | None:
    """Return batch, rows, inner size and columns of a product of two matrices; None for other ops.

    >>> product("aten::mm", operands("[[8, 16], [16, 4]]", '["float", "float"]'))
    (1, 8, 16, 4)
    """
    place = PRODUCTS.get(op or "")
    if place is None or len(given) < place + 2:
        return None
    left, right = given[place : place + 2]
    if not (isinstance(left, Tensor) and isinstance(right, Tensor) and 2 <= len(left.shape) == len(right.shape) <= 3):
        return None
    batch = left.shape[0] if len(left.shape) == 3 else 1
    return batch, left.shape[-2], left.shape[-1], right.shape[-1]


def _largest(op: str | None, shapes: str | None, dtypes: str | None) -> tuple[list[int] | None]:
    given = operands(shapes, dtypes)
    known = [one.shape for one in given if isinstance(one, Tensor)]
    if sizes := product(op, given):
        batch, rows, _, columns = sizes
        known.append((batch, rows, columns))
    largest = max(known, key=prod, default=None)
    return (None if largest is None or prod(largest) >= 2**62 else list(largest),)


_COMPILED = r"^CompiledFunction|^Torch-Compiled Region|^## Call CompiledFxGraph"
# Autograd's wrappers around backward ops.
_AUTOGRAD = r"^autograd::|Backward\d*$|^torch::autograd::|^CompiledFunction|AccumulateGrad$"


def work(linked: Linked) -> pl.DataFrame:
    """Return GPU work by time, one row per event.

    `call` is the row of the launching op, `op` its name. `root` is the row of the outermost op that the program
    called (for the backward, the op it belongs to), `root_op` its name. `is_compiled` marks work of torch.compile.
    `flops`, `bytes`, `dtype` and `peak_dtype` are those of the whole call and stand at its longest event;
    `call_flops` stands at all of them.
    """
    host, device = linked.host, linked.device
    calls = costed_calls(linked).filter(pl.col("op").is_not_null())
    costs = calls.select(pl.col("op").alias("call"), "flops", "bytes", "dtype", "peak_dtype")
    origins = origins_of(host, device["op"])
    table = device.select(
        "event", "kind", "name", "class", "activity", "start_ns", "duration_ns", "device", "stream", "step", "phase",
        "module", pl.col("op").alias("call"), pl.col("op_name").alias("op"),
        *origins.drop("is_backward"),
        *(host[text].gather(device["op"]).alias(text) for text in COLUMNS if text != "name"),
    )  # fmt: skip
    table = table.join(costs, on="call", how="left", maintain_order="left")
    ordered = table.select("call", "duration_ns").with_row_index("at")
    ordered = ordered.sort("call", "duration_ns", "at", descending=[False, True, False])
    longest = ordered["at"].filter(ordered["call"].ne_missing(ordered["call"].shift(1)))
    is_longest = pl.repeat(False, table.height, dtype=pl.Boolean, eager=True).scatter(longest, True)
    return table.with_columns(
        pl.col("flops").alias("call_flops"), pl.when(is_longest).then(pl.col("flops", "bytes", "dtype", "peak_dtype"))
    )


def origins_of(host: pl.DataFrame, rows: pl.Series) -> pl.DataFrame:
    """Return where the program called each op: `root`, `root_op`, `is_backward`, `is_compiled`.

    The root is the outermost op that the program called; for a backward op, that of its forward op.
    """
    forward = host["forward"].gather(rows)
    # A checkpoint recomputes a forward inside a backward.
    is_backward = (forward.is_not_null() & ~is_run_again(host).gather(rows)).fill_null(False)
    is_called = (host["kind"] == "op") & ~matches(host["name"], _AUTOGRAD)
    roots = outermost(host, forward.zip_with(is_backward, rows), is_called)
    compiled = ancestor(host, matches(host["name"], _COMPILED)).gather(rows)
    return pl.DataFrame(
        {
            "root": roots,
            "root_op": host["name"].gather(roots),
            "is_backward": is_backward,
            "is_compiled": compiled.is_not_null(),
        }
    )

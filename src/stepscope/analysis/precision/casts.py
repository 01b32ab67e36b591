"""Casts between float32 and what tensor cores multiply: who asked for them, and which are of weights."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.links import Linked

LOW = ("bfloat16", "float16")
EXPLICIT = (
    "aten::to", "aten::_to_copy", "aten::type_as", "aten::float", "aten::half", "aten::bfloat16", "aten::copy_",
    "aten::clone", "aten::contiguous", "aten::_autocast_to_reduced_precision",
)  # fmt: skip
# Where each op that autocast casts for has its weight.
_WEIGHT = {
    "aten::linear": 1, "aten::addmm": 2, "aten::mm": 1, "aten::matmul": 1, "aten::conv1d": 1, "aten::conv2d": 1,
    "aten::conv3d": 1, "aten::convolution": 1, "aten::_convolution": 1,
}  # fmt: skip
_SCHEMA = pl.Schema(
    {
        "event": pl.Int64(), "step": pl.Int64(), "phase": pl.String(), "micro_batch": pl.Int64(),
        "root_op": pl.String(), "shape": pl.List(pl.Int64()), "source": pl.String(), "target": pl.String(),
        "is_autocast": pl.Boolean(), "is_weight": pl.Boolean(), "duration_ns": pl.Int64(), "start_ns": pl.Int64(),
        "end_ns": pl.Int64(),
    }
)  # fmt: skip


def casts(linked: Linked, work: pl.DataFrame) -> pl.DataFrame:
    """Casts between float32 and bfloat16 or float16 by a kernel of their own, one row each, in order of time.

    `event`, `step`, `phase`, `duration_ns`; `micro_batch`, how many backwards of the step came before it; `root_op`
    that the program called; `shape`, `source` and `target` dtype; `is_autocast`, whether the op around it is not a
    cast itself, so that autocast asked for it or the backward of what autocast did; `is_weight`, whether it casts
    the weight of the product around it; `start_ns` and `end_ns` of the casting op on the host.
    """
    host = linked.host
    rows = []
    copies = work.filter(pl.col("op").cast(pl.String) == "aten::copy_", pl.col("kind") == "kernel")
    copies = copies.filter(pl.col("call").is_not_null()).sort("start_ns")
    calls, roots = copies["call"], copies["root"]
    begins, ends = host["start_ns"].gather(calls), host["end_ns"].gather(calls)
    around = host["shapes"].gather(roots).cast(pl.String)
    columns = ("event", "step", "phase", "root_op", "shapes", "dtypes", "duration_ns")
    for row, root_shapes, begin, end in zip(
        copies.select(columns).with_columns(pl.col("phase", "root_op").cast(pl.String)).iter_rows(named=True),
        around, begins, ends,
    ):  # fmt: skip
        pair = [one for one in operands(row["shapes"], row["dtypes"])[:2] if isinstance(one, Tensor)]
        if len(pair) < 2 or {"float32"} != {one.dtype for one in pair} - set(LOW) or pair[0].dtype == pair[1].dtype:
            continue
        target, source = pair
        shape = list(target.shape)
        is_autocast = row["root_op"] not in EXPLICIT
        rows.append(
            (
                row["event"], row["step"], row["phase"], None, row["root_op"], shape, source.dtype, target.dtype,
                is_autocast, is_autocast and _is_weight(row["root_op"], root_shapes, shape), row["duration_ns"],
                begin, end,
            )
        )  # fmt: skip
    table = pl.DataFrame(rows, schema=_SCHEMA, orient="row")
    return table.with_columns(_micro_batches(linked, table["start_ns"], table["step"]))


def repeated(casts: pl.DataFrame) -> pl.DataFrame:
    """Of casts, those of weights in a forward that an earlier micro-batch of the step has cast already.

    A shape of which every micro-batch casts as many is taken for the same weights. With `num_micro_batches`.
    """
    forward = casts.filter("is_weight", pl.col("source") == "float32", pl.col("phase") == "forward")
    keys = ["step", "root_op", "shape"]
    counts = forward.group_by(*keys, "micro_batch").agg(pl.len().alias("num"))
    alike = counts.group_by(keys).agg(
        pl.len().alias("num_micro_batches"), (pl.col("num").n_unique() == 1).alias("is_alike")
    )
    again = forward.join(alike.filter("is_alike", pl.col("num_micro_batches") > 1), on=keys).drop("is_alike")
    return again.filter(pl.col("micro_batch") > pl.col("micro_batch").min().over(keys))


def _is_weight(root_op: str | None, shapes: str | None, shape: list[int]) -> bool:
    place = _WEIGHT.get(root_op or "")
    given = operands(shapes, None)
    if place is None or len(given) <= place:
        return False
    weight, entered = given[place], given[place - 1]
    if not isinstance(weight, Tensor) or not isinstance(entered, Tensor):
        return False
    return len(shape) > 1 and list(weight.shape) == shape != list(entered.shape)


def _micro_batches(linked: Linked, times: pl.Series, steps: pl.Series) -> pl.Series:
    """How many backwards had ended in the step at each time: a forward that follows a backward begins a new one."""
    phases = linked.steps.phases.filter(pl.col("phase").is_in(["forward", "backward"])).sort("start_ns")
    is_new = (phases["phase"] == "forward") & (phases["phase"].shift(1) == "backward")
    begins = phases["start_ns"].filter(is_new.fill_null(False))
    places = pl.DataFrame({"step": steps, "place": begins.search_sorted(times, side="right").cast(pl.Int64)})
    return places.select((pl.col("place") - pl.col("place").min().over("step")).alias("micro_batch")).to_series()

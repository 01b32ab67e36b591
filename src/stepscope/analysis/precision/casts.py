"""Casts between float32 and half precision, and FLOPs, matrix products and casts by dtype."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.analysis.costs.flops import StepFlops
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.links import Linked

LOW = ("bfloat16", "float16")
EXPLICIT = (
    "aten::to", "aten::_to_copy", "aten::type_as", "aten::float", "aten::half", "aten::bfloat16", "aten::copy_",
    "aten::clone", "aten::contiguous", "aten::_autocast_to_reduced_precision",
)  # fmt: skip
# Positions of weight and bias in ops that autocast casts for; the input comes before the weight.
_PARAMETERS = {
    "aten::linear": (1, 2), "aten::addmm": (2, 0), "aten::mm": (1,), "aten::matmul": (1,), "aten::conv1d": (1, 2),
    "aten::conv2d": (1, 2), "aten::conv3d": (1, 2), "aten::convolution": (1, 2), "aten::_convolution": (1, 2),
}  # fmt: skip
_SCHEMA = {
    "event": pl.Int64(), "step": pl.Int64(), "phase": pl.String(), "micro_batch": pl.Int64(),
    "root_op": pl.String(), "shape": pl.List(pl.Int64()), "source": pl.String(), "target": pl.String(),
    "is_autocast": pl.Boolean(), "is_weight": pl.Boolean(), "duration_ns": pl.Int64(), "start_ns": pl.Int64(),
    "end_ns": pl.Int64(),
}  # fmt: skip


def casts(linked: Linked, work: pl.DataFrame) -> pl.DataFrame:
    """Return casts between float32 and bfloat16 or float16 that have their own kernel, by time.

    `micro_batch` counts earlier backwards in the step. `is_autocast` means that the op around it is not a cast
    itself, so autocast or its backward inserted it. `is_weight` marks weights of the product around it. `start_ns`
    and `end_ns` are the casting op's on the host.
    """
    host = linked.host
    rows = []
    copies = work.filter(pl.col("op").cast(pl.String) == "aten::copy_", pl.col("kind") == "kernel")
    copies = copies.filter(pl.col("call").is_not_null()).sort("start_ns")
    copies = copies.select(
        *("event", "step", "phase", "duration_ns", "shapes", "dtypes"),
        *(host[name].gather(copies["call"]) for name in ("start_ns", "end_ns")),
        pl.col("root_op").cast(pl.String),
        host["shapes"].gather(copies["root"]).cast(pl.String).alias("root_shapes"),
    )
    for row in copies.iter_rows(named=True):
        pair = [one for one in operands(row["shapes"], row["dtypes"])[:2] if isinstance(one, Tensor)]
        if len(pair) < 2 or {"float32"} != {one.dtype for one in pair} - set(LOW) or pair[0].dtype == pair[1].dtype:
            continue
        target, source = pair
        row |= {"shape": list(target.shape), "source": source.dtype, "target": target.dtype}
        is_autocast = row["root_op"] not in EXPLICIT
        weight = parameter_shapes(row["root_op"], row["root_shapes"])[:1] if is_autocast else []
        is_weight = row["shape"] in weight and len(row["shape"]) > 1
        rows.append({**row, "is_autocast": is_autocast, "is_weight": is_weight})
    table = pl.DataFrame(rows, schema=_SCHEMA)
    return table.with_columns(_micro_batches(linked, table["start_ns"], table["step"]))


def repeated(casts: pl.DataFrame) -> pl.DataFrame:
    """Return casts of weights that an earlier micro-batch of the step already made, with `num_micro_batches`.

    Shapes that every micro-batch casts equally often count as the same weights.
    """
    forward = casts.filter("is_weight", pl.col("source") == "float32", pl.col("phase") == "forward")
    keys = ["step", "root_op", "shape"]
    counts = forward.group_by(*keys, "micro_batch").agg(pl.len().alias("num"))
    alike = counts.group_by(keys).agg(
        pl.len().alias("num_micro_batches"), (pl.col("num").n_unique() == 1).alias("is_alike")
    )
    again = forward.join(alike.filter("is_alike", pl.col("num_micro_batches") > 1), on=keys).drop("is_alike")
    return again.filter(pl.col("micro_batch") > pl.col("micro_batch").min().over(keys))


def parameter_shapes(op: str | None, shapes: str | None) -> list[list[int] | None]:
    """Return the shapes of the weight and bias passed to an op; None for one of the input's shape."""
    given = [list(one.shape) if isinstance(one, Tensor) else None for one in operands(shapes, None)]
    places = _PARAMETERS.get(op or "", ())
    if not places or len(given) <= places[0]:
        return []
    entered = given[places[0] - 1]
    return [None if given[place] == entered else given[place] for place in places if place < len(given)]


def _micro_batches(linked: Linked, times: pl.Series, steps: pl.Series) -> pl.Series:
    """Return the number of backwards finished in the step at each time."""
    phases = linked.steps.phases.filter(pl.col("phase").is_in(["forward", "backward"])).sort("start_ns")
    is_new = (phases["phase"] == "forward") & (phases["phase"].shift(1) == "backward")
    begins = phases["start_ns"].filter(is_new.fill_null(False))
    places = pl.DataFrame({"step": steps, "place": begins.search_sorted(times, side="right").cast(pl.Int64)})
    return places.select((pl.col("place") - pl.col("place").min().over("step")).alias("micro_batch")).to_series()


def flops_by_dtype(flops: StepFlops) -> list[Mapping[str, Any]]:
    """Return `model_flops`, `executed_flops` and `share` of executed by `dtype`, the largest first."""
    total = max(1, flops.hardware_flops)
    ordered = sorted(flops.hardware_flops_by_dtype.items(), key=lambda each: (-each[1], str(each[0])))
    model = flops.model_flops_by_dtype
    return [
        {"dtype": str(dtype), "model_flops": model.get(dtype, 0), "executed_flops": num, "share": num / total}
        for dtype, num in ordered
    ]


def products_by_dtype(calls: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    """Return matrix products per step by operand `dtype` and by `peak_dtype`, the peak that applies (or tf32)."""
    total = max(1, int(calls["duration_ns"].sum()))
    duration, flops = pl.col("duration_ns").sum(), pl.col("flops").sum()
    return (
        calls.group_by("dtype", "peak_dtype")
        .agg(
            (pl.len() / num_steps).alias("num_calls"),
            (duration / num_steps).alias("duration_ns"),
            (flops / num_steps).alias("flops"),
            (flops * 1e9 / duration.clip(1)).alias("flops_per_s"),
            (duration / total).alias("time_share"),
        )
        .sort("duration_ns", "dtype", "peak_dtype", descending=[True, False, False], nulls_last=True)
    )


def casts_by_use(casts: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    """Return casts (`casts.py`) per step by dtypes and use, the longest first."""
    keys = ["source", "target", "is_autocast", "is_weight", "phase", "root_op"]
    return (
        casts.group_by(keys)
        .agg((pl.len() / num_steps).alias("num_casts"), pl.col("duration_ns").sum() / num_steps)
        .sort("duration_ns", "num_casts", *keys, descending=[True, True, *[False] * len(keys)], nulls_last=True)
    )

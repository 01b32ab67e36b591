"""How close each op comes to its device's roofline.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore architectures", CACM
52(4), 2009. An op's limit is the larger of its FLOPs at the device's peak and its bytes at the device's bandwidth.
"""

import re
from dataclasses import asdict, dataclass

import polars as pl

from stepscope.analysis.costs.op_calls import words
from stepscope.analysis.costs.op_costs import COLUMNS, DTYPES, is_depthwise, op_cost, touched_bytes
from stepscope.analysis.kernels.copies import moved_bytes
from stepscope.analysis.kernels.kernel_classes import fused_ops
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import matches, with_answers
from stepscope.devices import find_device

BOUNDS = {
    "compute": "Limited by arithmetic.",
    "memory": "Limited by memory bandwidth.",
    "neither": "Far from both limits: latency, too little parallel work, or a slow kernel.",
}
NEAR_SHARE = 0.25  # an op below this share of its limit is bound by something else

_PEAK_DTYPES = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8", "int8": "int8",
}  # fmt: skip
_ON_TENSOR_CORES = ("bf16", "fp16", "tf32")
_TF32 = re.compile(r"(?i)tf32|_s1688gemm")
# A trace omits the dtype of list ops; the kernel's name has it.
_LIST_DTYPE = re.compile(r"multi_tensor_apply.*?Functor<(float|double|c10::BFloat16|c10::Half)\b")
# Inductor kernels without a template multiply no matrices. Lookups read less than they are given.
_PLAIN_FUSED = re.compile(r"(?:^|_)triton_(?:poi|red|per|for)_fused")
_LOOKUPS = words(
    "embedding embedding_dense_backward index index_put index_select _unsafe_index gather nll_loss_forward"
)


@dataclass(frozen=True)
class RooflineSummary:
    """Kernel time by limit, in ns; the parts add up to `total_ns`."""

    total_ns: int = 0
    known_ns: int = 0  # time of ops with known FLOPs or bytes
    compute_ns: int = 0
    memory_ns: int = 0
    neither_ns: int = 0
    unknown_ns: int = 0  # time of ops with unknown cost or peak
    known_share: float = 0.0
    limit_share: float | None = None  # time of the known ops at their limits ÷ their actual time

    def to_json(self) -> dict[str, int | float | None]:
        return asdict(self)


def roofline(linked: Linked, device_name: str | None) -> pl.DataFrame:
    """Return device time by `op`, `shapes`, `dtype` and `kernel`, the longest first, including unknown costs.

    It covers kernels, fills and copies within the device; communication and host copies have other limits. A cost is
    counted once per call; `kernel` is the call's longest. `intensity` is FLOPs per byte, `peak_dtype` the device peak
    that applies, `limit_share` the larger of `compute_share` and `memory_share`, `bound` one of `BOUNDS`. Shares are
    null for unknown devices. They can exceed 1: cached data need not be read, a tensor passed twice counts twice, and
    Winograd convolutions execute fewer FLOPs than the formula.
    """
    costs = (pl.col("flops"), pl.col("bytes"))
    rows = (
        costed_calls(linked)
        .rename({"op": "call", "name": "op"})
        .group_by("op", "shapes", "dtype", "kernel", "peak_dtype")
        .agg(
            pl.col("call").count().cast(pl.Int64).alias("num_calls"),
            pl.col("num_kernels", "total_ns").sum(),
            *(pl.when(cost.is_not_null().all()).then(cost.sum()) for cost in costs),
        )
    )
    ties = [pl.col(name).cast(pl.String) for name in ("op", "shapes", "kernel", "dtype")]
    rows = rows.sort("total_ns", *ties, descending=[True, False, False, False, False])
    return _placed(rows, device_name)


def roofline_summary(rows: pl.DataFrame) -> RooflineSummary:
    total = int(rows["total_ns"].sum())
    known = rows.filter((pl.col("flops") > 0) | pl.col("bytes").is_not_null())
    by_bound = dict(rows.group_by("bound").agg(pl.col("total_ns").sum()).iter_rows())
    placed = rows.filter(pl.col("bound").is_not_null())
    placed_ns = int(placed["total_ns"].sum())
    at_limit = float((placed["total_ns"] * placed["limit_share"].clip(0, 1)).sum())
    return RooflineSummary(
        total_ns=total,
        known_ns=int(known["total_ns"].sum()),
        compute_ns=by_bound.get("compute", 0),
        memory_ns=by_bound.get("memory", 0),
        neither_ns=by_bound.get("neither", 0),
        unknown_ns=by_bound.get(None, 0),
        known_share=int(known["total_ns"].sum()) / total if total else 0.0,
        limit_share=at_limit / placed_ns if placed_ns else None,
    )


def time_at_limit(rows: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Return a roofline's time by `class` of the longest kernel: `total_ns` = `at_limit_ns` + `above_limit_ns` +
    `unknown_ns`.

    `kernels` has a `class` for every `name`. Classes add up to the summary's time, to a nanosecond per row.
    """
    classes = kernels.select(pl.col("name").cast(pl.String).alias("kernel"), pl.col("class").cast(pl.String))
    placed = pl.col("bound").is_not_null()
    at_limit = (pl.col("total_ns") * pl.col("limit_share").clip(0, 1)).round().cast(pl.Int64)
    return (
        rows.with_columns(pl.col("kernel").cast(pl.String))
        .join(classes.unique("kernel", keep="first", maintain_order=True), on="kernel", how="left", nulls_equal=True)
        .with_columns(
            pl.col("class").fill_null("other"),
            pl.when(placed).then(at_limit).otherwise(0).alias("at_limit_ns"),
            pl.when(placed).then(0).otherwise("total_ns").alias("unknown_ns"),
        )
        .with_columns((pl.col("total_ns") - pl.col("at_limit_ns") - pl.col("unknown_ns")).alias("above_limit_ns"))
        .group_by("class")
        .agg(pl.col("total_ns", "at_limit_ns", "above_limit_ns", "unknown_ns").sum())
        .sort("total_ns", "class", descending=[True, False])
    )


def costed_calls(linked: Linked) -> pl.DataFrame:
    """Return each op that launched something with its texts, kernels, device time and cost."""
    device = linked.device.select("op", "kind", "name", "activity", "duration_ns")
    is_kernel = pl.col("kind") == "kernel"
    is_inside = (pl.col("kind") != "memcpy") | matches(device["name"], "(?i)memcpy DtoD")
    work = device.filter(pl.col("activity") != "communication", is_inside).sort(is_kernel, "duration_ns")
    aggregates = (
        pl.len().cast(pl.Int64).alias("num_kernels"),
        pl.col("duration_ns").sum().alias("total_ns"),
        pl.col("name").last().alias("kernel"),
    )
    calls = work.filter(pl.col("op").is_not_null()).group_by("op").agg(aggregates)
    # Work without an op counts as its own call.
    alone = work.filter(pl.col("op").is_null()).group_by("op", "name").agg(aggregates).drop("name")
    calls = pl.concat([calls, alone])
    calls = calls.with_columns(linked.host[text].gather(calls["op"]).alias(text) for text in COLUMNS)
    schema = {"flops": pl.Int64(), "bytes": pl.Int64(), "dtype": pl.String(), "peak_dtype": pl.String()}
    return with_answers(calls, ["kernel", *COLUMNS], _cost, schema)


def _cost(kernel: str | None, name: str | None, *texts: str | None) -> tuple[int | str | None, ...]:
    name, kernel = name or "", kernel or ""
    if _PLAIN_FUSED.search(name):
        ops = set(fused_ops(name))
        is_lookup = bool(_LOOKUPS & ops) and "_log_softmax_backward_data" not in ops
        return 0, None if is_lookup else touched_bytes(*texts[:3]), None, None
    in_list = _LIST_DTYPE.search(kernel)
    cost = op_cost(name, *texts, parameter_dtype=DTYPES[in_list[1]] if in_list else None)
    num_bytes = moved_bytes(cost, kernel, texts[0])
    peak_dtype = _PEAK_DTYPES.get(cost.dtype or "") if cost.flops else None
    if peak_dtype == "fp32" and _TF32.search(kernel):
        peak_dtype = "tf32"
    if peak_dtype in _ON_TENSOR_CORES and is_depthwise(name, texts[0], texts[1], texts[3]):
        peak_dtype = "fp32"
    return cost.flops, num_bytes, cost.dtype, peak_dtype


def _placed(rows: pl.DataFrame, device_name: str | None) -> pl.DataFrame:
    device = find_device(device_name) if device_name else None
    peaks = device.peak_flops if device else {}
    bandwidth = device.bandwidth_bytes_per_s if device else None
    whole = max(1, int(rows["total_ns"].sum()))
    per_second = 1e9 / pl.when(pl.col("total_ns") > 0).then("total_ns")
    peak = pl.col("peak_dtype").replace_strict(dict(peaks), default=None, return_dtype=pl.Float64)
    # A product faster than the float32 peak ran in TF32.
    is_tf32 = (pl.col("peak_dtype") == "fp32") & (pl.col("flops_per_s") > peaks.get("fp32", 0)) & ("tf32" in peaks)
    is_free = (pl.col("flops") == 0) & (device is not None)
    compute, memory, limit = pl.col("compute_share"), pl.col("memory_share"), pl.col("limit_share")
    nearer = pl.when(compute >= memory).then(pl.lit("compute")).otherwise(pl.lit("memory"))
    bound = pl.when(limit >= NEAR_SHARE).then(nearer).otherwise(pl.lit("neither")).cast(pl.Enum(list(BOUNDS)))
    return (
        rows.with_columns(
            time_share=pl.col("total_ns") / whole,
            flops_per_s=pl.col("flops") * per_second,
            bytes_per_s=pl.col("bytes") * per_second,
            intensity=pl.col("flops") / pl.when(pl.col("bytes") > 0).then("bytes"),
        )
        .with_columns(peak_dtype=pl.when(is_tf32).then(pl.lit("tf32")).otherwise("peak_dtype"))
        .with_columns(
            compute_share=pl.when(is_free).then(0.0).otherwise(pl.col("flops_per_s") / peak),
            memory_share=pl.col("bytes_per_s") / pl.lit(bandwidth, pl.Float64),
        )
        .with_columns(limit_share=pl.max_horizontal("compute_share", "memory_share"))
        .with_columns(bound=pl.when(compute.is_not_null() & memory.is_not_null()).then(bound))
    )

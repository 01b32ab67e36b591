"""Rules about the layout of tensors in memory."""

import polars as pl

from stepscope.analysis.costs.attainable_rates import NORM_SHARE, product_share
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.nesting import with_answers
from stepscope.findings.rule import Case, Evidence, Finding, on_gpu, one_finding
from stepscope.formatting import duration

_BATCH_NORMS = r"batch_norm"
_GROUP_NORMS = r"native_group_norm|native_layer_norm"
_LEAST_RANK = 4
_ON_TENSOR_CORES = ("bf16", "fp16", "tf32", "fp8")


@on_gpu
def memory_layout(case: Case) -> list[Finding]:
    """Do convolutions run on NCHW tensors, although tensor cores want channels last?"""
    case.with_shapes(and_dtypes=True)
    named = case.work.with_columns(pl.col("op", "class").cast(pl.String), pl.col("peak_dtype").cast(pl.String))
    images = with_answers(named, ["shapes", "dtypes", "strides"], _is_planar, {"is_planar": pl.Boolean()})
    images = images.filter("is_planar")
    convolving = images.filter((pl.col("call_flops") > 0).fill_null(False))
    if convolving.is_empty():
        return []
    group_norms = images.filter(pl.col("op").str.contains(_GROUP_NORMS))
    if not group_norms.is_empty():
        return []  # torch's group norm is slower in channels last, by more than convolutions gain
    norms = images.filter(pl.col("op").str.contains(_BATCH_NORMS), pl.col("class") == "norm")
    moves = convolving.filter(pl.col("class").is_in(["copy_cast", "memset_memcpy"]))
    products = convolving.filter(pl.col("class") == "convolution", pl.col("peak_dtype").is_in(_ON_TENSOR_CORES))
    durations = {**_norms_ns(case, norms), **_products_ns(case, products)}
    saving_ns = case.saving_ns(case.without(moves["event"], durations))
    if not case.is_worth(saving_ns):
        return []
    touched = pl.concat([moves, norms, convolving.filter(pl.col("class") == "convolution")])
    left_ns = pl.col("event").replace_strict(durations, default=None, return_dtype=pl.Float64)
    slow = products.filter(left_ns < pl.col("duration_ns"))
    parts = (
        (moves, "changing the layout of their tensors and back takes"),
        (norms, "batch norms take"),
        (slow, f"convolutions at {_tflops(slow):.0f} TFLOP/s take"),
    )
    costs = [f"{what} {duration(case.total_ns(rows), 3)}" for rows, what in parts if rows.height]
    keys = ("op", "module", "phase", "shapes")
    table = case.grouped(touched.with_columns(pl.col(keys).cast(pl.String)), "num_kernels", *keys)
    return one_finding(
        sentence=f"Convolutions get their tensors channels first (NCHW): {', '.join(costs)}, in a step of "
        f"{duration(case.step_ns, 3)}.",
        fix="model = model.to(memory_format=torch.channels_last); "
        "images = images.to(memory_format=torch.channels_last)",
        saving_ns=saving_ns,
        derived="the step replayed without the changes of layout, with batch norms at 45 % of the bandwidth and "
        "convolutions at 40 % of the peak, as good kernels reach in channels last",
        confidence="high" if moves.height and norms.height else "medium",
        falsified_by="set channels_last on model and images; the finding is wrong if kernels named nchwToNhwc stay",
        places=case.places(touched.sort("duration_ns", descending=True)["event"].head(20)),
        evidence=(Evidence("convolutions and norms in NCHW", table.head(8).to_dicts()),),
    )


def _is_planar(shapes: str | None, dtypes: str | None, strides: str | None) -> tuple[bool]:
    """Return whether an op's first tensor is a batch of images or volumes, channels first."""
    first = next((one for one in operands(shapes, dtypes, strides) if isinstance(one, Tensor)), None)
    if first is None or first.strides is None or len(first.shape) < _LEAST_RANK:
        return (False,)
    has_room = first.shape[1] > 1 and any(size > 1 for size in first.shape[2:])
    return (has_room and first.strides[1] > 1 and first.strides[-1] == 1,)


def _norms_ns(case: Case, norms: pl.DataFrame) -> dict[int, float]:
    """Return the time of each batch norm's kernels if they move their bytes as fast as those of channels last."""
    calls = norms.group_by("call").agg(pl.col("bytes").max(), pl.col("duration_ns").sum().alias("call_ns"))
    good_ns = pl.col("bytes") / (case.device.bandwidth_bytes_per_s * NORM_SHARE) * 1e9
    calls = calls.with_columns((good_ns / pl.col("call_ns")).clip(0, 1).fill_null(1.0).alias("left"))
    each = norms.select("event", "call", "duration_ns").join(calls.select("call", "left"), on="call")
    return dict(each.select("event", pl.col("duration_ns") * pl.col("left")).iter_rows())


def _products_ns(case: Case, products: pl.DataFrame) -> dict[int, float]:
    """Return the time of each convolution that is slower than a good kernel, as if it were one."""
    found = {}
    own = products.filter(pl.col("flops").is_not_null())
    for event, flops, dtype, ns in own.select("event", "flops", "peak_dtype", "duration_ns").iter_rows():
        peak = case.device.peak_flops.get(dtype or "")
        if peak:
            good_ns = flops / (peak * product_share("convolution", dtype)) * 1e9
            found[event] = min(float(ns), good_ns)
    return found


def _tflops(products: pl.DataFrame) -> float:
    return float(products["flops"].sum()) / max(1, int(products["duration_ns"].sum())) / 1e3

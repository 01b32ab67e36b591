"""Rules about matrix products: their precision, alignment and size; and the table of products behind them."""

from typing import Any

import polars as pl

from stepscope.analysis.costs.attainable_rates import gemm_ns
from stepscope.analysis.costs.op_calls import ITEM_BYTES, Tensor
from stepscope.analysis.costs.op_costs import is_depthwise, operands
from stepscope.analysis.kernels.product_loops import product_loops, tiled_products
from stepscope.analysis.structure.nesting import with_answers
from stepscope.analysis.structure.once import once
from stepscope.findings.rule import Case, Change, Evidence, Finding, Unavailable, on_gpu, one_finding, rule
from stepscope.formatting import plural, whole_percent

LOADED_BYTES = 16  # tensor cores load operands in units of this
_WITH_SUMMAND = ("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::_addmm_activation")
_SCHEMA = pl.Schema(
    {
        "op": pl.String(), "shapes": pl.String(), "module": pl.String(), "phase": pl.String(), "dtype": pl.String(),
        "peak_dtype": pl.String(), "flops": pl.Int64(), "bytes": pl.Int64(), "duration_ns": pl.Int64(),
        "kernel": pl.String(), "alignment_bytes": pl.Int64(), "odd_sizes": pl.List(pl.Int64()),
        "events": pl.List(pl.Int64()),
    }
)  # fmt: skip


@once
def gemm_calls(case: Case) -> pl.DataFrame:
    """Return matrix products outside attention whose FLOPs are known, one row per call; not depthwise convolutions.

    `kernel` is the longest one, `alignment_bytes` the largest power of two (up to 128) that divides all dimensions,
    `odd_sizes` the dimensions that are not a multiple of `LOADED_BYTES`. Raises Unavailable without shapes.
    """
    case.with_shapes(and_dtypes=True)
    gemms = case.work.filter(pl.col("class").is_in(["gemm", "convolution"]), pl.col("call").is_not_null())
    if gemms.is_empty():
        return pl.DataFrame(schema=_SCHEMA)
    calls = gemms.group_by("call", maintain_order=True).agg(
        pl.col("op", "shapes", "module", "phase").first().cast(pl.String),
        pl.col("dtype", "peak_dtype", "flops", "bytes").drop_nulls().first(),
        pl.col("duration_ns").sum(),
        pl.col("name").sort_by("duration_ns").last().cast(pl.String).alias("kernel"),
        pl.col("dtypes", "inputs").first().cast(pl.String),
        pl.col("event").alias("events"),
    )
    calls = calls.filter(pl.col("flops") > 0)
    texts = ["op", "shapes", "dtypes", "inputs"]
    calls = with_answers(calls, texts, lambda *call: (is_depthwise(*call),), {"is_depthwise": pl.Boolean()})
    if calls.is_empty():
        raise Unavailable("The trace does not contain the shapes of its matrix products.")
    calls = calls.filter(~pl.col("is_depthwise"))
    found = [_alignment(*texts) for texts in calls.select("op", "shapes", "dtypes").iter_rows()]
    return calls.with_columns(
        pl.Series("alignment_bytes", [alignment for alignment, _ in found], pl.Int64),
        pl.Series("odd_sizes", [sizes for _, sizes in found], pl.List(pl.Int64)),
    ).select(_SCHEMA.names())


@once
def products_of(case: Case) -> pl.DataFrame:
    """Return products of two matrices by time (`analysis/kernels/product_loops.py`)."""
    return tiled_products(case.work)


def by_shape(case: Case, calls: pl.DataFrame) -> list[dict[str, Any]]:
    """Return rows of evidence per step by op and shapes, the longest first."""
    keys = ("op", "shapes", "dtype", "kernel")
    rate = (pl.col("flops").sum() * 1e9 / pl.col("duration_ns").sum()).alias("flops_per_s")
    table = case.grouped(calls, "num_calls", *keys, more=[rate])
    return table.select(*keys, "num_calls", "duration_ns", "flops_per_s").head(8).to_dicts()


def _alignment(op: str, shapes: str | None, dtypes: str | None) -> tuple[int, list[int]]:
    """Return `alignment_bytes` and `odd_sizes` of both matrices' last two dimensions; convolutions are aligned."""
    first = 1 if op in _WITH_SUMMAND else 0
    tensors = operands(shapes, dtypes)[first : first + 2] if "conv" not in op else ()
    best, odd = 128, set()
    for matrix in tensors:
        if not isinstance(matrix, Tensor) or len(matrix.shape) < 2:
            continue
        item = ITEM_BYTES.get(matrix.dtype or "", 4)
        for size in matrix.shape[-2:]:
            while best > 1 and (size * item) % best:
                best //= 2
            if (size * item) % LOADED_BYTES:
                odd.add(size)
    return best, sorted(odd, reverse=True)


_FASTER = {
    "tf32": ("TF32", 'torch.set_float32_matmul_precision("high")  # further: torch.autocast("cuda", torch.bfloat16)'),
    "bf16": ("bfloat16", 'with torch.autocast("cuda", torch.bfloat16): …  # this device has no TF32'),
    "fp16": (
        "float16",
        'with torch.autocast("cuda", torch.float16): …, and torch.amp.GradScaler("cuda") for the backward  # this '
        "device has neither TF32 nor bfloat16",
    ),
}  # faster formats with their names and fixes; the one that changes least comes first


@on_gpu
def fp32_matmul(case: Case) -> list[Finding]:
    """Do matrix products run in float32 where tensor cores would be faster?

    TF32 takes float32 tensors as they are. On devices without TF32, the products must run in half precision.
    """
    peak = case.device.peak_flops
    faster = next((dtype for dtype in _FASTER if dtype in peak), None)
    if faster is None or "fp32" not in peak:
        raise Unavailable(f"No format faster than float32 is known for {case.device.name}.")
    slow = gemm_calls(case).filter(pl.col("peak_dtype") == "fp32")
    durations: dict[int, float] = {}
    for row in slow.iter_rows(named=True):
        expected = gemm_ns(case.device, faster, row["flops"], row["bytes"], row["alignment_bytes"] >= 16)
        durations |= case.scaled_to(min(expected, row["duration_ns"]), row["events"])
    saving_ns = case.saving_ns(Change(duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    tflops = float(slow["flops"].sum()) / max(1, int(slow["duration_ns"].sum())) / 1e3
    name, fix = _FASTER[faster]
    return one_finding(
        sentence=f"{case.number_text(slow, 'matrix product per step runs', 'matrix products per step run')} in "
        f"float32 without tensor cores. This takes {case.cost_text(slow)} at {tflops:.0f} TFLOP/s. The device's peak "
        f"is {peak['fp32'] / 1e12:.0f} TFLOP/s in float32 and {peak[faster] / 1e12:.0f} TFLOP/s in {name}.",
        fix=fix,
        saving_ns=saving_ns,
        upper_bound=faster != "tf32",
        derived=f"the step replayed with each product at 60 % of the {name} peak, 15 % if a dimension is not a "
        "multiple of 16 bytes, and never slower than now"
        + ("" if faster == "tf32" else "; the casts it needs are not counted"),
        confidence="high" if faster == "tf32" else "medium",
        falsified_by=f"look at the kernels of these products; the finding is wrong if they are named {faster}, or if "
        f"{name} changes the loss too much",
        places=case.places(slow["events"].explode()),
        is_provable=faster == "tf32",
        evidence=(Evidence("matrix products in float32", by_shape(case, slow)),),
    )


_PADDED_BYTES = 8  # Inductor pads products whose dimensions are not a multiple of this


@on_gpu
def misaligned_gemm(case: Case) -> list[Finding]:
    """Are matrix products slow because a dimension is not a multiple of what tensor cores load?"""
    peaks = case.device.peak_flops
    calls = gemm_calls(case).filter(
        pl.col("alignment_bytes") < LOADED_BYTES, pl.col("peak_dtype").is_in(["bf16", "fp16", "tf32", "fp8"])
    )
    durations: dict[int, float] = {}
    for row in calls.iter_rows(named=True):
        if row["peak_dtype"] in peaks:
            expected = gemm_ns(case.device, row["peak_dtype"], row["flops"], row["bytes"])
            durations |= case.scaled_to(min(expected, row["duration_ns"]), row["events"])
    saving_ns = case.saving_ns(Change(duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    sizes = sorted(set(calls["odd_sizes"].explode().drop_nulls()), reverse=True)[:3]
    share = float(calls["flops"].sum()) / float(calls["duration_ns"].sum()) * 1e9 / peaks[calls["peak_dtype"][0]]
    return one_finding(
        sentence=f"{case.number_text(calls, 'matrix product per step has', 'matrix products per step have')} a "
        f"dimension ({', '.join(map(str, sizes))}) that is not a multiple of {LOADED_BYTES} bytes. This takes "
        f"{case.cost_text(calls)} at {whole_percent(share)} of the device's peak.",
        fix=f"pad the dimension to a multiple of 64: {sizes[0]} -> {-(-sizes[0] // 64) * 64}",
        saving_ns=saving_ns,
        # The compiler pads a vocabulary of 30,522 by itself, but not layers of 196 (both bf16).
        group="compile" if int(calls["alignment_bytes"].max()) < _PADDED_BYTES else None,  # type: ignore[arg-type]
        derived="the step replayed with each of these products at 60 % of the peak",
        confidence="high" if share < 0.3 else "medium",
        falsified_by="pad the dimension; the finding is wrong if the products are not faster",
        places=case.places(calls["events"].explode()),
        evidence=(Evidence("misaligned matrix products", by_shape(case, calls)),),
    )


_LEAST_FILL = 0.5  # of the SMs; more tiles than that fill the GPU well enough
_GROUPED = "torch._grouped_mm(rows_sorted_by_expert, weights, offs=offsets)"
_BATCHED = "torch.bmm(torch.stack(inputs), torch.stack(weights))"
_ALIKE = ["loop", "phase", "op", "place", "ordinal"]  # work of several iterations that one kernel could do


@rule
def small_gemms(case: Case) -> list[Finding]:
    """Are many small, independent matrix products computed one after the other?

    If they do not fill the GPU, one product for all is faster. If they do but the host is slow, it still saves
    launches.
    """
    case.with_shapes()
    products = products_of(case)
    turns = product_loops(case.work, products)
    if turns.is_empty():
        return []
    num_processors = case.device.num_processors
    if num_processors is None and not case.is_on_cpu:
        raise Unavailable(f"The number of SMs of {case.device.name} is unknown.")
    sizes = products.drop("phase", "op", "duration_ns", "step", "root")
    turns = turns.join(sizes, on="event", how="left", maintain_order="left").with_columns(
        pl.col("num_tiles").mean().over("loop").alias("mean_tiles")
    )
    durations: dict[int, float] = {}
    gone: list[int] = []
    for _, part in turns.group_by(_ALIKE, maintain_order=True):
        # What does not occur in every iteration is not part of the loop.
        if part.height < part["num_repeats"][0] - 1:
            continue
        together_ns, dtype = float(part["duration_ns"].sum()), part["peak_dtype"][0]
        # One kernel for all iterations is faster if they did not fill the GPU.
        is_small = num_processors is None or part["mean_tiles"][0] < _LEAST_FILL * num_processors
        if is_small and dtype in case.device.peak_flops:
            expected_ns = gemm_ns(case.device, dtype, int(part["flops"].sum()), int(part["bytes"].sum()))
            together_ns = min(together_ns, expected_ns)
        durations[part["event"][0]] = together_ns
        gone += part["event"][1:].to_list()
    saving_ns = case.saving_ns(case.without(gone, durations, is_loop=True))
    if not case.is_worth(saving_ns):
        return []
    every = turns.filter(pl.col("num_tiles").is_not_null())
    fill = ""
    if num_processors is not None:
        share = float(every["num_tiles"].mean() or 0.0) / num_processors  # type: ignore[arg-type]  # numbers
        fill = f", each with tiles for {whole_percent(share)} of the GPU's {num_processors} SMs"
    tflops = float(every["flops"].sum()) / max(1, int(every["duration_ns"].sum())) / 1e3
    num_loops = every["loop"].n_unique() / case.num_steps
    varies = every.filter(pl.col("phase").ne_missing("backward"))["num_rows"].n_unique() > 1
    means = [pl.col("num_rows", "inner", "num_columns", "num_tiles").mean().round().cast(pl.Int64)]
    table = case.grouped(every, "num_calls", "op", "phase", "place", "ordinal", more=means).drop("place", "ordinal")
    digits = ".3f" if case.is_on_cpu else ".0f"
    loops = "loop causes" if num_loops == 1 else "loops cause"
    return one_finding(
        sentence=f"{case.number_text(every, 'matrix product')} per step run one after the other in "
        f"{plural(num_loops, 'loop')}{fill}. "
        f"They take {case.cost_text(every)} at {tflops:{digits}} TFLOP/s. With the other work in it, the {loops} "
        f"{turns.height / case.num_steps:,.0f} of {case.work.height / case.num_steps:,.0f} "
        f"{'ops' if case.is_on_cpu else 'launches'} per step.",
        fix=f"{_GROUPED if varies else _BATCHED}  # one product for the whole loop",
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step replayed with one iteration of each loop, whose products do the work of all (at 60 % of "
        "the peak if they did not fill the GPU), without the host's time for the other iterations",
        confidence="medium",
        falsified_by="look at the loop; the finding is wrong if a product needs the result of the one before",
        places=case.places(every["event"]),
        evidence=(Evidence("small matrix products in loops", table.head(8).to_dicts()),),
    )

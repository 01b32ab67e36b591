"""Are many small, independent matrix products computed one after the other?

If they do not fill the GPU, one product for all is faster. If they do but the host is slow, it still saves launches.
"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.attainable_rates import gemm_ns
from stepscope.analysis.kernels.product_loops import product_loops, tiled_products
from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, one_finding, plural, whole_percent

_LEAST_FILL = 0.5  # of the SMs; more tiles than that fill the GPU well enough
_GROUPED = "torch._grouped_mm(rows_sorted_by_expert, weights, offs=offsets)"
_BATCHED = "torch.bmm(torch.stack(inputs), torch.stack(weights))"
_ALIKE = ["loop", "phase", "op", "place", "ordinal"]  # work of several iterations that one kernel could do


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    products = tiled_products(case.work)
    turns = product_loops(case.work, products)
    if turns.is_empty():
        return []
    num_processors = case.device.num_processors
    if num_processors is None:
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
        if part["mean_tiles"][0] < _LEAST_FILL * num_processors and dtype in case.device.peak_flops:
            expected_ns = gemm_ns(case.device, dtype, int(part["flops"].sum()), int(part["bytes"].sum()))
            together_ns = min(together_ns, expected_ns)
        durations[part["event"][0]] = together_ns
        gone += part["event"][1:].to_list()
    saving_ns = case.saving_ns(case.without(gone, durations, is_loop=True))
    if not case.is_worth(saving_ns):
        return []
    every = turns.filter(pl.col("num_tiles").is_not_null())
    fill = float(every["num_tiles"].mean() or 0.0) / num_processors  # type: ignore[arg-type]
    tflops = float(every["flops"].sum()) / max(1, int(every["duration_ns"].sum())) / 1e3
    num_loops = every["loop"].n_unique() / case.num_steps
    varies = every.filter(pl.col("phase").ne_missing("backward"))["num_rows"].n_unique() > 1
    means = [pl.col("num_rows", "inner", "num_columns", "num_tiles").mean().round().cast(pl.Int64)]
    table = case.grouped(every, "num_calls", "op", "phase", "place", "ordinal", more=means).drop("place", "ordinal")
    loops = "loop causes" if num_loops == 1 else "loops cause"
    return one_finding(
        sentence=f"{case.number_text(every, 'matrix product')} per step run one after the other in "
        f"{plural(num_loops, 'loop')}, each with tiles for {whole_percent(fill)} of the GPU's {num_processors} SMs. "
        f"They take {case.cost_text(every)} at {tflops:.0f} TFLOP/s. With the other work in it, the {loops} "
        f"{turns.height / case.num_steps:,.0f} of {case.work.height / case.num_steps:,.0f} launches per step.",
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

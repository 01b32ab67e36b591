"""Are many small matrix products done one after the other that do not need one another?

Where such products do not fill the device, one for all is faster on it; where they do and the host cannot launch
them fast enough, it still saves the launches.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.analysis.costs.attainable_rates import gemm_ns
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import Case

_LEAST_FILL = 0.5
"""Of the processors: a product whose tiles occupy more of them fills the device well enough."""
_ALIKE = ["loop", "phase", "op", "place", "ordinal"]
"""Work of different turns that one piece could do for all."""


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    turns = case.product_loops
    if turns.is_empty():
        return []
    num_processors = case.device.num_processors
    if num_processors is None:
        raise Unavailable(f"how many processors {case.device.name} has is not known")
    sizes = case.products.drop("phase", "op", "duration_ns", "step", "root")
    turns = turns.join(sizes, on="event", how="left", maintain_order="left").with_columns(
        pl.col("num_tiles").mean().over("loop").alias("mean_tiles")
    )
    durations: dict[int, float] = {}
    gone: list[int] = []
    for _, part in turns.group_by(_ALIKE, maintain_order=True):
        # What does not come in every turn is not the loop's.
        if part.height < part["num_repeats"][0] - 1:
            continue
        is_filling = part["mean_tiles"][0] >= _LEAST_FILL * num_processors
        durations[part["event"][0]] = _together_ns(case, part, is_filling)
        gone += part["event"][1:].to_list()
    change = case.without(pl.Series(gone, dtype=pl.Int64), is_loop=True)
    saving_ns = case.saving_ns(replace(change, duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    every = turns.filter(pl.col("num_tiles").is_not_null())
    total_ns = float(every["duration_ns"].sum()) / case.num_steps
    fill = float(every["num_tiles"].mean() or 0.0) / num_processors  # type: ignore[arg-type]
    tflops = float(every["flops"].sum()) / max(1, int(every["duration_ns"].sum())) / 1e3
    num_loops = every["loop"].n_unique() / case.num_steps
    varies = every.filter(pl.col("phase").ne_missing("backward"))["num_rows"].n_unique() > 1
    table = (
        every.group_by("op", "phase", "place", "ordinal")
        .agg(
            (pl.len() / case.num_steps).alias("num_calls"),
            pl.col("num_rows", "inner", "num_columns", "num_tiles").mean().round().cast(pl.Int64),
            pl.col("duration_ns").sum() / case.num_steps,
        )
        .drop("place", "ordinal")
        .sort("duration_ns", descending=True)
    )
    return [
        Finding(
            sentence=f"{plural(every.height / case.num_steps, 'matrix product')} a step come one after the other in "
            f"{plural(num_loops, 'loop')}, each with tiles for {fill:.0%} of the device's {num_processors} "
            f"processors: {duration(total_ns, 3)} of {duration(case.step_ns, 3)} at {tflops:.0f} TFLOP/s. "
            f"With what else is done in a turn, {turns.height / case.num_steps:,.0f} of the step's "
            f"{case.work.height / case.num_steps:,.0f} launches are the {'loop' if num_loops == 1 else 'loops'}'s.",
            fix="torch._grouped_mm(rows_sorted_by_expert, weights, offs=offsets)  # one product for all of the loop"
            if varies
            else "torch.bmm(torch.stack(inputs), torch.stack(weights))  # one product for all of the loop",
            saving_ns=saving_ns,
            upper_bound=True,
            derived="the step replayed with one turn of each loop: its products do the work of all, at 60 % of the "
            "peak where they did not fill the device, and the host's time for the other turns is gone",
            confidence="medium",
            falsified_by="products that need the result of the one before",
            places=case.places(every["event"]),
            evidence=(Evidence("small matrix products in loops", table.head(8).to_dicts()),),
        )
    ]


def _together_ns(case: Case, part: pl.DataFrame, is_filling: bool) -> float:
    """How long one piece takes that does the work of all turns: what does not fill the device is faster together."""
    now_ns = float(part["duration_ns"].sum())
    dtype = part["peak_dtype"][0]
    if is_filling or dtype not in case.device.peak_flops:
        return now_ns
    return min(now_ns, gemm_ns(case.device, dtype, int(part["flops"].sum()), int(part["bytes"].sum())))

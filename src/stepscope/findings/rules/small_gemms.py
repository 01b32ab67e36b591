"""Are many small matrix products done one after the other that do not need one another?

Products that follow one another may need one another, and a trace does not say. It shows that they do not where the
same shapes of weights come again and again with other numbers of rows, as in a loop over experts; and where one
shape comes in a row with nothing computed between that could lead from a result back to an input, as with one
product for each head.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.analysis.reach import gemm_ns
from stepscope.findings.case import Case
from stepscope.findings.finding import CannotCheck, Evidence, Finding
from stepscope.findings.wording import milliseconds, several

_LEAST_REPEATS = 4
_MOST_IN_LOOP = 3
"""Products of one expert: up, gate and down."""
_LEAST_FILL = 0.5
"""Of the processors: a product whose tiles occupy more of them fills the device well enough."""


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    products = case.products
    forward = products.filter(pl.col("phase").ne_missing("backward"), pl.col("root").is_not_null())
    loops = [loop for _, part in forward.group_by("step", maintain_order=True) for loop in _loops(part)]
    if not loops:
        return []
    num_processors = case.device.num_processors
    if num_processors is None:
        raise CannotCheck(f"how many processors {case.device.name} has is not known")
    durations: dict[int, float] = {}
    gone: list[int] = []
    told: list[pl.DataFrame] = []
    for number, loop in enumerate(loops):
        # With the products of the backward, whose root is the forward's op.
        mine = products.filter(pl.col("root").is_in(loop["root"].implode()))
        if float(mine["num_tiles"].mean() or 0.0) >= _LEAST_FILL * num_processors:  # type: ignore[arg-type]
            continue
        told.append(mine.with_columns(pl.lit(number).alias("loop")))
        for _, part in mine.group_by("phase", "peak_dtype"):
            dtype = part["peak_dtype"][0]
            if dtype not in case.device.peak_flops:
                continue
            together_ns = gemm_ns(case.device, dtype, int(part["flops"].sum()), int(part["bytes"].sum()))
            now_ns = float(part["duration_ns"].sum())
            # An expert's products of different shape stay apart: as many kernels as there are shapes.
            shapes = part.unique(["inner", "num_columns"], keep="first", maintain_order=True)["event"].to_list()
            durations |= dict.fromkeys(shapes, min(together_ns, now_ns) / len(shapes))
            gone += [event for event in part["event"] if event not in shapes]
    if not told:
        return []
    saving_ns = case.saving_ns(replace(case.without(pl.Series(gone, dtype=pl.Int64)), duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    every = pl.concat(told)
    total_ns = float(every["duration_ns"].sum()) / case.num_steps
    fill = float(every["num_tiles"].mean() or 0.0) / num_processors  # type: ignore[arg-type]
    tflops = float(every["flops"].sum()) / max(1, int(every["duration_ns"].sum())) / 1e3
    varies = every.filter(pl.col("phase").ne_missing("backward"))["num_rows"].n_unique() > 1
    table = (
        every.group_by("op", "phase", "inner", "num_columns")
        .agg(
            (pl.len() / case.num_steps).alias("num_calls"),
            pl.col("num_rows").mean(),
            pl.col("num_tiles").mean(),
            pl.col("duration_ns").sum() / case.num_steps,
        )
        .sort("duration_ns", descending=True)
    )
    return [
        Finding(
            sentence=f"{several(every.height / case.num_steps, 'matrix product')} a step come one after the other in "
            f"{several(len(told) / case.num_steps, 'loop')}, each with tiles for {fill:.0%} of the device's "
            f"{num_processors} processors: {milliseconds(total_ns)} of {milliseconds(case.step_ns)} at "
            f"{tflops:.0f} TFLOP/s.",
            fix="torch._grouped_mm(rows_sorted_by_expert, weights, offs=offsets)  # one product for all of the loop"
            if varies
            else "torch.bmm(torch.stack(inputs), torch.stack(weights))  # one product for all of the loop",
            saving_ns=saving_ns,
            upper_bound=True,
            derived="the step replayed with one product for each loop and shape, at 60 % of the peak, and without "
            "the host's time for the others; what else is in the loop stays",
            confidence="medium",
            falsified_by="products that need the result of the one before",
            places=case.places(every["event"]),
            evidence=(Evidence("small matrix products in loops", table.head(8).to_dicts()),),
        )
    ]


def _loops(products: pl.DataFrame) -> list[pl.DataFrame]:
    """Stretches of products that do not need one another, of one step's forward in order."""
    weights = list(products.select("inner", "num_columns").iter_rows())
    borders = products["has_attention_before"].to_list()
    loops, place = [], 0
    while place < len(weights):
        lengths = [_length(weights, borders, place, period) for period in range(1, _MOST_IN_LOOP + 1)]
        length = max(lengths)
        if length and _are_independent(products[place : place + length]):
            loops.append(products[place : place + length])
        place += max(1, length)
    return loops


def _length(weights: list[tuple[int, int]], borders: list[bool], place: int, period: int) -> int:
    """How many products from here on repeat their weights' shapes with a period; 0 where it is no loop."""
    end = place + 1
    while end < len(weights) and not borders[end] and (
        end < place + period or weights[end] == weights[end - period]
    ):  # fmt: skip
        end += 1
    repeats = (end - place) // period
    return repeats * period if repeats >= _LEAST_REPEATS else 0


def _are_independent(loop: pl.DataFrame) -> bool:
    rows = loop["num_rows"]
    # Rows that only become fewer are a recurrence over sequences that end one after the other.
    if rows.n_unique() > 1:
        return not (rows.is_sorted() or rows.is_sorted(descending=True))
    is_one_shape = loop.select("inner", "num_columns").n_unique() == 1 and loop["inner"][0] != loop["num_columns"][0]
    return is_one_shape and not loop["has_work_before"][1:].any()

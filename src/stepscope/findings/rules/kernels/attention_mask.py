"""Does a mask keep scaled dot-product attention from its fastest kernels?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.attainable_rates import attention_ns
from stepscope.findings.rule import Case, Evidence, Finding, one_finding

_PEAKS = {"bfloat16": "bf16", "float16": "fp16"}


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    calls = case.attention.filter(
        pl.col("mask").is_not_null(), pl.col("num_queries") > 1, pl.col("num_queries") == pl.col("num_keys"),
        pl.col("dtype").is_in(list(_PEAKS)),
    )  # fmt: skip
    durations: dict[int, float] = {}
    for row in calls.iter_rows(named=True):
        expected = attention_ns(case.device, _PEAKS[row["dtype"]], row["full_flops"] // 2, row["num_keys"])
        durations |= case.scaled_to(min(expected, row["duration_ns"]), row["events"])
    # The cost of the mask itself: converting it to a bias, broadcasting and adding it.
    roots = case.work.filter(pl.col("event").is_in(list(durations)))["root"].drop_nulls().unique()
    on_mask = case.work.filter(
        pl.col("root").is_in(roots.implode()), ~pl.col("event").is_in(list(durations)), pl.col("phase") == "forward"
    )
    saving_ns = case.saving_ns(case.without(on_mask["event"], durations))
    if not case.is_worth(saving_ns):
        return []
    forward = calls.filter(pl.col("direction") != "backward")
    one = (forward if forward.height else calls).row(0, named=True)
    keys = ("backend", "direction", "mask", "dtype", "num_queries", "head_size")
    return one_finding(
        sentence=f"scaled_dot_product_attention gets a mask of shape {one['mask']} in "
        f"{case.number_text(forward, 'call')} per step, which rules out flash attention. The {one['backend']} "
        f"backend takes {case.cost_text(calls)} for all {one['num_queries']:,} × {one['num_keys']:,} scores.",
        fix="F.scaled_dot_product_attention(q, k, v, is_causal=True)  # if the mask is causal; for other "
        "patterns: torch.nn.attention.flex_attention with a block mask",
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step replayed with causal flash attention (half the scores, at the share of the device's peak "
        "that such kernels reach) and without the work on the mask; a mask with fewer zeros saves less",
        confidence="medium",
        falsified_by="use is_causal=True; the finding is wrong if the mask is not causal, or if the flash kernels "
        "take as long",
        places=case.places(calls["events"].explode()),
        evidence=(Evidence("attention calls with a mask", case.grouped(calls, "num_calls", *keys).to_dicts()),),
    )

"""Is a mask given to scaled dot-product attention that keeps it from its fastest kernels?"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.analysis.costs.attainable_rates import attention_ns
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import Case

_PEAKS = {"bfloat16": "bf16", "float16": "fp16"}


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    calls = case.attention.filter(
        pl.col("mask").is_not_null(), pl.col("num_queries") > 1, pl.col("num_queries") == pl.col("num_keys")
    )
    calls = calls.filter(pl.col("dtype").is_in(list(_PEAKS)))
    if calls.is_empty():
        return []
    durations: dict[int, float] = {}
    for row in calls.iter_rows(named=True):
        expected = attention_ns(case.device, _PEAKS[row["dtype"]], row["full_flops"] // 2, row["num_keys"])
        durations |= case.scaled_to(min(expected, row["duration_ns"]), row["events"])
    # What the mask itself costs: made a bias of, broadcast, added.
    roots = case.work.filter(pl.col("event").is_in(list(durations)))["root"].drop_nulls().unique()
    on_mask = case.work.filter(
        pl.col("root").is_in(roots.implode()), ~pl.col("event").is_in(list(durations)), pl.col("phase") == "forward"
    )
    saving_ns = case.saving_ns(replace(case.without(on_mask["event"]), duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    forward = calls.filter(pl.col("direction") != "backward")
    one = (forward if forward.height else calls).row(0, named=True)
    total_ns = float(calls["duration_ns"].sum()) / case.num_steps
    table = (
        calls.group_by("backend", "direction", "mask", "dtype", "num_queries", "head_size")
        .agg((pl.len() / case.num_steps).alias("num_calls"), pl.col("duration_ns").sum() / case.num_steps)
        .sort("duration_ns", descending=True)
    )
    return [
        Finding(
            sentence=f"A mask of shape {one['mask']} is given to {plural(forward.height / case.num_steps, 'call')} "
            f"of scaled_dot_product_attention a step, so that flash attention cannot be used: the {one['backend']} "
            f"back end takes {duration(total_ns, 3)} of {duration(case.step_ns, 3)} for all "
            f"{one['num_queries']:,} × {one['num_keys']:,} scores.",
            fix="F.scaled_dot_product_attention(q, k, v, is_causal=True)  # where the mask is causal; other "
            "patterns: torch.nn.attention.flex_attention with a block mask",
            saving_ns=saving_ns,
            upper_bound=True,
            derived="the step replayed with causal flash attention (half the scores, at what such kernels reach of "
            "the device's peak) and without the work on the mask; a mask with fewer zeros saves less",
            confidence="medium",
            falsified_by="a mask that is not causal, or flash kernels that take as long with is_causal=True",
            places=case.places(calls["events"].explode()),
            evidence=(Evidence("attention calls with a mask", table.to_dicts()),),
        )
    ]

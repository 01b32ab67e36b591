"""Does scaled dot-product attention run on a slow backend even though no mask rules out the fast ones?"""

from __future__ import annotations

from typing import Any

import polars as pl

from stepscope.analysis.attention.reasons import LARGEST_HEAD, LEAST_CAPABILITY, against_flash, in_words
from stepscope.analysis.costs.attainable_rates import attention_ns
from stepscope.findings.rule import Case, Evidence, Finding, one_finding, plural

_PEAKS = {"bfloat16": "bf16", "float16": "fp16"}
_FIXES = {
    "dtype": 'with torch.autocast("cuda", torch.bfloat16): …  # or q, k, v = (x.bfloat16() for x in (q, k, v))',
    "head_size": f"use more heads of at most {LARGEST_HEAD} each",
    "layout": "pass q, k, v with stride(-1) == 1",
    "causal_lengths": "attn_mask=torch.nn.attention.bias.causal_lower_right(queries, keys)  # not is_causal=True",
    "mask": "F.scaled_dot_product_attention(q, k, v, is_causal=True)  # if the mask is causal",
    "not_seen": "remove sdpa_kernel(…) and torch.backends.cuda.enable_flash_sdp(False)",
}  # by what rules out flash attention; the first to change comes first


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    # `attention_mask` reports masked calls in half precision.
    is_masked = pl.col("mask").is_not_null() & pl.col("dtype").is_in(list(_PEAKS))
    calls = case.attention.filter(
        pl.col("backend").is_in(["efficient", "math"]), ~is_masked, pl.col("num_queries") > 1
    )
    if calls.is_empty():
        return []
    capability = case.device.compute_capability
    if capability is not None and capability < LEAST_CAPABILITY:
        return []
    durations: dict[int, float] = {}
    gone: list[int] = []
    for row in calls.iter_rows(named=True):
        flops = _done_flops(case, row) // (2 if row["is_causal"] else 1)
        expected = attention_ns(case.device, _PEAKS.get(row["dtype"], "bf16"), flops, row["num_keys"])
        taken = case.work.filter(pl.col("event").is_in(row["events"]))
        if row["backend"] != "efficient":  # the longest event of each phase, in place of the flash kernel
            taken = taken.sort("duration_ns", descending=True).unique("phase", keep="first", maintain_order=True)
        factor = expected / max(1, int(taken["duration_ns"].sum()))
        factor = min(1.0, factor) if row["backend"] == "efficient" else factor
        durations |= {event: ns * factor for event, ns in taken.select("event", "duration_ns").iter_rows()}
        gone += [event for event in row["events"] if event not in durations]
    saving_ns = case.saving_ns(case.without(gone, durations))
    if not case.is_worth(saving_ns):
        return []
    worst = calls.sort("duration_ns").row(-1, named=True)
    codes = against_flash(worst, is_on_gpu=True) or ["not_seen"]
    why = "; ".join(in_words(code, worst) for code in codes)
    num_calls = calls.filter(pl.col("direction") != "backward").height / case.num_steps
    keys = ("backend", "direction", "dtype", "num_queries", "num_keys", "head_size", "is_causal")
    return one_finding(
        sentence=f"scaled_dot_product_attention runs on the {worst['backend']} backend instead of flash attention in "
        f"{plural(num_calls, 'call')} per step, because {why}. This takes "
        f"{case.cost_text(calls)} for {worst['num_queries']:,} × {worst['num_keys']:,} scores in "
        f"{plural(worst['num_heads'], 'head')} of size {worst['head_size']}.",
        fix=next(fix for code, fix in _FIXES.items() if code in codes),
        saving_ns=saving_ns,
        derived="the step replayed with each call at the share of the device's peak that flash attention reaches in "
        "half precision; casts of its inputs are not counted",
        confidence="high" if worst["dtype"] in _PEAKS and worst["head_size"] <= LARGEST_HEAD else "medium",
        falsified_by="look at the kernels of these calls; the finding is wrong if they are named flash or cudnn, or "
        "if sdpa_kernel(SDPBackend.FLASH_ATTENTION) is as slow or rejects the inputs",
        places=case.places(calls["events"].explode()),
        evidence=(Evidence("attention calls on slow backends", case.grouped(calls, "num_calls", *keys).to_dicts()),),
    )


def _done_flops(case: Case, row: dict[str, Any]) -> int:
    """Return the FLOPs of a call; for the math backend, only those of the passes that the trace contains."""
    if row["backend"] != "math":
        return int(row["full_flops"])
    ops = case.work.filter(pl.col("event").is_in(row["events"]))["op"].cast(pl.String).fill_null("")
    has_backward = bool(ops.str.contains("softmax_backward").any())
    has_forward = not has_backward or bool(ops.str.contains("softmax$").any())
    return int(row["full_flops"]) * (2 * has_forward + 5 * has_backward) // 7

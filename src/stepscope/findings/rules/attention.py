"""Rules about attention: slow backends, masks, and attention written by hand."""

from typing import Any

import polars as pl

from stepscope.analysis.attention.reasons import LARGEST_HEAD, LEAST_CAPABILITY, against_flash, in_words
from stepscope.analysis.costs.attainable_rates import attention_ns
from stepscope.findings.rule import Case, Evidence, Finding, on_gpu, one_finding, rule
from stepscope.findings.rules.memory import alive_bytes, is_worth_bytes
from stepscope.formatting import plural, size

_PEAKS = {"bfloat16": "bf16", "float16": "fp16"}
_FIXES = {
    "dtype": 'with torch.autocast("cuda", torch.bfloat16): …  # or q, k, v = (x.bfloat16() for x in (q, k, v))',
    "head_size": f"use more heads of at most {LARGEST_HEAD} each",
    "layout": "pass q, k, v with stride(-1) == 1",
    "causal_lengths": "attn_mask=torch.nn.attention.bias.causal_lower_right(queries, keys)  # not is_causal=True",
    "mask": "F.scaled_dot_product_attention(q, k, v, is_causal=True)  # if the mask is causal",
    "not_seen": "remove sdpa_kernel(…) and torch.backends.cuda.enable_flash_sdp(False)",
}  # by what rules out flash attention; the first to change comes first


@on_gpu
def attention_backend(case: Case) -> list[Finding]:
    """Does scaled dot-product attention run on a slow backend even though no mask rules out the fast ones?"""
    case.with_shapes(and_dtypes=True)
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


@on_gpu
def attention_mask(case: Case) -> list[Finding]:
    """Does a mask keep scaled dot-product attention from its fastest kernels?"""
    case.with_shapes(and_dtypes=True)
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
    # Compiled code does not show what the program asked for: the mask may be one that no flag replaces.
    is_compiled = bool(calls["is_causal"].null_count() and case.compiled_regions.height)
    forward = calls.filter(pl.col("direction") != "backward")
    one = (forward if forward.height else calls).row(0, named=True)
    keys = ("backend", "direction", "mask", "dtype", "num_queries", "head_size")
    return one_finding(
        sentence=f"scaled_dot_product_attention gets a mask of shape {one['mask']} in "
        f"{case.number_text(forward, 'call')} per step, which rules out flash attention. The {one['backend']} "
        f"backend takes {case.cost_text(calls)} for all {one['num_queries']:,} × {one['num_keys']:,} scores.",
        fix="F.scaled_dot_product_attention(q, k, v, is_causal=True)  # if the mask is causal; for other "
        "patterns: torch.nn.attention.flex_attention with a block mask",
        saving_ns=None if is_compiled else saving_ns,
        upper_bound=True,
        derived="unknown: compiled code does not show whether the mask is causal"
        if is_compiled
        else "the step replayed with causal flash attention (half the scores, at the share of the device's peak "
        "that such kernels reach) and without the work on the mask; a mask with fewer zeros saves less",
        confidence="low" if is_compiled else "medium",
        falsified_by="use is_causal=True; the finding is wrong if the mask is not causal, or if the flash kernels "
        "take as long",
        places=case.places(calls["events"].explode()),
        evidence=(Evidence("attention calls with a mask", case.grouped(calls, "num_calls", *keys).to_dicts()),),
    )


_MORE_PRODUCTS_BACKWARD = 5 / 4  # flash attention recomputes the scores: five products instead of four
_SIZES = ["num_elements", "num_queries", "num_keys", "head_size"]


@rule
def handwritten_attention(case: Case) -> list[Finding]:
    """Is attention written as matrix products and a softmax, with queries × keys tensors in memory?"""
    case.with_shapes(and_dtypes=True)
    work = case.handwritten_attention
    products: dict[int, float] = {}
    is_masked = False
    for (_, _, num_keys, _), part in work.group_by(_SIZES):
        has_mask = bool(part["is_mask"].any())
        is_masked |= has_mask
        for row in part.filter(pl.col("flops") > 0).iter_rows(named=True):
            flops = row["flops"] * (_MORE_PRODUCTS_BACKWARD if row["phase"] == "backward" else 1)
            dtype = row["peak_dtype"] if row["peak_dtype"] in case.device.peak_flops else "fp32"
            products[row["event"]] = attention_ns(case.device, dtype, int(flops / (1 + has_mask)), int(num_keys))
    durations = _one_kernel_per_run(case, work, products)
    gone = work.filter(~pl.col("event").is_in(list(durations)))["event"]
    saving_ns = case.saving_ns(case.without(gone, durations, is_loop=True))
    held_bytes = [alive_bytes(case, size, item_bytes=(1, 2, 4)) for size in work["num_elements"].unique()]
    saving_bytes = None if None in held_bytes else sum(part or 0 for part in held_bytes) or None
    if not (case.is_worth(saving_ns) or is_worth_bytes(case, saving_bytes)):
        return []
    one = work.sort("num_elements").row(-1, named=True)
    num_softmax = work.filter("is_softmax").height / case.num_steps
    held = f" and hold {size(saving_bytes)} of the memory peak" if saving_bytes else ""
    table = case.grouped(work, "num_kernels", "op", "phase", "num_queries", "num_keys")
    return one_finding(
        sentence=f"Attention is written by hand: {plural(num_softmax, 'softmax call')} per step over "
        f"{one['num_queries']:,} × {one['num_keys']:,} scores, with {case.number_text(work, 'kernel')} "
        f"in total including products, masks and scaling. This takes {case.cost_text(work)}{held}.",
        fix=f"F.scaled_dot_product_attention(q, k, v{', is_causal=True' if is_masked else ''})"
        f"{'  # if the mask is causal' if is_masked else ''}",
        saving_ns=saving_ns,
        saving_bytes=saving_bytes,
        upper_bound=is_masked,
        derived="the step replayed with one kernel instead of these per layer and pass, which takes as long as flash "
        "attention (efficient attention in float32)"
        + (", over half the scores as with a causal mask; other masks save less" if is_masked else "")
        + ("; bytes: tensors of this size that are alive at the peak" if saving_bytes else ""),
        falsified_by="look for uses of the attention weights; the finding is wrong if the program reads them, since "
        "no fused kernel returns them",
        places=case.places(work["event"]),
        evidence=(Evidence("kernels over queries × keys", table.head(10).to_dicts()),),
    )


def _one_kernel_per_run(case: Case, work: pl.DataFrame, products: dict[int, float]) -> dict[int, float]:
    """Return the time of each attention by its first product: the products between two others are one attention."""
    is_other = (pl.col("call_flops") > 0) & ~pl.col("event").is_in(work["event"].implode())
    order = case.work.sort("start_ns", "event")
    runs = order.select("event", is_other.fill_null(False).cum_sum().alias("run"), "phase", "step")
    found: dict[tuple[object, ...], int] = {}
    durations: dict[int, float] = {}
    for event, *run in runs.filter(pl.col("event").is_in(list(products))).iter_rows():
        first = found.setdefault(tuple(run), event)
        durations[first] = durations.get(first, 0.0) + products[event]
    return durations

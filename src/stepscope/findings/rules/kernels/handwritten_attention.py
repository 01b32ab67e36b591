"""Is attention written as matrix products and a softmax, with queries × keys tensors in memory?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.attainable_rates import attention_ns
from stepscope.findings.memory_figures import alive_bytes, is_worth_bytes
from stepscope.findings.rule import Case, Evidence, Finding, one_finding, plural, size

_MORE_PRODUCTS_BACKWARD = 5 / 4  # flash attention recomputes the scores: five products instead of four
_SIZES = ["num_elements", "num_queries", "num_keys", "head_size"]


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    work = case.handwritten_attention
    durations: dict[int, float] = {}
    is_masked = False
    for (_, _, num_keys, _), part in work.group_by(_SIZES):
        has_mask = bool(part["is_mask"].any())
        is_masked |= has_mask
        for row in part.filter(pl.col("flops") > 0).iter_rows(named=True):
            flops = row["flops"] * (_MORE_PRODUCTS_BACKWARD if row["phase"] == "backward" else 1)
            dtype = row["peak_dtype"] if row["peak_dtype"] in case.device.peak_flops else "fp32"
            durations[row["event"]] = attention_ns(case.device, dtype, int(flops / (1 + has_mask)), int(num_keys))
    gone = work.filter(~pl.col("event").is_in(list(durations)))["event"]
    saving_ns = case.saving_ns(case.without(gone, durations))
    held_bytes = [alive_bytes(case, size, (1, 2, 4)) for size in work["num_elements"].unique()]
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
        derived="the step replayed without these kernels except the products, which together take as long as flash "
        "attention (efficient attention in float32)"
        + (", over half the scores as with a causal mask; other masks save less" if is_masked else "")
        + ("; bytes: tensors of this size that are alive at the peak" if saving_bytes else ""),
        falsified_by="look for uses of the attention weights; the finding is wrong if the program reads them, since "
        "no fused kernel returns them",
        places=case.places(work["event"]),
        evidence=(Evidence("kernels over queries × keys", table.head(10).to_dicts()),),
    )

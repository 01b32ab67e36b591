"""Is attention written out in products and a softmax, with tensors of queries × keys in memory?"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.analysis.costs.attainable_rates import attention_ns
from stepscope.findings.alive import alive_bytes, is_worth_bytes
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural, size
from stepscope.session.case import Case

_MORE_PRODUCTS_BACKWARD = 5 / 4
"""Flash attention's backward makes the scores again: five products where autograd's has four."""
_SIZES = ["num_elements", "num_queries", "num_keys", "head_size"]


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    work = case.squares
    if work.is_empty():
        return []
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
    saving_ns = case.saving_ns(replace(case.without(gone), duration_ns=durations))
    saving_bytes = _saving_bytes(case)
    if not (case.is_worth(saving_ns) or is_worth_bytes(case, saving_bytes)):
        return []
    one = work.sort("num_elements").row(-1, named=True)
    total_ns = float(work["duration_ns"].sum()) / case.num_steps
    num_softmax = work.filter("is_softmax").height / case.num_steps
    held = f", and {size(saving_bytes)} of the peak" if saving_bytes else ""
    table = (
        work.group_by("op", "phase", "num_queries", "num_keys")
        .agg((pl.len() / case.num_steps).alias("num_kernels"), pl.col("duration_ns").sum() / case.num_steps)
        .sort("duration_ns", descending=True)
    )
    return [
        Finding(
            sentence=f"Attention is written by hand: {plural(num_softmax, 'softmax').replace('xs', 'xes')} a step "
            f"over {one['num_queries']:,} × {one['num_keys']:,} scores, with "
            f"{plural(work.height / case.num_steps, 'kernel')} of products, masks and scales around them, take "
            f"{duration(total_ns, 3)} of {duration(case.step_ns, 3)}{held}.",
            fix=f"F.scaled_dot_product_attention(q, k, v{', is_causal=True' if is_masked else ''})"
            f"{'  # where the mask is causal' if is_masked else ''}",
            saving_ns=saving_ns,
            saving_bytes=saving_bytes,
            upper_bound=is_masked,
            derived="the step replayed with these kernels gone but for the products, which take together what flash "
            "attention takes (efficient attention in float32)"
            + (", over half of the scores as under a causal mask; another mask saves less" if is_masked else "")
            + ("; bytes: tensors of this size that are alive at the peak" if saving_bytes else ""),
            falsified_by="a program that reads the attention weights, which no fused kernel returns",
            places=case.places(work["event"]),
            evidence=(Evidence("kernels over queries × keys", table.head(10).to_dicts()),),
        )
    ]


def _saving_bytes(case: Case) -> int | None:
    sizes = case.squares["num_elements"].unique().to_list()
    held = [alive_bytes(case, size, (1, 2, 4)) for size in sizes]
    return None if any(part is None for part in held) else sum(part or 0 for part in held) or None

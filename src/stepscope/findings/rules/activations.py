"""Rules about what the forward keeps for the backward."""

from collections import Counter
from typing import Any

import polars as pl

from stepscope.analysis.costs.op_calls import words
from stepscope.analysis.memory.by_owner import Alive, alive_at_peak
from stepscope.errors import if_available
from stepscope.findings.rule import Case, Evidence, Finding, one_finding, rule
from stepscope.findings.rules.matrix_products import gemm_calls
from stepscope.findings.rules.memory import freed_bytes, is_worth_bytes
from stepscope.formatting import plural, safe, size

_LOW_PEAKS = ("bf16", "fp16", "fp8")
_CAST = "_to_copy"
_COMPUTED = words(
    "abs clamp clamp_max clamp_min cos div elu erf exp expm1 gelu hardsigmoid hardswish hardtanh leaky_relu log "
    "log1p log2 log_sigmoid_forward mish mul neg pow reciprocal relu rsqrt sigmoid silu sin softplus sqrt square tan "
    "tanh threshold where"
)
"""Elementwise ops: one kernel computes their result again. Not sums, which carry a residual stream onward."""
_WORTH_SHARE = 0.25  # of the peak: norms and losses of ordinary mixed precision keep less
_MOST_NAMED = 3


@rule
def float32_activations(case: Case) -> list[Finding]:
    """Is much of the memory at the peak float32 activations that a cast made, although products run in 16 bits?"""
    kept = _kept(case)
    if not kept or not _is_in_16_bits(case):
        return []
    casts = sum(each.bytes for each in kept if _op(each) == _CAST)
    held = sum(each.bytes for each in kept)
    peak_bytes = case.memory.peak_bytes
    saving_bytes = freed_bytes(case, held, casts // 2)
    if not is_worth_bytes(case, saving_bytes) or (saving_bytes or 0) < _WORTH_SHARE * peak_bytes:
        return []
    by_place: Counter[tuple[str, str]] = Counter()
    nums: Counter[tuple[str, str]] = Counter()
    for each in kept:
        key = (each.module or "code outside of modules", _op(each))
        by_place[key] += each.bytes
        nums[key] += each.num_allocations
    rows: list[dict[str, Any]] = [
        {"module": module, "op": op, "num_tensors": nums[module, op], "bytes": num_bytes}
        for (module, op), num_bytes in sorted(by_place.items(), key=lambda item: (-item[1], item[0]))
    ]
    named = [
        f"{safe(row['op'], 40)} in {safe(row['module'], 60)} ({plural(row['num_tensors'], 'tensor')}, "
        f"{size(row['bytes'])})"
        for row in rows[:_MOST_NAMED]
    ]
    return one_finding(
        sentence=f"{size(held)} of the {size(peak_bytes)} at the peak are float32 tensors that the backward needs, "
        f"made by casts and elementwise ops, although products run in 16 bits: {', '.join(named)}. A cast has "
        "no more in it than its 16-bit original, and the others can be computed again.",
        fix="torch.compile(model), which keeps the 16-bit inputs and computes the rest again; in an "
        "autograd.Function: ctx.save_for_backward(gate, up)  # its 16-bit inputs, and .float() in the backward",
        saving_bytes=saving_bytes,
        upper_bound=True,
        derived="bytes: these tensors alive at the peak, minus half of the casts, which stays as their originals",
        confidence="medium",
        falsified_by="change the largest module; the finding is wrong if the peak stays, or if its originals are "
        "not in 16 bits",
        evidence=(Evidence("float32 activations at the peak", rows[:8]),),
    )


def _kept(case: Case) -> list[Alive]:
    """Return float32 activations of the forward at the peak that a cast made, or an elementwise op in a module that
    casts; without logits."""
    logits = if_available(lambda: case.logits)
    of_logits = set() if logits is None else set(logits["num_elements"].drop_nulls())
    wide = [
        each
        for each in alive_at_peak(case.allocations)
        if (each.owner, each.dtype, each.phase) == ("activation", "float32", "forward")
        and each.bytes // each.num_allocations // 4 not in of_logits
    ]
    casting = {each.module for each in wide if _op(each) == _CAST}
    return [each for each in wide if _op(each) == _CAST or (_op(each) in _COMPUTED and each.module in casting)]


def _op(each: Alive) -> str:
    return (each.op or "").removeprefix("aten.").removeprefix("aten::").removesuffix("_")


def _is_in_16_bits(case: Case) -> bool:
    """Return whether most FLOPs of products are in 16 bits or fewer."""
    calls = gemm_calls(case)
    low = calls.filter(pl.col("peak_dtype").is_in(_LOW_PEAKS))
    return 2 * int(low["flops"].sum()) > int(calls["flops"].sum())

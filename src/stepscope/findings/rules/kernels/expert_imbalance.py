"""Are experts loaded so unevenly that padding is computed or tokens are dropped?

On one GPU, experts called one after the other take the same total time however tokens are spread, so a very uneven
load is reported without a saving. Empty slots cost time: they are computed like full ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.kernels.experts import Looped, Padded, looped_experts, padded_experts, routers
from stepscope.findings.rule import Case, Change, Evidence, Finding, one_finding, plural, whole_percent

_UNEVEN = 4.0  # the busiest expert's tokens over the mean; a balanced router stays below 2
_LEAST_OF_STEP = 0.1  # of GPU time
_FILLED_SHARE = 0.6  # usual capacity factors are 1 to 1.5, so a balanced load fills more than this
_DROPPED_SHARE = 0.05
_BALANCE = "loss = loss + 0.01 * num_experts * (share_of_tokens * mean_router_probability).sum()"


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    known = routers(case.work)
    padded = padded_experts(case.work, known)
    return [*_padding(case, padded), *_dropped(case, padded), *_uneven(case, looped_experts(case.work, known))]


def _padding(case: Case, padded: Sequence[Padded]) -> list[Finding]:
    empty = [one for one in padded if one.filled_share < _FILLED_SHARE]
    durations: dict[int, float] = {}
    for one in empty:
        size = (one.router.num_experts, one.capacity)
        roots = case.work.filter(pl.col("call").is_in(one.calls))["root"].drop_nulls().unique()
        is_theirs = pl.col("root").is_in(roots.implode()) | pl.Series(_is_over(case.work["shapes"], size))
        parts = case.work.filter(is_theirs, pl.col("kind") == "kernel").select("event", "duration_ns")
        durations |= {event: ns * one.filled_share for event, ns in parts.iter_rows()}
    saving_ns = case.saving_ns(Change(duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    worst = min(empty, key=lambda one: one.filled_share)
    router = worst.router
    places = router.num_experts * worst.capacity
    rows = [
        {"num_experts": one.router.num_experts, "capacity": one.capacity, "num_tokens": one.router.num_tokens,
         "num_chosen": one.router.num_chosen, "filled_share": one.filled_share, "num_calls": len(one.calls)}
        for one in empty[:8]
    ]  # fmt: skip
    return one_finding(
        sentence=f"At least {whole_percent(1 - worst.filled_share)} of what the experts compute is padding: "
        f"{router.num_experts} experts have {worst.capacity:,} slots each, {places:,} in total, but "
        f"{router.num_tokens:,} tokens go to {plural(router.num_chosen, 'expert')} each. This affects "
        f"{plural(len(worst.calls) / case.num_steps, 'matrix product')} per step.",
        fix=f"{_BALANCE}  # and a capacity factor of 1.25, or grouped products: torch._grouped_mm",
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step replayed with all work on these slots, backward included, at "
        f"{whole_percent(worst.filled_share)} of its time",
        confidence="medium",
        falsified_by="balance the router; the finding is wrong if it needs as many slots",
        places=case.places(durations),
        evidence=(Evidence("experts with slots", rows),),
    )


def _dropped(case: Case, padded: Sequence[Padded]) -> list[Finding]:
    dropping = [one for one in padded if one.filled_share > 1 / (1 - _DROPPED_SHARE)]
    if not dropping:
        return []
    worst = max(dropping, key=lambda one: one.filled_share)
    router = worst.router
    share = 1 - 1 / worst.filled_share
    given = router.num_tokens * router.num_chosen
    enough = -(-given * 5 // (4 * router.num_experts))
    return one_finding(
        sentence=f"At least {whole_percent(share)} of expert assignments are dropped: {router.num_tokens:,} tokens "
        f"need {given:,} slots, and {router.num_experts} experts have only {worst.capacity:,} each. An uneven load "
        "drops more.",
        fix=f"capacity = ceil(1.25 * {given} / {router.num_experts})  # {enough:,}",
        derived="no time is saved; tokens that no expert processes cost quality",
        confidence="medium",
        falsified_by="look for a second matrix product; the finding is wrong if one processes the remaining tokens",
        places=case.places(case.work.filter(pl.col("call").is_in(worst.calls))["event"]),
        evidence=(Evidence("experts", [{"capacity": worst.capacity, "num_experts": router.num_experts,
                                        "num_tokens": router.num_tokens, "num_chosen": router.num_chosen}]),),
    )  # fmt: skip


def _uneven(case: Case, looped: Sequence[Looped]) -> list[Finding]:
    uneven = [one for one in looped if one.imbalance >= _UNEVEN]
    calls = [call for one in uneven for call in one.calls]
    roots = case.work.filter(pl.col("call").is_in(calls))["root"].drop_nulls().unique()
    work = case.work.filter(pl.col("root").is_in(roots.implode()))
    spent_ns = case.total_ns(work)
    if not uneven or spent_ns < _LEAST_OF_STEP * case.step.device_ns:
        return []
    worst = max(uneven, key=lambda one: one.imbalance)
    layer = max(worst.loads, key=lambda loads: max(loads) / sum(loads))
    rows = [
        {"layer": place, "loads": sorted(loads, reverse=True)[:16], "num_called": len(loads)}
        for place, loads in enumerate(worst.loads[:8])
    ]
    return one_finding(
        sentence=f"The busiest of {worst.num_experts} experts gets {max(layer):,} of {sum(layer):,} tokens; the "
        f"median over {plural(len(worst.loads), 'layer')} is {worst.imbalance:.1f} times an equal share. The "
        f"experts' matrix products take {case.cost_text(spent_ns)}.",
        fix=_BALANCE,
        derived="no saving on one GPU, where the products take the same total time; with experts on several GPUs, "
        "all wait for the busiest, and with a fixed capacity its tokens are dropped",
        confidence="medium",
        falsified_by="look at the products; the finding is wrong if they are not experts and only share a weight "
        "shape",
        places=case.places(work["event"]),
        evidence=(Evidence("tokens by expert", rows),),
    )


def _is_over(texts: pl.Series, size: tuple[int, int]) -> list[bool]:
    """Return whether each call's first tensor has the shape (experts, slots, …) or (experts × slots, …)."""
    known: dict[str | None, bool] = {None: False}
    for text in texts.unique().drop_nulls():
        first = next((one for one in operands(text, None) if isinstance(one, Tensor) and one.shape), None)
        known[text] = first is not None and (first.shape[:2] == size or first.shape[0] == size[0] * size[1])
    return [known[text] for text in texts]

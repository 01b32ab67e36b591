"""Are a mixture's experts so unevenly loaded that padding is computed, or tokens dropped?

Experts that are called one after the other on one GPU take as long in all, whoever gets the tokens: that is told
where it is far from even, without a saving. Places that no token fills are computed all the same: that is what costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.kernels.experts import Looped, Padded, looped_experts, padded_experts, routers
from stepscope.analysis.time.replay import Change
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import Case

_UNEVEN = 4.0
"""The busiest expert's tokens over the mean: a balanced router stays below 2."""
_LEAST_OF_STEP = 0.1
"""Of the GPU's time, what such experts must take to be worth a word."""
_FILLED_SHARE = 0.6
"""Usual capacity factors are 1 to 1.5: with less than this filled, padding is most of what could be saved."""
_DROPPED_SHARE = 0.05
_BALANCE = "loss = loss + 0.01 * num_experts * (share_of_tokens * mean_router_probability).sum()"


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    known = routers(case.work)
    padded = [one for one in padded_experts(case.work, known) if one.filled_share < 1]
    dropping = [one for one in padded_experts(case.work, known) if one.filled_share > 1 / (1 - _DROPPED_SHARE)]
    return [*_padding(case, padded), *_dropped(case, dropping), *_uneven(case, looped_experts(case.work, known))]


def _padding(case: Case, padded: Sequence[Padded]) -> list[Finding]:
    empty = [one for one in padded if one.filled_share < _FILLED_SHARE]
    if not empty:
        return []
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
    return [
        Finding(
            sentence=f"{router.num_experts} experts have {worst.capacity:,} places each, {places:,} in all, for "
            f"{router.num_tokens:,} tokens that go to {router.num_chosen}: at least {1 - worst.filled_share:.0%} "
            f"of what they compute is padding, in {plural(len(worst.calls) / case.num_steps, 'product')} a step.",
            fix=f"{_BALANCE}  # and a capacity factor of 1.25, or grouped products: torch._grouped_mm",
            saving_ns=saving_ns,
            upper_bound=True,
            derived=f"the step replayed with all work on these places at {worst.filled_share:.0%} of its time, their "
            "backward included",
            confidence="medium",
            falsified_by="as many places with a balanced router",
            places=case.places(durations),
            evidence=(Evidence("experts with places", rows),),
        )
    ]


def _dropped(case: Case, dropping: Sequence[Padded]) -> list[Finding]:
    if not dropping:
        return []
    worst = max(dropping, key=lambda one: one.filled_share)
    router = worst.router
    share = 1 - 1 / worst.filled_share
    given = router.num_tokens * router.num_chosen
    enough = -(-given * 5 // (4 * router.num_experts))
    return [
        Finding(
            sentence=f"{router.num_experts} experts with {worst.capacity:,} places each cannot take the {given:,} "
            f"that {router.num_tokens:,} tokens ask for: {share:.0%} are dropped at least, and more where the load "
            "is uneven.",
            fix=f"capacity = ceil(1.25 * {given} / {router.num_experts})  # {enough:,}",
            derived="no time is saved: tokens that pass no expert cost quality",
            confidence="medium",
            falsified_by="a second product that takes what the first left out",
            places=case.places(case.work.filter(pl.col("call").is_in(worst.calls))["event"]),
            evidence=(Evidence("experts", [{"capacity": worst.capacity, "num_experts": router.num_experts,
                                            "num_tokens": router.num_tokens, "num_chosen": router.num_chosen}]),),
        )
    ]  # fmt: skip


def _uneven(case: Case, looped: Sequence[Looped]) -> list[Finding]:
    uneven = [one for one in looped if one.imbalance >= _UNEVEN]
    calls = [call for one in uneven for call in one.calls]
    roots = case.work.filter(pl.col("call").is_in(calls))["root"].drop_nulls().unique()
    work = case.work.filter(pl.col("root").is_in(roots.implode()))
    spent_ns = float(work["duration_ns"].sum()) / case.num_steps
    if not uneven or spent_ns < _LEAST_OF_STEP * case.step.device_ns:
        return []
    worst = max(uneven, key=lambda one: one.imbalance)
    layer = max(worst.loads, key=lambda loads: max(loads) / sum(loads))
    rows = [
        {"layer": place, "loads": sorted(loads, reverse=True)[:16], "num_called": len(loads)}
        for place, loads in enumerate(worst.loads[:8])
    ]
    return [
        Finding(
            sentence=f"The busiest of {worst.num_experts} experts gets {max(layer):,} of {sum(layer):,} tokens, "
            f"{worst.imbalance:.1f} times its share at the median of {plural(len(worst.loads), 'layer')}; the "
            f"experts' products take {duration(spent_ns, 3)} of {duration(case.step_ns, 3)}.",
            fix=_BALANCE,
            derived="on one GPU the products take as long in all, whoever gets the tokens; with experts on several "
            "all wait for the busiest, and with a capacity its tokens are dropped",
            confidence="medium",
            falsified_by="products that share a weight's shape and are no experts",
            places=case.places(work["event"]),
            evidence=(Evidence("tokens by expert", rows),),
        )
    ]


def _is_over(texts: pl.Series, size: tuple[int, int]) -> list[bool]:
    """Whether the first tensor of each call is over (experts, places), or over all places."""
    known: dict[str | None, bool] = {None: False}
    for text in texts.unique().drop_nulls():
        first = next((one for one in operands(text, None) if isinstance(one, Tensor) and one.shape), None)
        known[text] = first is not None and (first.shape[:2] == size or first.shape[0] == size[0] * size[1])
    return [known[text] for text in texts]

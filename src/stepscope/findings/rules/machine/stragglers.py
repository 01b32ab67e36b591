"""Do all ranks wait for one that comes late?"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.analysis.ranks.all_ranks import AcrossRanks
from stepscope.analysis.time.replay import Change
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import Case

_CAUSED_SHARE = 0.5
"""Of all waiting, what one rank must cause to be the straggler; else they take turns."""
_MORE = 1.05


def check(case: Case) -> list[Finding]:
    across = case.across
    calls = across.stragglers.calls
    if calls.is_empty():
        raise Unavailable("no collective was found on several ranks: each rank's trace must be of the same steps")
    ranks = across.stragglers.ranks.sort("caused_wait_ns", descending=True)
    worst = ranks.row(0, named=True)
    whole_ns = int(ranks["wait_ns"].sum())
    late = calls.filter(pl.col("last_rank") == worst["rank"], pl.col("is_certain"))
    if not whole_ns or worst["caused_wait_ns"] < _CAUSED_SHARE * whole_ns or late.height * 2 < calls.height:
        return []
    num_steps = max(1, calls["step"].n_unique())
    own = _own(case, across, late)
    saving_ns = _saving_ns(case, late, own, num_steps)
    if not case.is_worth(saving_ns):
        return []
    others = ranks.filter(pl.col("rank") != worst["rank"])
    waited_ns = float(others["wait_ns"].mean() or 0.0) / num_steps  # type: ignore[arg-type]
    is_every_step = late["step"].n_unique() == num_steps
    why, fix = _cause(across.table, worst["rank"], case.path)
    once = "" if num_steps > 1 else "; it is one step, and what began the trace may have held that rank up"
    return [
        Finding(
            sentence=f"Rank {worst['rank']} comes last to {late.height} of {plural(calls.height, 'collective')} and "
            f"causes {worst['caused_wait_ns'] / whole_ns:.0%} of all waiting: the others stand "
            f"{duration(waited_ns, 3)} a step each. {why}{once}.",
            fix=fix,
            saving_ns=saving_ns,
            derived="the step replayed with these collectives shorter by what the last rank came after the one "
            "before it: were it as fast as that one; were all alike, it would be more",
            confidence="low" if num_steps == 1 else "high" if is_every_step else "medium",
            places=case.places(own["event"]),
            falsified_by="another rank that is last in the next trace",
            evidence=(
                Evidence("ranks", ranks.head(8).to_dicts()),
                Evidence("calls", late.sort("lead_ns", descending=True).head(8).to_dicts()),
                Evidence(
                    "GPU time by rank", across.table.select("rank", "compute_ns", "idle_ns", "memory_ns").to_dicts()
                ),
            ),
        )
    ]


def _own(case: Case, across: AcrossRanks, late: pl.DataFrame) -> pl.DataFrame:
    """The kernels of this rank in the collectives that one comes late to, with `last_rank` and its `lead_ns`."""
    calls = across.matched.calls.filter(pl.col("rank") == case.rank).select("call", "start_ns")
    calls = calls.join(late.select("call", "last_rank", "lead_ns"), on="call").drop("call")
    return case.account.collectives.join(calls, on="start_ns")


def _saving_ns(case: Case, late: pl.DataFrame, own: pl.DataFrame, num_steps: int) -> float:
    """What a step takes less when the last rank comes with the one before it."""
    waiting = own.filter(pl.col("last_rank") != case.rank)
    if waiting.is_empty():  # the rank that is looked at is the late one: it waits for nobody
        return float(late["lead_ns"].sum()) / num_steps
    found = waiting.filter(pl.col("event").is_in(case.replay.events))
    shorter = found.select("event", pl.max_horizontal(pl.col("duration_ns") - pl.col("lead_ns"), 0))
    return case.saving_ns(Change(duration_ns={event: float(ns) for event, ns in shorter.iter_rows()}))


def _cause(table: pl.DataFrame, rank: int, path: Path) -> tuple[str, str]:
    """What its GPU did that the others' did not."""

    def figures(name: str) -> tuple[float, float]:
        own: Any = table.filter(pl.col("rank") == rank)[name].sum()
        rest: Any = table.filter(pl.col("rank") != rank)[name].median()
        return float(own), float(rest or 0.0)

    compute, usual = figures("compute_ns")
    if compute > _MORE * usual:
        return (
            f"Its GPU computes for {duration(compute, 3)} where the others' median is {duration(usual, 3)}: it has "
            "more to do, or a slower GPU",
            "give each rank the same number of tokens (sort or pack by length), experts or layers; nvidia-smi -q -d "
            "PERFORMANCE on that rank",
        )
    idle, usual = figures("idle_ns")
    return (
        f"Its GPU computes no longer than the others' and is idle for {duration(idle, 3)} (their median "
        f"{duration(usual, 3)}): its host is late, with data or launches",
        f"stepscope diagnose {shlex.quote(str(path))} --rank {rank}  # what its host does; then data loading and CPU "
        "pinning there",
    )

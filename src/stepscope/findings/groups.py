"""Findings that one change fixes: what the change saves in total, without counting a loss twice."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.what_if import Saving
from stepscope.findings.claims import Claims
from stepscope.findings.finding import Finding
from stepscope.findings.saving_interval import interval_ns
from stepscope.session.case import Case

COMPILE = "compile"
FIXES = {COMPILE: "torch.compile"}
"""Fixes that several rules suggest, with their names."""


@dataclass(frozen=True)
class Group:
    """Two or more findings with one fix."""

    id: str  # one of `FIXES`
    fix: str
    findings: tuple[str, ...]  # ids, the largest saving first
    saving_ns: float  # of all of them together: no loss counts twice
    saving_low_ns: float  # the saving is between these in 9 of 10 cases
    saving_high_ns: float

    def to_json(self) -> dict[str, Any]:
        named = {"id": self.id, "fix": self.fix, "findings": list(self.findings)}
        times = ("saving", "saving_low", "saving_high")
        return named | {f"{name}_ms": getattr(self, f"{name}_ns") / 1e6 for name in times}


def grouped(case: Case, claims: Claims, found: Sequence[Finding], kept: Sequence[Finding]) -> list[Group]:
    """Return the groups of two or more kept findings; `found` are the same before their savings were cut."""
    groups: list[Group] = []
    if case.is_on_cpu:  # no intervals were measured there
        return groups
    changes: dict[str, list[Saving]] = {}
    for finding in found:
        if finding.group and isinstance(finding.saving_ns, Saving):
            changes.setdefault(finding.group, []).append(finding.saving_ns)
    for name, savings in changes.items():
        members = sorted((one for one in kept if one.group == name), key=by_saving)
        if len(members) < 2:
            continue
        together = case.saving_ns(merged([saving.change for saving in savings]))
        # As a finding, the whole group can claim no more than the rows that it stands on.
        one = claims.claimed(replace(members[0], saving_ns=together, rows=()))
        each = [member.saving_ns or 0.0 for member in members]
        saving_ns = min(max(one.saving_ns or 0.0, *each), sum(each))
        low_ns, high_ns = interval_ns(replace(one, saving_ns=saving_ns), case.ledger)
        groups.append(Group(name, FIXES[name], tuple(member.id for member in members), saving_ns, low_ns, high_ns))
    return groups


def by_saving(finding: Finding) -> tuple[float, float, str]:
    return -(finding.saving_ns or 0.0), -(finding.saving_bytes or 0), finding.id


MOST = 0.5  # of the peak: what frees more counts for its excess over this, as if it were a share of the step


def ranked(
    findings: Sequence[Finding],
    groups: Sequence[Group],
    last: Collection[str],
    average_ns: float | None = None,
    peak_bytes: int | None = None,
) -> list[Finding]:
    """Return the findings by what their fix saves, of the average step or of most of the peak memory. Each fix comes
    once before any again, and what no change to the script mends `last`."""
    together = {group.findings[0]: group.saving_ns for group in groups}
    again = {id for group in groups for id in group.findings[1:]}

    def key(finding: Finding) -> tuple[Any, ...]:
        saving_ns, *rest = by_saving(finding)
        freed = (finding.saving_bytes or 0) / peak_bytes if peak_bytes else 0.0
        # More than the peak is not this process's.
        as_ns = (freed - MOST) * (average_ns or 0.0) if MOST < freed <= 1 else 0.0
        largest = min(saving_ns, -together.get(finding.id, 0.0), -as_ns)
        return finding.id in last, finding.id in again, largest, *rest

    return sorted(findings, key=key)


def merged(changes: Sequence[Change]) -> Change:
    """Return all changes as one. Work that one of them keeps in a shorter form is kept."""
    durations: dict[int, float] = {}
    for change in changes:
        for event, ns in change.duration_ns.items():
            durations[event] = min(ns, durations.get(event, ns))
    gone = frozenset[int]().union(*(change.gone for change in changes)) - durations.keys()
    host = [change.host for change in changes if change.host is not None and change.host.height]
    unwaited = frozenset[int]().union(*(change.unwaited for change in changes))
    return Change(duration_ns=durations, gone=gone, host=_shrunk(host) if host else None, unwaited=unwaited)


def _shrunk(stretches: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return disjoint stretches of host time, each with the least `factor` of those that cover it."""
    times = pl.concat([part[name] for part in stretches for name in ("start_ns", "end_ns")]).unique().sort()
    pieces = pl.DataFrame({"start_ns": times[:-1], "end_ns": times[1:]})
    left = pl.Series([1.0] * pieces.height)
    for part in stretches:
        cover = part.select("start_ns", pl.col("end_ns").alias("until_ns"), "factor").sort("start_ns")
        found = pieces.join_asof(cover, on="start_ns", check_sortedness=False)
        factor = pl.when(pl.col("until_ns") >= pl.col("end_ns")).then("factor").otherwise(1.0)
        left = pl.select(pl.min_horizontal(left, found.select(factor.fill_null(1.0)).to_series())).to_series()
    return pieces.with_columns(left.alias("factor")).filter(pl.col("factor") < 1)

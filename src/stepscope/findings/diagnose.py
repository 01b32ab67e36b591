"""All rules over one case: findings in order of what they save, what is clean, what could not be checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from stepscope.errors import UsageError
from stepscope.findings import rules
from stepscope.findings.case import Case
from stepscope.findings.finding import CannotCheck, Finding

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Rule:
    """A rule: one file in `findings/rules`, whose name is its id."""

    id: str
    question: str
    """What it looks for: the first line of its file."""
    module: ModuleType

    def check(self, case: Case) -> list[Finding]:
        found: list[Finding] = self.module.check(case)
        return [replace(finding, id=self.id) for finding in found]


@dataclass(frozen=True)
class Unchecked:
    """A rule that could not look, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a step."""

    step_ns: float | None
    """A typical step without the profiler, as measured or as replayed; None where nothing tells."""
    is_measured: bool
    """Whether the step was measured clean, or is the trace's without what the profiler adds."""
    findings: tuple[Finding, ...]
    clean: tuple[str, ...]
    """Rules that looked and found nothing worth telling."""
    unchecked: tuple[Unchecked, ...]
    suppressed: tuple[str, ...]
    binds: str
    """What binds the step, in words."""

    def to_json(self) -> dict[str, Any]:
        """One object of plain values (docs/diagnose.md)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "step_ms": None if self.step_ns is None else self.step_ns / 1e6,
            "step_is_measured": self.is_measured,
            "binds": self.binds,
            "findings": [finding.to_json() for finding in self.findings],
            "clean": list(self.clean),
            "unchecked": [{"id": one.id, "reason": one.reason} for one in self.unchecked],
            "suppressed": list(self.suppressed),
        }


def all_rules() -> Iterator[Rule]:
    """Every rule, by name."""
    for found in sorted(iter_modules(rules.__path__), key=lambda module: module.name):
        module = import_module(f"{rules.__name__}.{found.name}")
        yield Rule(found.name, (module.__doc__ or "").strip().splitlines()[0], module)


def diagnose(case: Case, suppressed: Collection[str] = ()) -> Diagnosis:
    """Ask every rule that is not suppressed."""
    every = list(all_rules())
    unknown = set(suppressed) - {rule.id for rule in every}
    if unknown:
        raise UsageError(f"no rule is called {sorted(unknown)[0]!r}: `stepscope list rules` names them")
    findings: list[Finding] = []
    clean, unchecked = [], []
    for rule in every:
        if rule.id in suppressed:
            continue
        try:
            found = rule.check(case)
        except CannotCheck as reason:
            unchecked.append(Unchecked(rule.id, str(reason)))
            continue
        findings += found
        if not found:
            clean.append(rule.id)
    findings.sort(key=lambda finding: (-(finding.saving_ns or 0.0), -(finding.saving_bytes or 0), finding.id))
    return Diagnosis(
        step_ns=_step_ns(case),
        is_measured=case.clean_ns is not None,
        findings=tuple(findings),
        clean=tuple(clean),
        unchecked=tuple(unchecked),
        suppressed=tuple(sorted(suppressed)),
        binds=_binds(case),
    )


def _step_ns(case: Case) -> float | None:
    try:
        return case.step_ns
    except CannotCheck:
        return None


def _binds(case: Case) -> str:
    """What a step is bound by, from its busy time and its roofline."""
    try:
        step = case.step
    except CannotCheck as reason:
        return f"what, is not known: {reason}"
    if not case.replay.events:
        return "the host: there is no GPU work in the trace"
    share = min(1.0, step.device_ns / step.done_ns) if step.done_ns else 0.0
    if share < 0.9:
        return f"the host: the GPU has work for {share:.0%} of a step"
    roofline = case.account.roofline_summary
    parts = {"arithmetic": roofline.compute_ns, "memory traffic": roofline.memory_ns,
             "neither arithmetic nor memory (kernels far from both limits)": roofline.neither_ns}  # fmt: skip
    known = sum(parts.values())
    if not known:
        return f"the GPU, busy {share:.0%} of a step; by what in it, the trace does not say"
    name, most = max(parts.items(), key=lambda part: part[1])
    return f"the GPU, busy {share:.0%} of a step: {most / known:.0%} of the kernels whose cost is known by {name}"

"""All rules over one case: findings in order of what they save, what is clean, what could not be checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

from stepscope.errors import WRONG_KIND, Unavailable, UsageError, wrong_kind
from stepscope.findings import rules
from stepscope.findings.finding import Finding
from stepscope.session.case import Case

SCHEMA_VERSION = 1
_BOUND_BY_GPU = 0.9


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
    """What binds the step: a sentence."""
    gpu_busy_share: float | None
    """Of the step; None where there is no GPU work to look at."""
    warnings: tuple[str, ...]
    """What is wrong with the trace."""

    def to_json(self) -> dict[str, Any]:
        """One object of plain values (docs/diagnose.md)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "step_ms": None if self.step_ns is None else self.step_ns / 1e6,
            "step_is_measured": self.is_measured,
            "binds": self.binds,
            "gpu_busy_share": self.gpu_busy_share,
            "warnings": list(self.warnings),
            "findings": [finding.to_json() for finding in self.findings],
            "clean": list(self.clean),
            "unchecked": [{"id": one.id, "reason": one.reason} for one in self.unchecked],
            "suppressed": list(self.suppressed),
        }


def all_rules() -> Iterator[Rule]:
    """Every rule, by name."""
    found = [module.name for module in walk_packages(rules.__path__, f"{rules.__name__}.") if not module.ispkg]
    for name in sorted(found, key=lambda name: name.rpartition(".")[2]):
        module = import_module(name)
        yield Rule(name.rpartition(".")[2], (module.__doc__ or "").strip().splitlines()[0], module)


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
        except Unavailable as reason:
            unchecked.append(Unchecked(rule.id, str(reason)))
            continue
        except WRONG_KIND as error:
            if not case.has_recording:
                raise
            unchecked.append(Unchecked(rule.id, f"the recording has {wrong_kind(error)}"))
            continue
        findings += found
        if not found:
            clean.append(rule.id)
    busy_share, step_ns = _busy_share(case), _step_ns(case)
    if step_ns is not None:  # nothing saves more than there is
        findings = [
            replace(finding, saving_ns=min(finding.saving_ns, step_ns)) if finding.saving_ns is not None else finding
            for finding in findings
        ]
    findings.sort(key=lambda finding: (-(finding.saving_ns or 0.0), -(finding.saving_bytes or 0), finding.id))
    return Diagnosis(
        step_ns=step_ns,
        is_measured=case.clean_ns is not None,
        findings=tuple(findings),
        clean=tuple(clean),
        unchecked=tuple(unchecked),
        suppressed=tuple(sorted(suppressed)),
        binds=_binds(case, busy_share),
        gpu_busy_share=busy_share,
        warnings=_warnings(case),
    )


def _step_ns(case: Case) -> float | None:
    try:
        return case.step_ns
    except Unavailable:
        return None


def _busy_share(case: Case) -> float | None:
    """Of a clean step, how much the GPU is at work; None without a trace of one."""
    try:
        return min(1.0, case.busy_ns / case.step.done_ns) if case.step.done_ns else None
    except Unavailable:
        return None


def _binds(case: Case, busy_share: float | None) -> str:
    """What a step is bound by, from its busy time and its roofline: a sentence."""
    if busy_share is None:
        return "What binds it is not known: there is no GPU work to look at."
    if busy_share < _BOUND_BY_GPU:
        return f"It is bound by the host: the GPU has work for {busy_share:.0%} of it."
    roofline = case.account.roofline_summary
    parts = {"arithmetic": roofline.compute_ns, "memory traffic": roofline.memory_ns,
             "neither arithmetic nor memory, far from both limits": roofline.neither_ns}  # fmt: skip
    known = sum(parts.values())
    if not known:
        return f"It is bound by the GPU, busy for {busy_share:.0%} of it; by what, the trace does not say."
    name, most = max(parts.items(), key=lambda part: part[1])
    return f"It is bound by the GPU, busy for {busy_share:.0%} of it: {most / known:.0%} of its known work by {name}."


def _warnings(case: Case) -> tuple[str, ...]:
    try:
        account = case.account
    except Unavailable as reason:
        return (str(reason),)
    return (*case.notes, *account.warnings)

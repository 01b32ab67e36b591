"""All rules applied to one case: findings by saving, clean rules, rules that could not run."""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import polars as pl

from stepscope.analysis.costs.roofline import roofline_summary
from stepscope.analysis.ranks.rank_account import roofline_of, warnings_of
from stepscope.analysis.time.ledger import WORK, Ledger
from stepscope.display import Shown
from stepscope.errors import Unavailable, UsageError, failure, if_available
from stepscope.findings import rules
from stepscope.findings.claims import Claims
from stepscope.findings.finding import OVER_TIME, Finding
from stepscope.findings.groups import Group, grouped, ranked
from stepscope.findings.op_lines import with_lines
from stepscope.findings.rule import RULES
from stepscope.findings.saving_interval import COVERAGE, with_interval
from stepscope.findings.unclaimed import UNCLAIMED, unclaimed_time
from stepscope.formatting import whole_percent
from stepscope.session.case import Case

SCHEMA_VERSION = 1
_BOUND_BY_GPU = 0.9  # busy share from which the GPU is the bottleneck

_LAST = (UNCLAIMED, "other_process")  # no change to the script mends them


@dataclass(frozen=True)
class Rule:
    """A function in `findings/rules`."""

    id: str  # its name
    question: str  # the first line of its docstring
    check: Callable[..., list[Finding]]  # of the case


@dataclass(frozen=True)
class Unchecked:
    """A rule that could not run, and why."""

    id: str
    reason: str


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """The findings of all rules, and what limits the step."""

    step_ns: float | None  # A typical step without the profiler, measured or replayed; None if unknown
    is_measured: bool  # whether the step was measured without the profiler, not replayed from the trace
    findings: tuple[Finding, ...]
    clean: tuple[str, ...]  # rules that found nothing worth reporting
    unchecked: tuple[Unchecked, ...]
    suppressed: tuple[str, ...]
    binds: str  # the bottleneck, as a sentence
    gpu_busy_share: float | None  # GPU busy time ÷ step time; None without GPU work
    warnings: tuple[str, ...]  # problems with the trace
    ledger: Ledger | None = None  # the step split without remainder; None without a trace of steps
    groups: tuple[Group, ...] = ()  # findings that one change fixes
    unclaimed_ns: float = 0.0  # losses and unknown time of the ledger that no finding explains, per step
    script: str | None = None  # the words after `stepscope run` that record it again; None if they are unknown
    later_ns: float | None = None  # the time per step of the whole loop, if the steps after those timed were faster

    @property
    def average_ns(self) -> float | None:
        """The time per step with slow steps and what lies between steps. Shares are of this."""
        return self.step_ns if self.ledger is None else self.ledger.step_ns

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain values (docs/diagnose.md)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "step_ms": None if self.step_ns is None else self.step_ns / 1e6,
            "average_step_ms": None if self.average_ns is None else self.average_ns / 1e6,
            "later_step_ms": None if self.later_ns is None else self.later_ns / 1e6,
            "step_is_measured": self.is_measured,
            "binds": self.binds,
            "gpu_busy_share": self.gpu_busy_share,
            "warnings": list(self.warnings),
            "findings": [finding.to_json() for finding in self.findings],
            "interval_coverage": COVERAGE,
            "groups": [group.to_json() for group in self.groups],
            "clean": list(self.clean),
            "unchecked": [asdict(one) for one in self.unchecked],
            "suppressed": list(self.suppressed),
            "ledger": None if self.ledger is None else self.ledger.to_json(),
            "unclaimed_ms": self.unclaimed_ns / 1e6,
        }


def all_rules() -> list[Rule]:
    for module in iter_modules(rules.__path__, f"{rules.__name__}."):
        import_module(module.name)
    every: dict[str, Callable[..., list[Finding]]] = {**RULES, UNCLAIMED: unclaimed_time}
    return [Rule(id, (check.__doc__ or "").splitlines()[0], check) for id, check in sorted(every.items())]


def diagnose(case: Case, suppressed: Collection[str] = ()) -> Diagnosis:
    every = all_rules()
    unknown = set(suppressed) - {rule.id for rule in every}
    if unknown:
        raise UsageError(f"Unknown rule {sorted(unknown)[0]!r}. `stepscope list rules` lists all rules.")
    findings: list[Finding] = []
    clean, unchecked = [], []
    for rule in every:
        if rule.id in suppressed or rule.id == UNCLAIMED:
            continue
        try:
            found = [replace(finding, id=rule.id) for finding in rule.check(case)]
        except Unavailable as reason:
            unchecked.append(Unchecked(rule.id, str(reason)))
            continue
        except (Exception, pl.exceptions.PanicException) as error:  # a rule that fails costs only itself
            unchecked.append(Unchecked(rule.id, _failed(error)))
            continue
        findings += found
        if not found:
            clean.append(rule.id)
    step_ns = if_available(lambda: case.step_ns)
    busy_share = if_available(lambda: min(1.0, case.busy_ns / step_ns) if step_ns and case.has_gpu_work else None)
    ledger, unclaimed_ns = None, 0.0
    groups: list[Group] = []
    try:
        ledger = with_lines(case.ledger, case)
        claims = Claims(ledger)
        claimed = [_claimed(claims, finding) for finding in findings]
        found, findings = findings, [finding for finding in claimed if _is_kept(finding, case)]
        groups = grouped(case, claims, found, findings)
        findings = [each if each.id in OVER_TIME else with_interval(each, ledger) for each in findings]
        clean += sorted({one.id for one in claimed} - {one.id for one in findings})
        unclaimed_ns = sum(claims.unclaimed().values())
        if UNCLAIMED not in suppressed:
            unexplained = unclaimed_time(case, claims)
            findings += [with_interval(finding, ledger) for finding in unexplained]
            clean += [] if unexplained else [UNCLAIMED]
    except Unavailable as reason:
        unchecked += [] if UNCLAIMED in suppressed else [Unchecked(UNCLAIMED, str(reason))]
    except (Exception, pl.exceptions.PanicException) as error:
        unchecked.append(Unchecked(UNCLAIMED, _failed(error)))
    try:
        warnings = (*case.notes, *warnings_of(case.linked))
    except Unavailable as reason:
        warnings = (*case.notes, str(reason).removesuffix("."))
    memory = (case.recording.facts.get("memory") if case.has_recording else None) or {}
    average_ns = if_available(lambda: case.average_ns)
    findings = ranked(findings, groups, _LAST, average_ns, memory.get("peak_allocated_bytes"))
    return Diagnosis(
        step_ns=step_ns,
        is_measured=case.clean_ns is not None,
        findings=tuple(findings),
        clean=tuple(sorted(clean)),
        unchecked=tuple(unchecked),
        suppressed=tuple(sorted(suppressed)),
        binds=_binds(case, busy_share, ledger),
        gpu_busy_share=busy_share,
        warnings=warnings,
        ledger=ledger,
        groups=tuple(groups),
        unclaimed_ns=unclaimed_ns,
        script=case.recording.script if case.has_recording else None,
        later_ns=_later_ns(case, ledger),
    )


def _later_ns(case: Case, ledger: Ledger | None) -> float | None:
    """Return how long a step took on average over the whole loop if that is less than what every finding is about."""
    loop = case.summary.loop if case.has_recording else None
    return loop.step_ns if loop and ledger and loop.is_faster_than(ledger.step_ns) else None


def _failed(error: BaseException) -> str:
    return f"This check failed ({failure(error)}). The others are not affected."


def _claimed(claims: Claims, finding: Finding) -> Finding:
    """Return a finding with what it claims of the ledger.

    A finding about the whole run keeps its saving: the ledger is of typical steps, at the beginning of a long run.
    """
    found = claims.claimed(finding)
    return replace(finding, claims=found.claims) if finding.id in OVER_TIME else found


def _is_kept(finding: Finding, case: Case) -> bool:
    """Return whether a finding is still worth reporting after its saving was cut to what the ledger holds."""
    saves_other = finding.id in OVER_TIME or finding.saving_ns is None or finding.saving_bytes is not None
    return saves_other or case.is_worth(finding.saving_ns or 0.0)


def _binds(case: Case, busy_share: float | None, ledger: Ledger | None) -> str:
    """Return a sentence that names the bottleneck, from GPU busy time and roofline."""
    if ledger is not None and ledger.is_of_cpu:
        share = ledger.per_step_ns(WORK) / ledger.step_ns
        return f"Training runs on a CPU, and ops take {whole_percent(share)} of the step."
    if busy_share is None:
        is_traced = if_available(lambda: case.linked) is not None
        return f"No bottleneck identified: there is no trace{' of GPU work' if is_traced else ''}."
    if busy_share < _BOUND_BY_GPU:
        return f"The host is the bottleneck: the GPU is busy for only {whole_percent(busy_share)} of the step."
    roofline = roofline_summary(roofline_of(case.linked))
    parts = {"compute-bound": roofline.compute_ns, "memory-bound": roofline.memory_ns,
             "far from both the compute and the memory limit": roofline.neither_ns}  # fmt: skip
    known = sum(parts.values())
    if not known:
        return f"The GPU is the bottleneck, busy for {whole_percent(busy_share)} of the step. Its limit is unknown."
    name, most = max(parts.items(), key=lambda part: part[1])
    return (
        f"The GPU is the bottleneck: it is busy for {whole_percent(busy_share)} of the step, and "
        f"{whole_percent(most / known)} of its known work is {name}."
    )

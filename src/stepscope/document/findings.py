"""Builds the findings of a diagnosis as a part of a document."""

from __future__ import annotations

import shlex

from stepscope.document.model import Document, FindingCard, Findings, Section, Table
from stepscope.findings.diagnose import Diagnosis
from stepscope.findings.finding import Finding, saving_texts
from stepscope.findings.fixes import FIXES
from stepscope.formatting import duration, percent, plural

LOW_BUSY_SHARE = 0.5  # a GPU that is busy for less of the step than this has a problem, even if no rule names it


def diagnosis_document(diagnosis: Diagnosis, recording: str | None = None) -> Document:
    """Return a diagnosis as a document: how long a step takes, what limits it, every finding."""
    how = "measured without a profiler" if diagnosis.is_measured else "from the trace, less profiler overhead"
    step = "The step time is unknown."
    if diagnosis.step_ns is not None:
        step = f"A step takes {duration(diagnosis.step_ns, 3)} ({how})."
    return Document("Diagnosis", step, (Section("findings", "Findings", (findings_part(diagnosis, recording),)),))


def findings_part(diagnosis: Diagnosis, recording: str | None = None) -> Findings:
    """Return the findings with what they save; `recording` is the path that `stepscope verify` can run again."""
    reasons: dict[str, list[str]] = {}
    for one in diagnosis.unchecked:
        reasons.setdefault(one.reason, []).append(one.id)
    return Findings(
        headline=diagnosis.binds,
        cards=tuple(_card(finding, diagnosis.step_ns, recording) for finding in diagnosis.findings),
        summary=_summary(diagnosis),
        passed=tuple(diagnosis.clean),
        unchecked=tuple((reason, tuple(ids)) for reason, ids in reasons.items()),
        suppressed=tuple(diagnosis.suppressed),
        warnings=tuple(diagnosis.warnings),
        values=diagnosis.to_json(),
    )


def _summary(diagnosis: Diagnosis) -> str:
    found = f"{plural(len(diagnosis.findings), 'problem')} found." if diagnosis.findings else "No problems found."
    checks = f"{plural(len(diagnosis.clean), 'check')} passed, {len(diagnosis.unchecked)} could not run."
    busy = diagnosis.gpu_busy_share
    if diagnosis.findings or busy is None or busy >= LOW_BUSY_SHARE:
        return f"{found} {checks}"
    idle = f"The GPU is idle for {percent(1 - busy)} of the step and no rule explains why."
    return f"{idle} {checks} Run `stepscope analyze` to see where the idle time is."


def _card(finding: Finding, step_ns: float | None, recording: str | None) -> FindingCard:
    prove = None
    if recording is not None and finding.id in FIXES and finding.is_provable:
        prove = f"stepscope verify {shlex.quote(recording)} --fix {finding.id}"
    saving, saving_of = saving_texts(finding, step_ns)
    evidence = []
    for number, found in enumerate(finding.evidence):
        if found.rows:
            columns = {name: [row.get(name) for row in found.rows] for name in found.rows[0]}
            evidence.append(Table(f"{finding.id}-{number}", found.table, columns, num_shown=3))
    return FindingCard(
        id=finding.id,
        sentence=finding.sentence,
        saving=saving,
        saving_of=saving_of,
        confidence=finding.confidence,
        fix=finding.fix,
        prove=prove,
        derived=finding.derived,
        how_to_check=finding.falsified_by,
        evidence=tuple(evidence),
        places=finding.places,
    )

"""Builds the findings of a diagnosis, and the answer to a what-if, as documents."""

import shlex
from collections import Counter
from collections.abc import Sequence

from stepscope.document.ledger import ledger_parts, limit_text
from stepscope.document.model import Document, Fact, Facts, FindingCard, Findings, Part, Section, Table
from stepscope.document.tables import columns_of
from stepscope.errors import ABOUT_CPUS, ABOUT_GPUS
from stepscope.findings.diagnose import Diagnosis
from stepscope.findings.finding import Finding, saving_texts
from stepscope.findings.fixes import FIXES
from stepscope.findings.groups import Group
from stepscope.findings.what_if import WhatIf
from stepscope.formatting import duration, duration_range, percent, plural

MUCH_UNCLAIMED = 0.1  # of a step; a step that loses more for unknown reasons is not healthy
LOW_BUSY_SHARE = 0.5  # a GPU that is busy for less of the step than this has a problem, even if no rule names it

_OTHER_DEVICE = {ABOUT_GPUS: "GPUs", ABOUT_CPUS: "CPUs"}
"""The reasons of checks that do not apply: they are counted, and only `--json` lists them."""
_LESS_WORK = {
    "padding": "tokens,flops",
    **dict.fromkeys(
        ("forward_without_backward", "longer_side", "product_order", "discarded_gradients", "work_beside_training",
         "constant_work", "mostly_zeros", "unused_gradients", "growing_work", "recurrent_loop", "repeated_rows",
         "ignored_labels", "repeated_backward"),
        "flops",
    ),
}  # fmt: skip
"""What is not equal after the fix of a finding, so that `compare` must be told."""
_NOT_IN_A_SHORT_RUN = {"compile_not_amortized", "drift", "other_process", "stalls", "throttling"}
"""Findings about a long run, or about the machine: `verify` times a few steps of a changed script."""


def diagnosis_document(diagnosis: Diagnosis, recording: str | None = None) -> Document:
    """Return a diagnosis as a document: how long a step takes, what limits it, every finding."""
    how = "measured without a profiler" if diagnosis.is_measured else "from the trace, less profiler overhead"
    if not diagnosis.is_measured and diagnosis.gpu_busy_share is None:
        how = "from the trace, with profiler overhead"
    step = "The step time is unknown."
    if diagnosis.step_ns is not None:
        step = f"A step takes {duration(diagnosis.step_ns, 3)} ({how})."
        average = duration(diagnosis.average_ns or diagnosis.step_ns, 3)
        if diagnosis.later_ns is not None:
            later = f"later steps are faster, {duration(diagnosis.later_ns, 3)}"
            step = f"A timed step takes {average} on average; {later}. Findings are about the timed steps."
        elif average != duration(diagnosis.step_ns, 3):
            typical = f"a typical step takes {duration(diagnosis.step_ns, 3)} ({how})"
            step = f"A step takes {average} on average; {typical}. Percentages are of the average."
    sections = [Section("findings", "Findings", (findings_part(diagnosis, recording),))]
    if diagnosis.ledger is not None:
        parts = ledger_parts(diagnosis.ledger, diagnosis.later_ns is not None)
        sections.append(Section("ledger", "Ledger", tuple(parts)))
    return Document("Diagnosis", step, tuple(sections))


def findings_part(diagnosis: Diagnosis, recording: str | None = None) -> Findings:
    """Return the findings with what they save; `recording` is the path that `stepscope verify` can run again."""
    reasons: dict[str, list[str]] = {}
    for one in diagnosis.unchecked:
        if one.reason not in _OTHER_DEVICE:
            reasons.setdefault(one.reason, []).append(one.id)
    return Findings(
        headline=diagnosis.binds,
        cards=tuple(_card(finding, diagnosis, recording) for finding in diagnosis.findings),
        summary=_summary(diagnosis),
        passed=tuple(diagnosis.clean),
        unchecked=tuple((reason, tuple(ids)) for reason, ids in reasons.items()),
        suppressed=tuple(diagnosis.suppressed),
        warnings=tuple(diagnosis.warnings),
        values=diagnosis.to_json(),
    )


def _summary(diagnosis: Diagnosis) -> str:
    found = f"{plural(len(diagnosis.findings), 'problem')} found." if diagnosis.findings else "No problems found."
    if not diagnosis.findings and diagnosis.ledger is None:
        found = "These checks found no problem. Without a ledger, other causes cannot be ruled out."
    if not diagnosis.findings and diagnosis.ledger is not None:
        share = diagnosis.unclaimed_ns / diagnosis.ledger.step_ns
        if share >= MUCH_UNCLAIMED:
            lost = f"{percent(share)} of the step is lost in small parts"
            found = f"No single cause found, but {lost} (see the ledger)."
        found = f"{found} {limit_text(diagnosis.ledger)}"
    others = Counter(_OTHER_DEVICE[one.reason] for one in diagnosis.unchecked if one.reason in _OTHER_DEVICE)
    left = len(diagnosis.unchecked) - others.total()
    checks = f"{plural(len(diagnosis.clean), 'check')} passed, {left} could not run"
    checks += "".join(f", {number} are about {device}" for device, number in others.items()) + "."
    busy = diagnosis.gpu_busy_share
    if diagnosis.findings or busy is None or busy >= LOW_BUSY_SHARE:
        return f"{found} {checks}"
    idle = f"The GPU is idle for {percent(1 - busy)} of the step and no rule explains why."
    return f"{idle} {checks} Run `stepscope analyze` to see where the idle time is."


def _shared(finding: Finding, groups: Sequence[Group]) -> str | None:
    group = next((group for group in groups if finding.id in group.findings), None)
    if group is None:
        return None
    if finding.id != group.findings[0]:
        return f"{group.fix}, as for {group.findings[0]}: do not add the savings"
    saving = duration_range(group.saving_low_ns, group.saving_high_ns)
    others = ", ".join(group.findings[1:])
    return f"{group.fix} is the fix for {others} too: {saving} in total (expected: {duration(group.saving_ns, 3)})"


def _card(finding: Finding, diagnosis: Diagnosis, recording: str | None) -> FindingCard:
    saving, saving_of = saving_texts(finding, diagnosis.average_ns)
    tables = []
    for number, found in enumerate(finding.evidence):
        if found.rows:
            columns = {name: [row.get(name) for row in found.rows] for name in found.rows[0]}
            tables.append(Table(f"{finding.id}-{number}", found.table, columns, num_shown=3))
    prove, shared = _prove(finding, diagnosis, recording), _shared(finding, diagnosis.groups)
    return FindingCard(
        **vars(finding), saving=saving, saving_of=saving_of, shared=shared, prove=prove, tables=tuple(tables)
    )


def _prove(finding: Finding, diagnosis: Diagnosis, recording: str | None) -> str | None:
    if recording is None:
        return None
    path, fix = shlex.quote(recording), finding.other_fix or finding.id
    if fix in FIXES and finding.is_provable:
        return f"stepscope verify {path} --fix {fix}"
    if finding.saving_ns and diagnosis.script and fix not in _NOT_IN_A_SHORT_RUN:
        return f"stepscope verify {path} --fix {fix}=CHANGED.py  # a copy with the change"
    if not finding.saving_ns and not finding.saving_bytes:
        return None
    changed, allowed = f"runs/without-{fix}", f" --allow {_LESS_WORK[fix]}" if fix in _LESS_WORK else ""
    compare = f"stepscope compare {path} {changed}{allowed}"
    return f"stepscope run -o {changed} {diagnosis.script or 'SCRIPT'} && {compare}  # after the change"


def what_if_document(answer: WhatIf) -> Document:
    """Return the step before and after the change, and what the change saves."""
    replays = {"in the trace": answer.traced, "replayed": answer.before}
    verdict = ""
    if answer.is_changed:
        replays["changed"] = answer.after
        saved = answer.before.done_ns - answer.after.done_ns
        share = abs(saved) / answer.before.done_ns if answer.before.done_ns else 0.0
        word = "saves" if saved >= 0 else "costs"
        verdict = f"The change {word} {duration(abs(saved), 3)} per step ({percent(share)})."
    names = "step_time_ns:step_ns until_gpu_is_done_ns:done_ns gpu_work_ns:device_ns host_ns"
    columns = {"step": [*replays], **columns_of(replays.values(), names)}
    work = f"Mean over {plural(answer.num_steps, 'step')} with {plural(answer.num_work, 'piece')} of GPU work."
    parts: list[Part] = [Table("replay", "Time per step", columns, note=work)]
    parts += [Facts(tuple(Fact("note", note) for note in answer.notes))] if answer.notes else []
    return Document("what-if", verdict, (Section("replay", "", tuple(parts)),))

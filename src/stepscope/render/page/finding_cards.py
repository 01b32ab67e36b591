"""Findings as cards: what each saves, what to change, why one can believe it, and how to prove it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.document.model import Findings
from stepscope.document.text.findings_text import nothing_found, proof_of, saving_of
from stepscope.findings.diagnose import Diagnosis
from stepscope.findings.finding import Evidence, Finding
from stepscope.render.page.elements import escape, plain_table_html, with_code

NUM_EVIDENCE_ROWS = 20


def findings_html(part: Findings, has_timeline: bool) -> str:
    """Every finding, then what is clean and what could not be looked at."""
    diagnosis = part.diagnosis
    cards = [_card(finding, diagnosis, part.verify, has_timeline) for finding in diagnosis.findings]
    warnings = "".join(f'<p class="note">Note: {escape(warning)}.</p>' for warning in diagnosis.warnings)
    if not cards:
        cards = [f'<p class="none">{escape(nothing_found(diagnosis))}</p>']
    return f"<h3>Findings</h3>{warnings}<div class='findings'>{''.join(cards)}</div>{_checked(diagnosis)}"


def _card(finding: Finding, diagnosis: Diagnosis, recording: str | None, has_timeline: bool) -> str:
    saving, detail = _saving(finding, diagnosis.step_ns)
    rows = [("fix", f"<pre><code>{escape(finding.fix)}</code></pre>")]
    if (command := proof_of(finding, recording)) is not None:
        rows.append(("prove it", f"<pre><code>{escape(command)}</code></pre>"))
    if finding.derived:
        rows.append(("derived", f"<p>{escape(finding.derived)}</p>"))
    rows.append(("wrong if", f"<p>{escape(finding.falsified_by)}</p>"))
    body = "".join(f"<dt>{title}</dt><dd>{content}</dd>" for title, content in rows)
    evidence = "".join(_evidence(one) for one in finding.evidence)
    button = ""
    if finding.places and has_timeline:
        spans = " ".join(f"{start}-{end}" for start, end in finding.places)
        button = f'<button type="button" class="go" data-places="{spans}">Show on the timeline</button>'
    return (
        f'<article class="finding" id="finding-{escape(finding.id)}"><div class="saving"><b>{escape(saving)}</b>'
        f"<span>{escape(detail)}</span>{button}</div><div class='what'><h4>{escape(finding.id.replace('_', ' '))}"
        f'<span class="confidence" title="How sure the saving is">{escape(finding.confidence)} confidence</span></h4>'
        f"<p>{escape(finding.sentence)}</p><dl>{body}</dl>"
        + (f"<details><summary>Evidence</summary>{evidence}</details>" if evidence else "")
        + "</div></article>"
    )


def _saving(finding: Finding, step_ns: float | None) -> tuple[str, str]:
    """The figure to look at, and what it is of."""
    saving = saving_of(finding, step_ns)
    most = ", at most" if saving.most else ""
    if saving.time:
        also = f", and {saving.parts[1]}" if saving.memory else ""
        return saving.time, f"saved a step{saving.share}{most}{also}"
    return (saving.memory, f"of the peak saved{most}") if saving.memory else ("?", "what it costs is not known")


def _evidence(evidence: Evidence) -> str:
    rows: Sequence[Mapping[str, Any]] = evidence.rows[:NUM_EVIDENCE_ROWS]
    if not rows:
        return ""
    columns = {name: [row.get(name) for row in rows] for name in rows[0]}
    more = len(evidence.rows) - len(rows)
    said = f'<p class="foot">{more:,} more rows in <code>stepscope diagnose --json</code></p>' if more else ""
    return f"<h5>{escape(evidence.table)}</h5>{plain_table_html(columns, len(rows))}{said}"


def _checked(diagnosis: Diagnosis) -> str:
    """What was looked at and is well, and what nobody could look at."""
    parts = []
    if diagnosis.clean:
        names = ", ".join(escape(name.replace("_", " ")) for name in diagnosis.clean)
        parts.append(f"<details><summary>{len(diagnosis.clean)} checked and clean</summary><p>{names}</p></details>")
    if diagnosis.unchecked:
        reasons: dict[str, list[str]] = {}
        for one in diagnosis.unchecked:
            reasons.setdefault(one.reason, []).append(one.id.replace("_", " "))
        rows = "".join(
            f"<dt>{with_code(reason)}</dt><dd>{escape(', '.join(names))}</dd>" for reason, names in reasons.items()
        )
        title = f"{len(diagnosis.unchecked)} could not be checked"
        parts.append(f"<details><summary>{title}</summary><dl>{rows}</dl></details>")
    if diagnosis.suppressed:
        parts.append(f"<p>Not asked for: {escape(', '.join(diagnosis.suppressed))}.</p>")
    return f'<div class="checked">{"".join(parts)}</div>' if parts else ""

"""A diagnosis for a terminal: the causes first, then what is clean, then what nobody could look at."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stepscope.findings.diagnose import Diagnosis
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.fixes import FIXES
from stepscope.formatting import cell, duration, is_numeric, percent, safe, size, title_of

BOLD, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_NUM_ROWS = 3
_STANDING = 0.5
_LABEL = 10
_NO_BREAK = "\u00a0"
_NAME = 48
"""Characters of a name in a table of evidence."""
_SHORT_NAME = 8
"""The same where the terminal is narrow."""


def diagnosis_text(diagnosis: Diagnosis, color: bool, width: int, recording: str | None = None) -> str:
    """The whole answer for a terminal of so many columns; `recording` is the path of what can be run again."""
    bold, dim, reset = (BOLD, DIM, RESET) if color else ("", "", "")
    source = "measured clean" if diagnosis.is_measured else "the trace's, without what the profiler adds"
    step_ns = diagnosis.step_ns
    lines = ["How long a step takes is not known."]
    if step_ns is not None:
        lines = [f"{bold}A step takes {duration(step_ns, 3)}{reset} ({source})."]
    lines += _wrapped(diagnosis.binds, width)
    for warning in diagnosis.warnings:
        lines += _wrapped(f"Note: {safe(warning, 500)}.", width)
    if not diagnosis.findings:
        lines += ["", *(f"{bold}{line}{reset}" for line in _wrapped(nothing_found(diagnosis), width))]
    for number, finding in enumerate(diagnosis.findings, 1):
        title = f"{number}  {finding.id}"
        first, *rest = _wrapped(f"{title}   {saving_text(finding, step_ns)}", width, indent="   ")
        lines += ["", f"{bold}{title}{reset}{first[len(title) :]}", *rest]
        lines += _wrapped(safe(finding.sentence, 2000), width, "   ")
        fields = [("fix", finding.fix), ("derived", finding.derived), ("wrong if", finding.falsified_by)]
        if (command := proof_of(finding, recording)) is not None:
            fields.insert(1, ("prove it", command))
        for label, text in fields:
            lines += _wrapped(safe(text, 1000), width, f"   {dim}{label:<{_LABEL}}{reset}", " " * (3 + _LABEL), dim)
        for evidence in finding.evidence:
            lines += [f"   {dim}{line}{reset}" for line in _evidence(evidence, width - 3)]
    if diagnosis.clean:
        lines += ["", *_wrapped("Checked and clean: " + ", ".join(diagnosis.clean) + ".", width)]
    if diagnosis.unchecked:
        lines += ["", "Could not be checked:"]
        for reason, ids in _by_reason(diagnosis):
            lines += _wrapped(f"{', '.join(ids)}: {safe(reason, 500)}", width, "  ", "    ")
    if diagnosis.suppressed:
        lines += ["", *_wrapped("Not asked for: " + ", ".join(diagnosis.suppressed) + ".", width)]
    return "\n".join(lines)


def proof_of(finding: Finding, recording: str | None) -> str | None:
    """What to type to see that the fix pays; None of a bare trace, or where nobody can make the fix from outside."""
    if recording is None or finding.id not in FIXES or not finding.is_provable:
        return None
    return f"stepscope verify {shlex.quote(recording)} --fix {finding.id}"


def nothing_found(diagnosis: Diagnosis) -> str:
    """What to say where no rule has a finding."""
    share = diagnosis.gpu_busy_share
    if share is not None and share < _STANDING:
        return f"The GPU stands for {percent(1 - share)} of the step, and no rule knows why: see stepscope analyze."
    if share is None:
        num_rules = len(diagnosis.clean) + len(diagnosis.unchecked)
        return (
            f"Nothing worth telling was found, and only {len(diagnosis.clean)} of {num_rules} rules could look: "
            "that does not make it a healthy step."
        )
    return "Nothing worth telling was found: the step is healthy as far as it could be checked."


class Saving(NamedTuple):
    """What a fix saves, in words; "" for what is not known of it."""

    time: str
    """Of a step."""
    share: str
    """` (12.3 %)`, of the step."""
    memory: str
    """Of the peak."""
    most: str
    """`up to ` before an upper bound."""

    @property
    def parts(self) -> list[str]:
        """Each with what it is of."""
        time = [f"{self.most}{self.time} a step{self.share}"] if self.time else []
        return time + ([f"{self.most}{self.memory} of the peak"] if self.memory else [])


def saving_of(finding: Finding, step_ns: float | None = None) -> Saving:
    """The words; its share where it is known how long a step takes."""
    saved_ns, saved_bytes = finding.saving_ns, finding.saving_bytes
    return Saving(
        time="" if saved_ns is None else duration(saved_ns, 3),
        share=f" ({percent(saved_ns / step_ns)})" if saved_ns is not None and step_ns else "",
        memory="" if saved_bytes is None else size(saved_bytes),
        most="up to " if finding.upper_bound else "",
    )


def saving_text(finding: Finding, step_ns: float | None) -> str:
    """What a fix saves, and how sure that is."""
    parts = saving_of(finding, step_ns).parts
    saves = f"saves {' and '.join(parts)}" if parts else "what it costs is not known"
    return f"{saves}   confidence {finding.confidence}"


def _by_reason(diagnosis: Diagnosis) -> list[tuple[str, list[str]]]:
    """Reasons with the rules they hold for: many rules lack the same thing."""
    reasons: dict[str, list[str]] = {}
    for one in diagnosis.unchecked:
        reasons.setdefault(one.reason, []).append(one.id)
    return list(reasons.items())


def _evidence(evidence: Evidence, width: int) -> list[str]:
    rows = [dict(row) for row in evidence.rows[:_NUM_ROWS]]
    if not rows:
        return []
    more = f", {len(evidence.rows) - len(rows)} more in --json" if len(evidence.rows) > len(rows) else ""
    return [f"evidence  {evidence.table}{more}", *("  " + line for line in _table(rows, width - 2))]


def _table(rows: Sequence[Mapping[str, Any]], width: int) -> Iterable[str]:
    """Rows under the names of their columns; where they are too wide, names are cut and figures kept."""
    names = list(rows[0])
    lines = [[title_of(name) for name in names]]
    lines += [[safe(cell(name, row.get(name)), _NAME) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    texts = [column for column, name in enumerate(names) if not is_numeric([row.get(name) for row in rows])]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(texts, key=lambda column: widths[column], default=None)
        if widest is None or widths[widest] <= _SHORT_NAME:
            break
        widths[widest] -= 1
    for line in lines:
        words = [word if len(word) <= space else word[: space - 1] + "…" for word, space in zip(line, widths)]
        text = "  ".join(word.ljust(space) for word, space in zip(words, widths)).rstrip()
        yield text if len(text) <= width else text[: width - 1] + "…"


def _wrapped(text: str, width: int, head: str = "", indent: str | None = None, dim: str = "") -> list[str]:
    """Lines of a text; escape codes in its head take no room."""
    indent = head if indent is None else indent
    kept = text.replace("confidence ", f"confidence{_NO_BREAK}")
    rows = textwrap.wrap(kept, max(40, width - len(indent)), break_on_hyphens=False) or [""]
    rows = [row.replace(_NO_BREAK, " ") for row in rows]
    return [(head if number == 0 else indent) + row for number, row in enumerate(rows)]

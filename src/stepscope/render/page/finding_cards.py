"""Findings as cards of a page: what each saves, what to change, how it was derived and how to prove it."""

from stepscope.document.model import FindingCard, Findings, Table
from stepscope.render.page.elements import escape, plain_table_html, with_code

NUM_EVIDENCE_ROWS = 20


def findings_html(part: Findings, has_timeline: bool) -> str:
    """Return every finding, then what passed and what could not be checked."""
    warnings = "".join(f'<p class="note">Note: {escape(warning)}.</p>' for warning in part.warnings)
    cards = "".join(_card(card, has_timeline) for card in part.cards)
    cards = cards or f'<p class="none">{with_code(part.summary)}</p>'
    return f"<h3>Findings</h3>{warnings}<div class='findings'>{cards}</div>{_checked(part)}"


def _card(card: FindingCard, has_timeline: bool) -> str:
    rows = [("fix", f"<pre><code>{escape(card.fix)}</code></pre>")]
    if card.prove is not None:
        rows.append(("prove it", f"<pre><code>{escape(card.prove)}</code></pre>"))
    if card.derived:
        rows.append(("derived from", f"<p>{escape(card.derived)}</p>"))
    rows.append(("how to check", f"<p>{escape(card.falsified_by)}</p>"))
    body = "".join(f"<dt>{title}</dt><dd>{content}</dd>" for title, content in rows)
    evidence = "".join(map(_evidence, card.tables))
    button = ""
    if card.places and has_timeline:
        spans = " ".join(f"{start}-{end}" for start, end in card.places)
        button = f'<button type="button" class="go" data-places="{spans}">Show on the timeline</button>'
    return (
        f'<article class="finding" id="finding-{escape(card.id)}"><div class="saving"><b>{escape(card.saving)}</b>'
        f"<span>saved {escape(card.saving_of)}</span>{button}</div><div class='what'>"
        f"<h4>{escape(card.id.replace('_', ' '))}"
        f'<span class="confidence" title="How certain the saving is">{escape(card.confidence)} confidence</span></h4>'
        f"<p>{escape(card.sentence)}</p><dl>{body}</dl>"
        + (f"<details><summary>Evidence</summary>{evidence}</details>" if evidence else "")
        + "</div></article>"
    )


def _evidence(table: Table) -> str:
    num_rows = min(table.num_rows, NUM_EVIDENCE_ROWS)
    columns = {name: values[:num_rows] for name, values in table.columns.items()}
    more = table.num_rows - num_rows
    note = f'<p class="foot">{more:,} more rows in <code>stepscope diagnose --json</code></p>' if more else ""
    return f"<h5>{escape(table.title)}</h5>{plain_table_html(columns, num_rows)}{note}"


def _checked(part: Findings) -> str:
    """Return what passed and what could not be checked, folded."""
    blocks = []
    if part.passed:
        names = ", ".join(escape(name.replace("_", " ")) for name in part.passed)
        blocks.append(f"<details><summary>{len(part.passed)} checks passed</summary><p>{names}</p></details>")
    if part.unchecked:
        rows = "".join(
            f"<dt>{with_code(reason)}</dt><dd>{escape(', '.join(ids).replace('_', ' '))}</dd>"
            for reason, ids in part.unchecked
        )
        title = f"{sum(len(ids) for _, ids in part.unchecked)} checks could not run"
        blocks.append(f"<details><summary>{title}</summary><dl>{rows}</dl></details>")
    if part.suppressed:
        blocks.append(f"<p>Ignored: {escape(', '.join(part.suppressed))}.</p>")
    return f'<div class="checked">{"".join(blocks)}</div>' if blocks else ""

"""Renders a document as Markdown that fits a pull request comment; all but the first section is collapsed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stepscope.document.model import Chart, Document, Facts, Findings, Heat, Lines, Missing, Section, Table, Text
from stepscope.formatting import cell, fit_names, heading, is_numeric, plural, title_of
from stepscope.render.files import file_names
from stepscope.render.markdown.charts import chart_lines
from stepscope.render.markdown.text import code, escaped, grid, in_summary, prose

MOST_CHARACTERS = 60_000  # GitHub allows 65,536 in a comment
_LONG = 8  # tables with at least this many rows are collapsed


@dataclass(frozen=True)
class Detail:
    """How much is shown. If the result is too long, the next smaller one is tried."""

    share_of_rows: float
    num_letters: int  # characters of a name in a table
    num_columns: int
    num_parts: int  # bars, lines or tiles of a chart
    num_items: int  # facts and findings
    num_text: int  # characters of a sentence


_DETAILS = (
    Detail(1, 80, 14, 12, 40, 1000),
    Detail(0.5, 60, 12, 8, 30, 600),
    Detail(0.25, 40, 10, 5, 20, 300),
    Detail(0.1, 30, 8, 0, 10, 150),
)


def markdown_of(report: Document, in_folder: bool = False) -> str:
    """Return the document as Markdown of less than 60,000 characters.

    With `in_folder`, it links the files in `charts/` and `tables/`. Otherwise, charts are drawn as text.
    """
    for detail in _DETAILS:
        blocks = list(_blocks(report, detail, in_folder))
        if sum(len(block) + 2 for block in blocks) < MOST_CHARACTERS:
            return "\n\n".join(blocks) + "\n"
    note = "The rest does not fit here: see the page (.html) or .json."
    kept, used = [], len(note) + 2
    for block in blocks:
        used += len(block) + 2
        if used >= MOST_CHARACTERS:
            break
        kept.append(block)
    return "\n\n".join([*kept, note]) + "\n"


def _blocks(report: Document, detail: Detail, in_folder: bool) -> Iterator[str]:
    """Yield the heading, one block per section, what is missing, and the footer."""
    yield f"## Stepscope: {escaped(report.title)}"
    yield f"**{escaped(report.verdict, 1000).strip()}**"
    files: dict[int, str] = {}  # by id(): two parts may be equal
    for kind, form in ((Chart, "charts/{}.png"), (Table, "tables/{}.csv")):
        parts = report.parts(kind)
        files |= {id(part): form.format(name) for part, name in zip(parts, file_names([part.id for part in parts]))}
    missing = []
    for number, section in enumerate(report.sections):
        is_folded = number > 0 and not in_folder
        lines = _Writer(detail, files if in_folder else {}, is_folded).section(section)
        absent = [part for part in section.parts if isinstance(part, Missing)]
        missing += [f"- {escaped(section.title)}: {prose(part.text)}" for part in absent]
        if lines and is_folded:
            head = f"<details><summary><b>{in_summary(section.title)}</b></summary>"
            yield "\n".join([head, "", *lines, "", "</details>"])
        elif lines:
            yield "\n".join([f"### {escaped(section.title)}", "", *lines])
    if missing:
        yield "\n".join(["**Not in this report:**", "", *missing])
    if report.facts:
        yield f"<sub>{' · '.join(escaped(f'{name} {value}', 300) for name, value in report.facts.items())}</sub>"


@dataclass(frozen=True)
class _Writer:
    detail: Detail
    files: dict[int, str]  # file of each chart and table, by its id(); empty if there are no files
    is_folded: bool

    def section(self, section: Section) -> list[str]:
        lines: list[str] = []
        for part, following in zip(section.parts, [*section.parts[1:], None]):
            found = self._part(part, following)
            lines += [*([""] if lines and found else []), *found]
        return lines

    def _part(self, part: Any, following: Any) -> list[str]:
        match part:
            case Facts():
                return _facts(part, self.detail)
            case Text():
                return [prose(part.text, 2 * self.detail.num_text)]
            case Findings():
                return list(_findings(part, self.detail))
            case Table():
                return self._table(part)
            case Chart():
                return self._chart(part, following)
        return []  # only a page can show it

    def _chart(self, chart: Chart, following: Any) -> list[str]:
        is_repeated = isinstance(chart, Lines) and isinstance(following, Heat) and following.unit == chart.y
        if is_repeated and id(chart) not in self.files:
            return []  # the heat map that follows has the same figures
        head = [f"**{escaped(heading(chart.title))}**"]
        head += ["", prose(chart.caption, self.detail.num_text)] if chart.caption else []
        if id(chart) in self.files:
            return [*head, "", f"![{escaped(chart.title)}]({self.files[id(chart)]})"]
        drawn = chart_lines(chart, self.detail.num_parts, self.detail.num_letters)
        return [*head, "", *drawn] if drawn else head

    def _table(self, table: Table) -> list[str]:
        num_shown = min(max(1, round(table.num_shown * self.detail.share_of_rows)), table.num_rows)
        names = list(table.columns)[: self.detail.num_columns]
        most = self.detail.num_letters  # long texts are cut so that different ones stay different
        cells = [[cell(name, value) for value in table.columns[name][:num_shown]] for name in names]
        columns = [[escaped(text, most) for text in fit_names(column, most)] for column in cells]
        aligned = ["--:" if is_numeric(table.columns[name]) else ":--" for name in names]
        lines = grid([escaped(title_of(name)) for name in names], list(zip(*columns)), aligned)
        hidden = {"more row": table.num_rows - num_shown, "more column": len(table.columns) - len(names)}
        left = " and ".join(plural(num, noun) for noun, num in hidden.items() if num)
        if file := self.files.get(id(table)):
            lines += ["", f"{left or 'all rows'} in [{escaped(file)}]({file})"]
        elif left:
            lines += ["", f"{left} in the CSV that `stepscope report … -o DIR` writes"]
        lines += ["", prose(table.note)] if table.note else []
        if self.is_folded or num_shown < _LONG:
            return [f"**{escaped(heading(table.title))}**", "", *lines]
        head = f"<details><summary>{in_summary(heading(table.title))} ({plural(table.num_rows, 'row')})</summary>"
        return [head, "", *lines, "", "</details>"]


def _facts(part: Facts, detail: Detail) -> list[str]:
    lines = [f"**{escaped(heading(part.title))}**", ""] if part.title else []
    for fact in part.rows[: detail.num_items]:
        more = f" ({prose(fact.detail, detail.num_text)})" if fact.detail else ""
        lines.append(f"- {escaped(fact.title)}: **{escaped(fact.value, detail.num_text).strip()}**{more}")
    return lines + _more(len(part.rows), detail.num_items, "more fact")


def _findings(part: Findings, detail: Detail) -> Iterator[str]:
    yield "**Findings**"
    for warning in part.warnings[: detail.num_items]:
        yield from ("", f"Note: {prose(warning, detail.num_text)}.")
    if not part.cards:
        yield from ("", prose(part.summary))
    for number, card in enumerate(part.cards[: detail.num_items], 1):
        saving = escaped(f"saves {card.saving} {card.saving_of}".rstrip())
        name, sentence = escaped(card.id.replace("_", " ")), escaped(card.sentence, detail.num_text)
        yield from ("", f"{number}. **{name}** {saving}, {card.confidence} confidence: {sentence}")
        yield f"   <br>Fix: {code(card.fix, detail.num_text)}"
        if card.prove is not None:
            yield f"   <br>Prove it: {code(card.prove, 400)}"
    yield from _more(len(part.cards), detail.num_items, "more finding")


def _more(num_all: int, num_shown: int, noun: str) -> list[str]:
    return ["", f"{plural(num_all - num_shown, noun)} on the page"] if num_all > num_shown else []

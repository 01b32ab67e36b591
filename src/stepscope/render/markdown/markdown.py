"""Documents as Markdown that fits a pull request comment; all but the first section is collapsed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from stepscope.document import model
from stepscope.document.model import Bars, Chart, Document, Facts, Findings, Heat, Lines, Table, Tree
from stepscope.formatting import cell, fit_names, heading, is_numeric, percent, plural, title_of
from stepscope.render.axes import finite, totals, why_missing
from stepscope.render.colors import children_of
from stepscope.render.files import file_names
from stepscope.render.markdown.text import bar, code, escaped, grid, in_summary, prose, sparkline

_MOST_COLUMNS = 8  # columns of one table: x values, or parts of a bar


def chart_lines(chart: Chart, most: int, num_letters: int) -> list[str]:
    """Return a chart as lines of Markdown with at most `most` rows; [] if it is empty."""
    return _WRITERS[type(chart)](chart, most, num_letters) if most > 0 else []


def _names(names: Sequence[object], num_letters: int) -> list[str]:
    return [escaped(name, num_letters) for name in fit_names([cell("", str(name)) for name in names], num_letters)]


def _not_shown(num_all: int, num_shown: int, noun: str, where: str = "not shown") -> list[str]:
    return ["", f"{plural(num_all - num_shown, noun)} {where}"] if num_all > num_shown else []


def _title(name: str) -> str:
    return escaped(title_of(name))


def _bars(chart: Bars, most: int, num_letters: int) -> list[str]:
    whole = totals(chart)
    if not whole:
        return []
    longest = max(*whole, 0.0) or 1.0
    parts = chart.series[:_MOST_COLUMNS] if len(chart.series) > 1 else ()
    rows = []
    for at, label in enumerate(_names(chart.labels[:most], num_letters)):
        figure = escaped(why_missing(chart, at), 30) or cell(chart.unit, whole[at])
        rows.append([label, figure, *(cell(chart.unit, part.y[at]) for part in parts), bar(whole[at] / longest)])
    titles = ["", _title(chart.unit), *_names([part.name for part in parts], num_letters), ""]
    lines = grid(titles, rows, [":--", *["--:"] * (1 + len(parts)), ":--"])
    lines += _not_shown(len(chart.series), len(parts), "more part") if parts else []
    return lines + _not_shown(len(chart.labels), len(rows), "more bar")


def _lines(chart: Lines, most: int, num_letters: int) -> list[str]:
    shown = [series for series in chart.series if len(series.y)][:most]
    if not shown:
        return []
    places = sorted({x for series in shown for x in series.x})
    names = _names([series.name for series in shown], num_letters)
    if len(places) <= _MOST_COLUMNS:
        rows = [[name, *_at(series, places, chart.y)] for name, series in zip(names, shown)]
        titles = [_title(chart.x), *(escaped(cell(chart.x, x)) for x in places)]
        lines = grid(titles, rows, [":--", *["--:"] * len(places)])
    else:
        rows = []
        for name, series in zip(names, shown):
            found = finite(series.y)
            ends = [cell(chart.y, end) for end in ((min(found), max(found), found[-1]) if found else (None,) * 3)]
            rows.append([name, *ends, f"`{sparkline(series.y)}`"])
        lines = grid([_title(chart.y), "min", "max", "last", ""], rows, [":--", *["--:"] * 3, ":--"])
        first, last = (escaped(cell(chart.x, place)) for place in (places[0], places[-1]))
        lines += ["", f"over {_title(chart.x)} from {first} to {last}"]
    marks = [f"{escaped(mark.name, num_letters)} at {escaped(cell(chart.x, mark.x))}" for mark in chart.marks[:most]]
    lines += ["", "; ".join(marks)] if marks else []
    return lines + _not_shown(len(chart.series), len(shown), "more line")


def _at(series: model.Series, places: Sequence[float], name: str) -> list[str]:
    gaps = series.gaps or [""] * len(series.y)
    texts = [escaped(gap, 30) if gap and y is None else cell(name, y) for gap, y in zip(gaps, series.y)]
    by_place = dict(zip(series.x, texts))
    return [by_place.get(x, "") for x in places]


def _scatter(chart: model.Scatter, most: int, num_letters: int) -> list[str]:
    dots = sorted(chart.points, key=lambda dot: -dot.weight)[:most]
    if not dots:
        return []
    has_shares = any(dot.weight > 0 for dot in dots)
    names = _names([dot.name for dot in dots], num_letters)
    rows = []
    for name, dot in zip(names, dots):
        place = [escaped(cell(chart.x, dot.x)), escaped(cell(chart.y, dot.y))]
        share = [percent(dot.weight)] if has_shares else []
        rows.append([name, escaped(dot.group.replace("_", " "), 40), *place, *share])
    titles = ["", "", _title(chart.x), _title(chart.y), *(["share"] if has_shares else [])]
    lines = grid(titles, rows, [":--", ":--", *["--:"] * (len(titles) - 2)])
    limits = [escaped(limit.name, 80) for limit in chart.limits]
    lines += ["", f"Limits: {'; '.join(limits)}"] if limits else []
    return lines + _not_shown(len(chart.points), len(dots), "more dot")


def _tree(chart: Tree, most: int, num_letters: int) -> list[str]:
    """Return the largest parts in tree order, each indented below its parent."""
    if not chart.nodes:
        return []
    largest = sorted(range(len(chart.nodes)), key=lambda at: (-chart.nodes[at].value, at))[: most + 1]
    kept = {chart.nodes[at].id for at in largest}
    children = children_of(chart.nodes)
    total = chart.nodes[0].value or 1.0
    found: list[tuple[model.Node, int]] = []
    waiting = [(chart.nodes[0], 0)]
    while waiting:
        node, depth = waiting.pop()
        if node.id in kept:
            found.append((node, depth))
            inner = sorted(children.get(node.id, ()), key=lambda child: child.value)
            waiting += [(child, depth + 1) for child in inner]
    names = _names([node.name for node, _ in found], num_letters)
    rows = []
    for name, (node, depth) in zip(names, found):
        share = node.value / total
        rows.append(["&emsp;" * min(depth, 8) + name, cell(chart.unit, node.value), percent(share), bar(share)])
    lines = grid(["", _title(chart.unit), "share", ""], rows, [":--", "--:", "--:", ":--"])
    return lines + _not_shown(len(chart.nodes), len(found), "smaller part")


def _heat(chart: Heat, most: int, num_letters: int) -> list[str]:
    num_rows, num_columns = min(len(chart.y_labels), most), min(len(chart.x_labels), _MOST_COLUMNS)
    labels = _names(chart.y_labels[:num_rows], num_letters)
    cells = [[escaped(text, 30) for text in row[:num_columns]] for row in chart.texts]
    rows = [[label, *row] for label, row in zip(labels, cells)]
    head = escaped(f"{chart.y_title} ↓ {chart.x_title} →", 80)
    lines = grid([head, *_names(chart.x_labels[:num_columns], 30)], rows, [":--", *["--:"] * num_columns])
    lines += _not_shown(len(chart.y_labels), num_rows, "more row")
    return lines + _not_shown(len(chart.x_labels), num_columns, "more column")


_WRITERS: dict[type[Chart], Callable[[Any, int, int], list[str]]] = {
    Bars: _bars,
    Lines: _lines,
    model.Scatter: _scatter,
    Tree: _tree,
    Heat: _heat,
}


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
    lengths = accumulate((len(block) + 2 for block in blocks), initial=len(note) + 2)
    kept = [block for block, used in zip(blocks, islice(lengths, 1, None)) if used < MOST_CHARACTERS]
    return "\n\n".join([*kept, note]) + "\n"


def _blocks(report: Document, detail: Detail, in_folder: bool) -> Iterator[str]:
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
        absent = [part for part in section.parts if isinstance(part, model.Missing)]
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

    def section(self, section: model.Section) -> list[str]:
        lines: list[str] = []
        for part, following in zip(section.parts, [*section.parts[1:], None]):
            found = self._part(part, following)
            lines += [*([""] if lines and found else []), *found]
        return lines

    def _part(self, part: Any, following: Any) -> list[str]:
        match part:
            case Facts():
                return _facts(part, self.detail)
            case model.Text():
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
    return lines + _not_shown(len(part.rows), detail.num_items, "more fact", "on the page")


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
        if card.shared is not None:
            yield f"   <br>Same fix: {escaped(card.shared)}"
        if card.prove is not None:
            yield f"   <br>Prove it: {code(card.prove, 400)}"
    yield from _not_shown(len(part.cards), detail.num_items, "more finding", "on the page")

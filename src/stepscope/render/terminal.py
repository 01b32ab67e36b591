"""Renders a document as text for a terminal. Standard library only: it must work where only torch is installed."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from stepscope.document import model
from stepscope.document.model import Bars, Document, Facts, FindingCard, Findings, Part, Table, Trends
from stepscope.formatting import cell, fit_names, heading, is_numeric, percent, safe, shortened, title_of
from stepscope.render.axes import finite

BAR_WIDTH = 20
_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_MOST_CHARACTERS = 2000
_LABEL = 14
NAME_WIDTH = 24  # characters that the first column keeps before other columns are dropped for it
TEXT_WIDTH = 16  # characters that other text columns keep before columns are dropped
_LEAST_WIDTH = 6
_LEVELS = "▁▂▃▄▅▆▇"  # no full block: lines would touch those above
_LEAST_SPARK, _MOST_SPARK = 8, 60
_MOST_IN_CELL = 400
_GLUE = "\N{NO-BREAK SPACE}"
_NO_BREAK = re.compile(r"(?<=\d) (?=%|(?:ns|µs|ms|s|B|[KMGT]iB)\b)|(?<=\bp) (?=[<=])|(?<=[<=]) (?=\d)")


def terminal_text(document: Document, width: int = 100, color: bool = False, num_rows: int | None = None) -> str:
    """Return the document as text of at most `width` columns; `num_rows` limits tables (default: their own limit)."""
    return _Terminal(width, color, num_rows).document(document)


class _Terminal:
    def __init__(self, width: int, color: bool, num_rows: int | None) -> None:
        self.width, self.num_rows = width, num_rows
        self._bold, self._dim, self._reset = (_BOLD, _DIM, _RESET) if color else ("", "", "")

    def document(self, document: Document) -> str:
        blocks = [[self.bold(line) for line in wrapped(document.verdict, self.width)]] if document.verdict else []
        for section in document.sections:
            own = [block for part in section.parts if not part.page_only and (block := self._part(part))]
            if own and len(document.sections) > 1:
                own[0] = [*self._title(section.title), *own[0]]
            blocks += own
        return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks if block)

    def _part(self, part: Part) -> list[str]:
        match part:
            case Facts():
                return [*self._title(part.title), *self._facts(part)]
            case model.Text():
                return wrapped(part.text, self.width)
            case model.Notes():
                return [self.bold(line) for row in part.rows for line in wrapped(row, self.width, "! ", "  ")]
            case model.Missing():
                return wrapped(f"Unknown: {part.text}", self.width, "  ", "  ")
            case Table():
                return self._table(part)
            case Trends():
                return [*self._title(part.title), *self._trends(part)]
            case Findings():
                return list(self._findings(part))
            case Bars():
                return [*self._title(part.title), *self._bars(part)]
            case model.Chart():
                return wrapped(part.caption, self.width) if part.caption else []
        return []

    def bold(self, text: str) -> str:
        return f"{self._bold}{text}{self._reset}"

    def dim(self, text: str) -> str:
        return f"{self._dim}{text}{self._reset}"

    def _title(self, title: str) -> list[str]:
        return [self.bold(safe(heading(title)))] if title else []

    def _below(self, text: str) -> list[str]:
        return [self.dim(line) for line in wrapped(text, self.width, "  ", "  ")]

    def _facts(self, part: Facts) -> Iterator[str]:
        titles = [safe(fact.title) for fact in part.rows]
        indent = " " * (4 + max(map(len, titles), default=0))
        for title, fact in zip(titles, part.rows):
            value, detail = safe(fact.value, _MOST_CHARACTERS), safe(fact.detail, _MOST_CHARACTERS)
            lines = wrapped(value, self.width, f"  {title:<{len(indent) - 4}}  ", indent)
            if detail and len(lines) == 1 and len(lines[0]) + 3 + len(detail) <= self.width:
                lines = [f"{lines[0]}   {self.dim(detail)}"]
            elif detail:
                lines += [f"{indent}{self.dim(line)}" for line in wrapped(detail, self.width - len(indent))]
            yield from lines

    def _trends(self, part: Trends) -> Iterator[str]:
        """Yield a line per figure: its value, what it was before, and a detail if there is room."""
        rows = [(safe(row.title), safe(row.value), safe(row.detail)) for row in part.rows]
        first, second, third = (max((len(row[at]) for row in rows), default=0) for at in range(3))
        room = self.width - first - second - 6
        has_details = third > 0 and room >= third + 2 + 2 * _LEAST_SPARK
        num = min(_MOST_SPARK, room - (third + 2 if has_details else 0))
        for row, (title, value, detail) in zip(part.rows, rows):
            line = f"  {title:<{first}}  {value:<{second}}"
            if num >= _LEAST_SPARK:
                line += f"  {sparkline(row.y, num, row.from_zero):<{num}}"
            yield f"{line}  {self.dim(detail)}" if has_details and detail else line

    def _table(self, table: Table) -> list[str]:
        num_rows = min(table.num_rows, self.num_rows or table.num_shown)
        if not table.num_rows:
            return []
        across = {name: values for name, values in table.columns.items() if name not in table.below}
        narrow = replace(table, columns=across)
        lines = [*self._title(table.title), *self._rows(table, narrow, num_rows)]
        if table.num_rows > num_rows:
            lines.append(self.dim(f"  … {table.num_rows - num_rows:,} more"))
        if not table.screen and (dropped := dropped_columns(narrow, num_rows, self.width - 2)):
            names = ", ".join(map(title_of, dropped))
            lines += self._below(f"Too narrow for: {names}")
        return [*lines, *(self._below(table.note) if table.note else [])]

    def _rows(self, table: Table, narrow: Table, num_rows: int) -> Iterator[str]:
        """Yield the header and the rows, each with its long texts below it."""
        header, *rows = table_lines(narrow, num_rows, self.width - 2)
        below = [name for name in table.below if name in table.columns]
        yield f"  {header}"
        for place, row in enumerate(rows):
            yield f"  {row}"
            texts = [(title_of(name), table.columns[name][place]) for name in below]
            if text := "; ".join(f"{title}: {value}" for title, value in texts if value not in (None, "")):
                yield from map(self.dim, wrapped(text, self.width, "      ", "      "))

    def _bars(self, chart: Bars) -> Iterator[str]:
        if len(chart.series) == 1:
            yield from self._bar_lines(chart, list(zip(chart.labels, chart.series[0].y)))
            return
        for place, label in enumerate(chart.labels):
            rows = [(series.name, series.y[place]) for series in chart.series if series.y[place]]
            if len(chart.labels) > 1 and rows:
                yield f"  {safe(label)}"
            yield from self._bar_lines(chart, rows)

    def _bar_lines(self, chart: Bars, rows: list[tuple[str, float | None]]) -> Iterator[str]:
        whole = chart.whole or sum(value or 0 for _, value in rows)
        texts = [cell(chart.unit, value) for _, value in rows]
        room = max(map(len, texts), default=0)
        names = fit_names([safe(name) for name, _ in rows], max(16, min(40, self.width - room - BAR_WIDTH - 16)))
        longest = max(map(len, names), default=0)
        bar_width = max(0, min(BAR_WIDTH, self.width - longest - room - 14))
        starts = chart.starts or [0.0] * len(rows)
        for name, text, start, (_, value) in zip(names, texts, starts, rows):
            share = (value or 0) / whole if whole else 0.0
            before = round(bar_width * min(1.0, start / whole)) if whole else 0
            bar = " " * before + "█" * round(bar_width * min(1.0, share))
            yield f"  {name:<{longest}}  {text:>{room}}  {percent(share):>7}  {bar}"

    def _findings(self, part: Findings) -> Iterator[str]:
        if part.headline:
            yield from wrapped(part.headline, self.width)
        for warning in part.warnings:
            yield from wrapped(f"Note: {warning}.", self.width)
        if part.headline or part.warnings:
            yield ""
        for number, card in enumerate(part.cards, 1):
            yield from self._finding(number, card)
            yield ""
        yield from map(self.bold, wrapped(part.summary, self.width))
        notes = [f"Passed: {', '.join(part.passed)}."] if part.passed else []
        notes += [f"Not checked: {', '.join(ids)}: {reason}" for reason, ids in part.unchecked]
        notes += [f"Ignored: {', '.join(part.suppressed)}."] if part.suppressed else []
        for note in notes:
            yield from wrapped(note, self.width, "  ", "    ")

    def _finding(self, number: int, card: FindingCard) -> Iterator[str]:
        title = f"{number}  {card.id}"
        saving = f"saves {card.saving} {card.saving_of}".rstrip()
        first, *rest = wrapped(f"{title}   {saving}   {card.confidence} confidence", self.width, "", "   ")
        yield from [f"{self.bold(title)}{first[len(title) :]}", *rest]
        yield from wrapped(card.sentence, self.width, "   ", "   ")
        fields = {"Fix": card.fix, "Same fix": card.shared, "Prove it": card.prove, "Derived from": card.derived}
        for label, text in {**fields, "How to check": card.falsified_by}.items():
            if text:
                first, *rest = wrapped(text, self.width, f"   {label:<{_LABEL}}", " " * (3 + _LABEL))
                yield from [f"   {self.dim(first[3 : 3 + _LABEL])}{first[3 + _LABEL :]}", *rest]
        for table in card.tables:
            num_rows = min(table.num_rows, table.num_shown)
            more = f", {table.num_rows - num_rows} more in --json" if table.num_rows > num_rows else ""
            yield self.dim(f"   Evidence: {safe(table.title)}{more}")
            yield from (self.dim(f"     {line}") for line in table_lines(table, num_rows, self.width - 5))


def sparkline(values: Sequence[float | None], width: int, from_zero: bool = True) -> str:
    """Return values as a line of at most `width` bars; a blank for what is unknown.

    >>> sparkline([0, 1, None, 3, 4], 5), sparkline([7, 8, 7, 8], 2), sparkline([7, 8], 9, from_zero=False)
    ('▁▃ ▅▇', '▇▇', '▁▇')
    """
    num = min(width, len(values))
    cells = [finite(values[at * len(values) // num : (at + 1) * len(values) // num]) for at in range(num)]
    means = [sum(cell) / len(cell) if cell else None for cell in cells]
    known = finite(means)
    low = min([*known, 0.0] if from_zero else known, default=0.0)
    step = (max(known, default=0.0) - low) / (len(_LEVELS) - 1)
    return "".join(
        " " if mean is None else _LEVELS[round((mean - low) / step) if step else 0 if mean == 0 else 3]
        for mean in means
    )


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Return the text as lines with these indents; no line ends between a number and its unit.

    >>> wrapped("The GPU waits 84.2 ms per step", 20)
    ['The GPU waits', '84.2 ms per step']
    """
    glued, width = _NO_BREAK.sub(_GLUE, safe(text, _MOST_CHARACTERS)), max(width, len(rest) + 20)
    lines = textwrap.wrap(glued, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return [line.replace(_GLUE, " ") for line in lines] or [first.rstrip()]


def table_lines(table: Table, num_rows: int, width: int) -> list[str]:
    """Return a header and `num_rows` lines of at most `width` columns; columns last in `screen` are dropped first.

    >>> table_lines(Table("ops", "Ops", {"op": ["aten::mm"], "num_calls": [80], "share": [0.275]}), 1, 60)
    ['op        calls   share', 'aten::mm     80  27.5 %']
    """
    texts, is_text = _fitting(table, num_rows, width)
    titles = {name: title_of(name) for name in texts}
    widths = {name: max(len(titles[name]), *map(len, cells), 1) for name, cells in texts.items()}
    while sum(widths.values()) + 2 * (len(widths) - 1) > width:
        widest = max((name for name in widths if is_text[name]), key=lambda name: widths[name], default=None)
        if widest is None or widths[widest] <= _LEAST_WIDTH:
            break
        widths[widest] -= 1
    columns = {name: fit_names(cells, widths[name]) if is_text[name] else cells for name, cells in texts.items()}
    rows = [[titles[name] for name in columns], *zip(*columns.values())]
    return [
        "  ".join(
            shortened(text, widths[name], 1.0).ljust(widths[name]) if is_text[name] else text.rjust(widths[name])
            for name, text in zip(columns, row)
        ).rstrip()
        for row in rows
    ]


def dropped_columns(table: Table, num_rows: int, width: int) -> list[str]:
    """Return the columns that a terminal of this width has no room for."""
    texts, _ = _fitting(table, num_rows, width)
    return [name for name in table.screen or table.columns if name in table.columns and name not in texts]


def _fitting(table: Table, num_rows: int, width: int) -> tuple[dict[str, list[str]], dict[str, bool]]:
    order = dict.fromkeys(name for name in table.screen if name in table.columns) or table.columns
    names = [name for name in table.columns if name in order]
    texts: dict[str, list[str]] = {}
    is_text: dict[str, bool] = {}
    least = -2  # width of the table with names cut as far as they may be
    for name in dict.fromkeys((*names[:1], *order)):
        cells = [safe(cell(name, value), _MOST_IN_CELL) for value in table.columns[name][:num_rows]]
        is_text[name] = not is_numeric(table.columns[name]) and not _are_figures(cells)
        longest = max(len(title_of(name)), *map(len, cells), 1)
        least += 2 + (min(longest, TEXT_WIDTH if texts else NAME_WIDTH) if is_text[name] else longest)
        if texts and least > width:
            break
        texts[name] = cells
    return {name: texts[name] for name in names if name in texts}, is_text


def _are_figures(cells: Sequence[str]) -> bool:
    """Whether texts are figures with units: they are aligned like numbers, and never cut."""
    return any(cells) and all(not text or (text[0] in "+-−–" or text[0].isdigit()) for text in cells)

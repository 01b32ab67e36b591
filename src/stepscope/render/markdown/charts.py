"""Renders charts as Markdown tables with text bars and sparklines."""

from collections.abc import Callable, Sequence
from typing import Any

from stepscope.document.model import Bars, Chart, Heat, Lines, Node, Scatter, Series, Tree
from stepscope.formatting import cell, fit_names, percent, plural, title_of
from stepscope.render.axes import finite, totals, why_missing
from stepscope.render.colors import children_of
from stepscope.render.markdown.text import bar, escaped, grid, sparkline

_MOST_COLUMNS = 8  # columns of one table: x values, or parts of a bar


def chart_lines(chart: Chart, most: int, num_letters: int) -> list[str]:
    """Return a chart as lines of Markdown with at most `most` rows; [] if it is empty."""
    return _WRITERS[type(chart)](chart, most, num_letters) if most > 0 else []


def _names(names: Sequence[object], num_letters: int) -> list[str]:
    return [escaped(name, num_letters) for name in fit_names([cell("", str(name)) for name in names], num_letters)]


def _more(num_all: int, num_shown: int, noun: str) -> list[str]:
    return ["", f"{plural(num_all - num_shown, noun)} not shown"] if num_all > num_shown else []


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
    lines += _more(len(chart.series), len(parts), "more part") if parts else []
    return lines + _more(len(chart.labels), len(rows), "more bar")


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
    return lines + _more(len(chart.series), len(shown), "more line")


def _at(series: Series, places: Sequence[float], name: str) -> list[str]:
    """Return the figure at each x, or why there is none."""
    gaps = series.gaps or [""] * len(series.y)
    texts = [escaped(gap, 30) if gap and y is None else cell(name, y) for gap, y in zip(gaps, series.y)]
    by_place = dict(zip(series.x, texts))
    return [by_place.get(x, "") for x in places]


def _scatter(chart: Scatter, most: int, num_letters: int) -> list[str]:
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
    return lines + _more(len(chart.points), len(dots), "more dot")


def _tree(chart: Tree, most: int, num_letters: int) -> list[str]:
    """Return the largest parts in tree order, each indented below its parent."""
    if not chart.nodes:
        return []
    largest = sorted(range(len(chart.nodes)), key=lambda at: (-chart.nodes[at].value, at))[: most + 1]
    kept = {chart.nodes[at].id for at in largest}
    children = children_of(chart.nodes)
    total = chart.nodes[0].value or 1.0
    found: list[tuple[Node, int]] = []
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
    return lines + _more(len(chart.nodes), len(found), "smaller part")


def _heat(chart: Heat, most: int, num_letters: int) -> list[str]:
    num_rows, num_columns = min(len(chart.y_labels), most), min(len(chart.x_labels), _MOST_COLUMNS)
    labels = _names(chart.y_labels[:num_rows], num_letters)
    cells = [[escaped(text, 30) for text in row[:num_columns]] for row in chart.texts]
    rows = [[label, *row] for label, row in zip(labels, cells)]
    head = escaped(f"{chart.y_title} ↓ {chart.x_title} →", 80)
    lines = grid([head, *_names(chart.x_labels[:num_columns], 30)], rows, [":--", *["--:"] * num_columns])
    lines += _more(len(chart.y_labels), num_rows, "more row")
    return lines + _more(len(chart.x_labels), num_columns, "more column")


_WRITERS: dict[type[Chart], Callable[[Any, int, int], list[str]]] = {
    Bars: _bars,
    Lines: _lines,
    Scatter: _scatter,
    Tree: _tree,
    Heat: _heat,
}

"""Charts as Plotly figures in plain JSON. The page adds the colors of its theme."""

import html
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from stepscope.document.model import Bars, Chart, Dot, Heat, Lines, Node, Scatter, Series, Tree
from stepscope.formatting import cell, percent, safe, title_of
from stepscope.render.axes import Axis, axes_of, ended, largest, top_of, totals, why_missing
from stepscope.render.colors import colors_of, colors_of_nodes, depth_of, ink_on
from stepscope.render.page import axes
from stepscope.render.page.axes import lines_of_words, on, texts_of, words

MOST_NODES = 1200  # Plotly draws each as an element, so the smallest are left out and counted in the caption
_DEPTH = 7
_LETTERS = {"icicle": 150, "treemap": 80}
"""Characters across an icicle, and across a square tile that fills a treemap."""


def tree_figure(chart: Tree) -> dict[str, Any]:
    """Return the figure, with `left_out`: how many parts were too small to draw."""
    nodes, is_icicle = _largest(chart.nodes), chart.shape == "icicle"
    values = _whole(nodes)
    total = values[nodes[0].id] if nodes else 0.0
    shares = [values[node.id] / total if total else 0.0 for node in nodes]
    texts = [cell(chart.unit, node.value) for node in nodes]
    by_id = colors_of_nodes(nodes)
    colors = [by_id[node.id] for node in nodes]
    trace: dict[str, Any] = {
        "type": chart.shape,
        "ids": [_key(node.id) for node in nodes],
        "parents": [_key(node.parent) if node.parent else "" for node in nodes],
        "labels": [html.escape(safe(node.name, 80), quote=False) for node in nodes],
        "values": [values[node.id] for node in nodes],
        "branchvalues": "total",
        "marker": {"colors": colors},
        "textfont": {"color": [ink_on(color) for color in colors]},
        "text": [_inside(node.name, text, share, chart.shape) for node, text, share in zip(nodes, texts, shares)],
        "textinfo": "text",
        "hoverinfo": "text",
        "hovertext": [
            f"{html.escape(safe(node.name, 200), quote=False)}<br><b>{text}</b> · {percent(share)} of all"
            for node, text, share in zip(nodes, texts, shares)
        ],
        "maxdepth": _DEPTH,
        "sort": not is_icicle,  # an icicle keeps its order: forward before backward, layers as they run
    }
    trace |= {"tiling": {"pad": 1}, "pathbar": {"visible": True}}
    height = 460
    if is_icicle:
        trace |= {"tiling": {"orientation": "v"}, "pathbar": {"visible": False}, "leaf": {"opacity": 1}}
        height = max(200, 54 * min(_DEPTH, depth_of(nodes)) + 20)
    layout = {"margin": {"t": 8, "l": 4, "r": 4, "b": 4}, "uniformtext": {"minsize": 10, "mode": "hide"}}
    figure = {"data": [trace], "layout": layout, "narrow": {}, "height": height}
    return figure | {"min_width": 700 if is_icicle else 0, "left_out": len(chart.nodes) - len(nodes)}


def _inside(name: str, text: str, share: float, shape: str) -> str:
    """Return the text inside a part: as much of its name as fits, and its value if there is room."""
    room = int((share if shape == "icicle" else share**0.5) * _LETTERS[shape])
    if room < 3:
        return ""
    label = html.escape(safe(name, max(room, 4)), quote=False)
    return f"{label}<br>{text} · {percent(share)}" if room >= 18 else label


def _key(name: str) -> str:
    return html.escape(name.encode("utf-8", "backslashreplace").decode())


def _largest(nodes: tuple[Node, ...]) -> list[Node]:
    """Return the largest nodes in order, none without its parent."""
    if len(nodes) <= MOST_NODES:
        return list(nodes)
    places = sorted(range(len(nodes)), key=lambda place: (-nodes[place].value, place))
    kept = set(places[:MOST_NODES]) | {0}
    names = {nodes[place].id for place in kept}
    return [node for place, node in enumerate(nodes) if place in kept and (not node.parent or node.parent in names)]


def _whole(nodes: list[Node]) -> dict[str, float]:
    """Return each node's value, at least the exact sum of its children: Plotly draws nothing otherwise."""
    inside, values = defaultdict[str, float](float), dict[str, float]()
    for node in reversed(nodes):
        values[node.id] = max(float(node.value), inside[node.id])
        inside[node.parent] += values[node.id]
    return values


_DOT_PIXELS = 64  # diameter of a dot with a share of 100 %
_DASHES = ("solid", "dash", "dot", "dashdot")
_LIMIT_COLOR = "#8a8f98"
_NOTE = 0.08  # distance between two notes, as a share of the chart's height
_MOST_MARKERS = 40


def figure_of(chart: Chart) -> dict[str, Any]:
    """Return Plotly's `data` and `layout`, `height` in pixels, and `narrow`: layout changes for phones."""
    return _FIGURES[type(chart)](chart)


def _trace(
    kind: str, name: str, x: Sequence[Any], y: Sequence[Any], hover: Sequence[Any], **more: Any
) -> dict[str, Any]:
    return {"type": kind, "name": name, "x": x, "y": y, "hoverinfo": "text", "hovertext": hover} | more


def _spaced(name: str) -> str:
    return words(name.replace("_", " "))


def _bars(chart: Bars) -> dict[str, Any]:
    labels = [str(label) for label in chart.labels]
    whole = totals(chart)
    axis = Axis(chart.unit, whole)
    is_one = len(chart.series) == 1
    ends = [start + length for start, length in zip(chart.starts or [0.0] * len(whole), whole)]
    top = largest([*ends, *(value for one in chart.series for value in one.high)])
    data = []
    for series, color in zip(chart.series, colors_of(chart.series)):
        name, texts = _spaced(series.name), texts_of(chart.unit, series)
        hover = [f"{lines_of_words(label)}<br>{name}: <b>{text}</b>" for label, text in zip(labels, texts)]
        rows, marker = list(range(len(labels))), {"color": color}
        trace = _trace("bar", name, on(axis, series.y), rows, hover, orientation="h", marker=marker)
        if chart.starts:
            trace["base"] = on(axis, chart.starts)
        if bars := axes.interval_bars(series, axis):
            trace["error_x"] = bars
        elif is_one:
            trace |= {"text": texts, "textposition": "outside", "cliponaxis": False}
        data.append(trace)
    x_axis: dict[str, Any] = {"title": {"text": words(axis.title, 80)}, "rangemode": "tozero"}
    narrow: dict[str, Any] = {"yaxis.ticktext": axes.names_in(labels, axes.NARROW_LABEL)}
    if is_one and min(whole, default=0.0) >= 0 and top > 0:
        reach = top / axis.divisor * 1.12  # room for the text after the longest bar
        x_axis["range"], narrow["xaxis.range"] = [0, reach], [0, reach * 1.25]
    layout = {
        "barmode": "relative",
        "bargap": 0.28,
        "showlegend": not is_one,
        "xaxis": x_axis,
        "yaxis": axes.names_axis(labels) | {"autorange": "reversed"},
        "annotations": [
            {"x": x, "y": at, "text": text, "xanchor": "left", "xshift": 2, "showarrow": False}
            for at in range(len(labels))
            for x, text in _after(chart, at, axis)
        ],
    }
    return {"data": data, "layout": layout, "narrow": narrow, "height": 60 + 28 * max(2, len(labels))}


def _after(chart: Bars, at: int, axis: Axis) -> list[tuple[float, str]]:
    """Return texts after a bar: why it is missing, or its value if error bars are in the way."""
    if reason := why_missing(chart, at):
        return [(0.0, words(reason, 16))]
    series = chart.series[0]
    if len(chart.series) > 1 or not (series.low and series.high) or series.y[at] is None:
        return []
    return [(largest([series.y[at], series.high[at]]) / axis.divisor, cell(chart.unit, series.y[at]))]


def _lines(chart: Lines) -> dict[str, Any]:
    chart = ended(chart)
    x, y = axes_of(chart)
    colors = colors_of(chart.series)
    data = [_line(chart, series, color, x, y) for series, color in zip(chart.series, colors) if series.x]
    x_axis = axes.figures_axis(x) | {"showspikes": chart.style != "dots"}
    x_axis["unifiedhovertitle"] = {"text": f"{title_of(chart.x)} %{{x}} {x.unit}".rstrip()}
    y_axis = axes.figures_axis(y)
    if not chart.log_y:
        y_axis["rangemode"] = "tozero"
    if top := top_of(chart):
        y_axis["range"] = [0, top / y.divisor]
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dot", "width": 1.5}}
    layout = {
        "showlegend": len(data) > 1,
        "hovermode": "closest" if chart.style == "dots" else "x unified",
        "xaxis": x_axis,
        "yaxis": y_axis,
        "shapes": [{"x0": place, "x1": place, **line} for place in (mark.x / x.divisor for mark in chart.marks)],
        "annotations": [*_marks(chart, x), *_gaps(chart, colors, x)],
    }
    return {"data": data, "layout": layout, "narrow": {}, "height": 320}


def _line(chart: Lines, series: Series, color: str, x: Axis, y: Axis) -> dict[str, Any]:
    name = _spaced(series.name)
    hover = [f"{name}: <b>{text}</b>" for text in texts_of(chart.y, series)]
    trace = _trace("scatter", name, on(x, series.x), on(y, series.y), hover, mode="lines")
    shape = "hv" if chart.style in ("steps", "areas") else "linear"
    trace |= {"line": {"color": color, "width": 1.8, "shape": shape}, "marker": {"color": color, "size": 6}}
    if chart.style == "dots":
        where = [f"<br>{title_of(chart.x)} {words(cell(chart.x, value))}" for value in series.x]
        trace |= {"mode": "markers", "hovertext": [text + at for text, at in zip(hover, where)]}
    elif chart.style == "lines" and len(series.x) <= _MOST_MARKERS:
        trace["mode"] = "lines+markers"
    elif chart.style == "areas":
        trace |= {"stackgroup": "whole", "fillcolor": color}
        trace["line"] |= {"width": 0}
    if bars := axes.interval_bars(series, y, color=color):
        trace["error_y"] = bars
    return trace


def _note(place: float, row: int, text: str, **more: Any) -> dict[str, Any]:
    """Return a text near the upper edge of a chart; rows are below one another."""
    y = 1 - _NOTE * row
    return {"x": place, "yref": "paper", "y": y, "yanchor": "top", "text": text, "showarrow": False} | more


def _marks(chart: Lines, axis: Axis) -> list[dict[str, Any]]:
    """Return the names of the marks inside the chart, staggered on three lines."""
    places = [_place(value, axis) for value in axis.values]
    low, high = min(places, default=0.0), max(places, default=0.0)
    notes = []
    for number, mark in enumerate(sorted(chart.marks, key=lambda mark: mark.x)):
        x = _place(mark.x / axis.divisor, axis)
        is_left = high == low or (x - low) / (high - low) < 0.6
        side = {"xanchor": "left", "xshift": 3} if is_left else {"xanchor": "right", "xshift": -3}
        notes.append(_note(x, number % 3, words(mark.name), **side))
    return notes


def _gaps(chart: Lines, colors: Sequence[str], axis: Axis) -> list[dict[str, Any]]:
    """Return why values are missing, at the upper edge in the color of the line."""
    found: dict[float, int] = {}
    notes = []
    for series, color in zip(chart.series, colors):
        for x, reason in zip(series.x, series.gaps):
            if reason:
                row = found[x] = found.get(x, -1) + 1
                notes.append(_note(_place(x / axis.divisor, axis), row, words(reason, 16), font={"color": color}))
    return notes


def _place(value: float, axis: Axis) -> float:
    """Return the x of a note: on a logarithmic axis, Plotly expects the logarithm."""
    return math.log10(value) if axis.is_log and value > 0 else value


def _scatter(chart: Scatter) -> dict[str, Any]:
    groups: dict[str, list[Dot]] = {}
    for dot in chart.points:
        groups.setdefault(dot.group, []).append(dot)
    x, y = axes_of(chart)
    least = 6.0 if any(dot.weight for dot in chart.points) else 10.0
    data: list[dict[str, Any]] = []
    colors = colors_of(tuple(Series(name, (), color=name) for name in groups))
    for (group, dots), color in zip(groups.items(), colors):
        sizes = [round(max(least, _DOT_PIXELS * math.sqrt(max(0.0, dot.weight))), 1) for dot in dots]
        places = on(x, [dot.x for dot in dots]), on(y, [dot.y for dot in dots])
        hover, marker = [_dot_text(chart, dot) for dot in dots], {"color": color, "opacity": 0.75, "size": sizes}
        data.append(_trace("scatter", _spaced(group), *places, hover, mode="markers", marker=marker))
    for number, limit in enumerate(chart.limits):
        hover, line = [lines_of_words(limit.name)] * len(limit.x), {"color": _LIMIT_COLOR, "width": 2}
        line["dash"] = _DASHES[number % len(_DASHES)]
        places = on(x, limit.x), on(y, limit.y)
        data.append(_trace("scatter", words(limit.name, 60), *places, hover, mode="lines", line=line))
    layout = {
        "showlegend": True,
        "legend": {"itemsizing": "constant"},
        "hovermode": "closest",
        "xaxis": axes.figures_axis(x),
        "yaxis": axes.figures_axis(y),
    }
    return {"data": data, "layout": layout, "narrow": {}, "height": 520}


def _dot_text(chart: Scatter, dot: Dot) -> str:
    share = f"{percent(dot.weight)} of all · " if dot.weight else ""
    where = f"{words(title_of(chart.x))} {words(cell(chart.x, dot.x))}"
    return f"{lines_of_words(dot.name)}<br>{share}<b>{words(cell(chart.y, dot.y))}</b><br>{where}"


def _heat(chart: Heat) -> dict[str, Any]:
    axis = Axis(chart.unit, [value for row in chart.values for value in row])
    across, down = list(range(len(chart.x_labels))), list(range(len(chart.y_labels)))
    absent = [(y, x) for y in down for x in across if chart.values[y][x] is None]
    rows = [f"{words(chart.y_title)} {words(label)}" for label in chart.y_labels]
    columns = [f"{words(chart.x_title)} {words(label)}" for label in chart.x_labels]
    trace = {
        "type": "heatmap",
        "x": across,
        "y": down,
        "z": [on(axis, row) for row in chart.values],
        "text": [[words(text, 16) for text in row] for row in chart.texts],
        "texttemplate": "%{text}",
        "hoverinfo": "text",
        "hovertext": [
            [f"{row}<br>{column}<br><b>{words(text, 200)}</b>" for column, text in zip(columns, texts)]
            for row, texts in zip(rows, chart.texts)
        ],
        "xgap": 2,
        "ygap": 2,
        "coloraxis": "coloraxis",
    }
    bar = {"title": {"text": axis.unit or words(axis.title, 80), "side": "top"}, "thickness": 12}
    dotted = {"type": "rect", "layer": "below", "line": {"dash": "dot", "width": 1}}
    downwards = {"autorange": "reversed"}
    layout = {
        "coloraxis": {"colorscale": "Cividis", "colorbar": bar},
        "xaxis": {**axes.names_axis(chart.x_labels, 24), "title": {"text": words(chart.x_title)}},
        "yaxis": {**axes.names_axis(chart.y_labels, 32), "title": {"text": words(chart.y_title)}, **downwards},
        # A cell without a value shows why.
        "shapes": [{"x0": x - 0.47, "x1": x + 0.47, "y0": y - 0.45, "y1": y + 0.45, **dotted} for y, x in absent],
        "annotations": [
            {"x": x, "y": y, "text": words(chart.texts[y][x], 16), "showarrow": False} for y, x in absent
        ],
    }
    narrow = {"yaxis.ticktext": axes.names_in(chart.y_labels, axes.NARROW_LABEL - 4), "coloraxis.showscale": False}
    width = 130 + 9 * (2 + max((len(text) for row in chart.texts for text in row), default=4)) * len(across)
    height = 80 + 38 * max(2, len(down))
    return {"data": [trace], "layout": layout, "narrow": narrow, "height": height, "min_width": min(1000, width)}


_FIGURES: dict[type[Chart], Callable[[Any], dict[str, Any]]] = {
    Bars: _bars,
    Lines: _lines,
    Scatter: _scatter,
    Tree: tree_figure,
    Heat: _heat,
}

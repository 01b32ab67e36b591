"""Renders charts as Plotly figures in plain JSON. The page adds the colors of its theme."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stepscope.document.model import Bars, Chart, Dot, Heat, Lines, Scatter, Series, Tree
from stepscope.formatting import Scale, cell, percent, title_of
from stepscope.render.axes import largest, unit_of
from stepscope.render.colors import colors_of
from stepscope.render.page.axes import (
    NARROW_LABEL,
    axis_title,
    figures_axis,
    interval_bars,
    lines_of_words,
    names_axis,
    names_in,
    scaled,
    texts_of,
    words,
)
from stepscope.render.page.lines import lines_figure
from stepscope.render.page.trees import tree_figure

_DOT_PIXELS = 64
"""Diameter of a dot with a share of 100 %."""
_DASHES = ("solid", "dash", "dot", "dashdot")
_LIMIT_COLOR = "#8a8f98"


def figure_of(chart: Chart) -> dict[str, Any]:
    """Return Plotly's `data` and `layout`, `height` in pixels, and `narrow`: layout changes for phones."""
    return _FIGURES[type(chart)](chart)


def _bars(chart: Bars) -> dict[str, Any]:
    labels = [str(label) for label in chart.labels]
    whole = [math.fsum(one.y[at] or 0.0 for one in chart.series) for at in range(len(labels))]
    unit = unit_of(chart.unit, whole)
    is_one = len(chart.series) == 1
    top = largest([*whole, *(value for one in chart.series for value in one.high)])
    data = []
    for series, color in zip(chart.series, colors_of(chart.series)):
        texts = texts_of(chart.unit, series)
        trace: dict[str, Any] = {
            "type": "bar",
            "orientation": "h",
            "name": words(_spaced(series.name)),
            "x": scaled(series.y, unit),
            "y": list(range(len(labels))),
            "marker": {"color": color},
            "hoverinfo": "text",
            "hovertext": [
                f"{lines_of_words(label)}<br>{words(_spaced(series.name))}: <b>{text}</b>"
                for label, text in zip(labels, texts)
            ],
        }
        if bars := interval_bars(series, unit):
            trace["error_x"] = bars
        elif is_one:
            trace |= {"text": texts, "textposition": "outside", "cliponaxis": False}
        data.append(trace)
    x_axis: dict[str, Any] = {"title": {"text": axis_title(chart.unit, unit.unit)}, "rangemode": "tozero"}
    if is_one and min(whole, default=0.0) >= 0 and top > 0:
        x_axis["range"] = [0, top / unit.divisor * 1.12]  # room for the text after the longest bar
    layout = {
        "barmode": "relative",
        "bargap": 0.28,
        "showlegend": not is_one,
        "xaxis": x_axis,
        "yaxis": names_axis(labels) | {"autorange": "reversed"},
        "annotations": [
            {"x": x, "y": at, "text": text, "xanchor": "left", "xshift": 2, "showarrow": False}
            for at in range(len(labels))
            for x, text in _after(chart, at, unit)
        ],
    }
    narrow: dict[str, Any] = {"yaxis.ticktext": names_in(labels, NARROW_LABEL)}
    if "range" in x_axis:
        narrow["xaxis.range"] = [0, x_axis["range"][1] * 1.25]
    return {"data": data, "layout": layout, "narrow": narrow, "height": 60 + 28 * max(2, len(labels))}


def _after(chart: Bars, at: int, unit: Scale) -> list[tuple[float, str]]:
    """Return texts after a bar: why it is missing, or its value if error bars are in the way."""
    if all(series.y[at] is None for series in chart.series):
        reasons = [series.gaps[at] for series in chart.series if series.gaps and series.gaps[at]]
        return [(0.0, words(reasons[0], 16))] if reasons else []
    series = chart.series[0]
    if len(chart.series) > 1 or not (series.low and series.high):
        return []
    return [(largest([series.y[at], series.high[at]]) / unit.divisor, words(cell(chart.unit, series.y[at])))]


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _scatter(chart: Scatter) -> dict[str, Any]:
    groups: dict[str, list[Dot]] = {}
    for dot in chart.points:
        groups.setdefault(dot.group, []).append(dot)
    every_x = [dot.x for dot in chart.points] + [value for limit in chart.limits for value in limit.x]
    every_y = [dot.y for dot in chart.points] + [value for limit in chart.limits for value in limit.y]
    x_unit, y_unit = unit_of(chart.x, every_x), unit_of(chart.y, every_y)
    least = 6.0 if any(dot.weight for dot in chart.points) else 10.0
    data: list[dict[str, Any]] = []
    colors = colors_of(tuple(Series(name, (), color=name) for name in groups))
    for (group, dots), color in zip(groups.items(), colors):
        sizes = [round(max(least, _DOT_PIXELS * math.sqrt(max(0.0, dot.weight))), 1) for dot in dots]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": words(_spaced(group)),
                "x": scaled([dot.x for dot in dots], x_unit),
                "y": scaled([dot.y for dot in dots], y_unit),
                "marker": {"color": color, "opacity": 0.75, "size": sizes},
                "hoverinfo": "text",
                "hovertext": [_dot_text(chart, dot) for dot in dots],
            }
        )
    for number, limit in enumerate(chart.limits):
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": words(limit.name, 60),
                "x": scaled(limit.x, x_unit),
                "y": scaled(limit.y, y_unit),
                "line": {"color": _LIMIT_COLOR, "width": 2, "dash": _DASHES[number % len(_DASHES)]},
                "hoverinfo": "text",
                "hovertext": [lines_of_words(limit.name)] * len(limit.x),
            }
        )
    layout = {
        "showlegend": True,
        "legend": {"itemsizing": "constant"},
        "hovermode": "closest",
        "xaxis": figures_axis(chart.x, every_x, x_unit, chart.log_x),
        "yaxis": figures_axis(chart.y, every_y, y_unit, chart.log_y),
    }
    return {"data": data, "layout": layout, "narrow": {}, "height": 520}


def _dot_text(chart: Scatter, dot: Dot) -> str:
    share = f"{percent(dot.weight)} of all · " if dot.weight else ""
    return (
        f"{lines_of_words(dot.name)}<br>{share}<b>{words(cell(chart.y, dot.y))}</b>"
        f"<br>{words(title_of(chart.x))} {words(cell(chart.x, dot.x))}"
    )


def _heat(chart: Heat) -> dict[str, Any]:
    unit = unit_of(chart.unit, [value for row in chart.values for value in row])
    across, down = list(range(len(chart.x_labels))), list(range(len(chart.y_labels)))
    absent = [(y, x) for y in down for x in across if chart.values[y][x] is None]
    trace = {
        "type": "heatmap",
        "x": across,
        "y": down,
        "z": [scaled(row, unit) for row in chart.values],
        "text": [[words(text, 16) for text in row] for row in chart.texts],
        "texttemplate": "%{text}",
        "hoverinfo": "text",
        "hovertext": [
            [
                f"{words(chart.y_title)} {words(chart.y_labels[y])}<br>{words(chart.x_title)} "
                f"{words(chart.x_labels[x])}<br><b>{words(chart.texts[y][x], 200)}</b>"
                for x in across
            ]
            for y in down
        ],
        "xgap": 2,
        "ygap": 2,
        "coloraxis": "coloraxis",
    }
    bar = {"title": {"text": unit.unit or axis_title(chart.unit, ""), "side": "top"}, "thickness": 12}
    layout = {
        "coloraxis": {"colorscale": "Cividis", "colorbar": bar},
        "xaxis": names_axis(chart.x_labels, 24) | {"title": {"text": words(chart.x_title)}},
        "yaxis": names_axis(chart.y_labels, 32) | {"title": {"text": words(chart.y_title)}, "autorange": "reversed"},
        # A cell without a value shows why.
        "shapes": [
            {"type": "rect", "x0": x - 0.47, "x1": x + 0.47, "y0": y - 0.45, "y1": y + 0.45, "layer": "below",
             "line": {"dash": "dot", "width": 1}} for y, x in absent
        ],
        "annotations": [
            {"x": x, "y": y, "text": words(chart.texts[y][x], 16), "showarrow": False} for y, x in absent
        ],
    }  # fmt: skip
    narrow: dict[str, Any] = {"yaxis.ticktext": names_in(chart.y_labels, NARROW_LABEL - 4)}
    narrow["coloraxis.showscale"] = False
    width = 130 + 9 * (2 + max((len(text) for row in chart.texts for text in row), default=4)) * len(across)
    height = 80 + 38 * max(2, len(down))
    return {"data": [trace], "layout": layout, "narrow": narrow, "height": height, "min_width": min(1000, width)}


_FIGURES: dict[type[Chart], Callable[[Any], dict[str, Any]]] = {
    Bars: _bars,
    Lines: lines_figure,
    Scatter: _scatter,
    Tree: tree_figure,
    Heat: _heat,
}

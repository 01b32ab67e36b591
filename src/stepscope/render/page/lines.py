"""Renders lines, steps, areas and dots as a Plotly figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stepscope.document.model import Lines, Series
from stepscope.formatting import Scale, cell, title_of
from stepscope.render.axes import ended, heights, top_of, unit_of
from stepscope.render.colors import colors_of
from stepscope.render.page.axes import figures_axis, interval_bars, scaled, texts_of, words

_NOTE = 0.08
"""Distance between two notes, as a share of the chart's height."""
_MOST_MARKERS = 40


def lines_figure(chart: Lines) -> dict[str, Any]:
    """Return the figure; marks are dotted lines with their names."""
    chart = ended(chart)
    every_x = [value for series in chart.series for value in series.x] + [mark.x for mark in chart.marks]
    every_y = heights(chart)
    x_unit, y_unit = unit_of(chart.x, every_x), unit_of(chart.y, every_y)
    colors = colors_of(chart.series)
    data = [_trace(chart, series, color, x_unit, y_unit) for series, color in zip(chart.series, colors) if series.x]
    x_axis = figures_axis(chart.x, every_x, x_unit, chart.log_x) | {"showspikes": chart.style != "dots"}
    x_axis["unifiedhovertitle"] = {"text": f"{title_of(chart.x)} %{{x}} {x_unit.unit}".rstrip()}
    y_axis = figures_axis(chart.y, every_y, y_unit, chart.log_y)
    if not chart.log_y:
        y_axis["rangemode"] = "tozero"
    if top := top_of(chart):
        y_axis["range"] = [0, top / y_unit.divisor]
    layout = {
        "showlegend": len(data) > 1,
        "hovermode": "closest" if chart.style == "dots" else "x unified",
        "xaxis": x_axis,
        "yaxis": y_axis,
        "shapes": [
            {
                "type": "line",
                "x0": x,
                "x1": x,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"dash": "dot", "width": 1.5},
            }
            for x in (mark.x / x_unit.divisor for mark in chart.marks)
        ],
        "annotations": [*_marks(chart, every_x, x_unit), *_gaps(chart, colors, x_unit)],
    }
    return {"data": data, "layout": layout, "narrow": {}, "height": 320}


def _trace(chart: Lines, series: Series, color: str, x_unit: Scale, y_unit: Scale) -> dict[str, Any]:
    name = words(series.name.replace("_", " "))
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": name,
        "x": scaled(series.x, x_unit),
        "y": scaled(series.y, y_unit),
        "mode": "lines",
        "line": {"color": color, "width": 1.8, "shape": "hv" if chart.style in ("steps", "areas") else "linear"},
        "marker": {"color": color, "size": 6},
        "hoverinfo": "text",
        "hovertext": [f"{name}: <b>{text}</b>" for text in texts_of(chart.y, series)],
    }
    if chart.style == "dots":
        x_texts = [words(cell(chart.x, value)) for value in series.x]
        trace |= {
            "mode": "markers",
            "hovertext": [
                f"{text}<br>{title_of(chart.x)} {x_text}" for text, x_text in zip(trace["hovertext"], x_texts)
            ],
        }
    elif chart.style == "lines" and len(series.x) <= _MOST_MARKERS:
        trace["mode"] = "lines+markers"
    elif chart.style == "areas":
        trace |= {"stackgroup": "whole", "fillcolor": color}
        trace["line"] |= {"width": 0}
    if bars := interval_bars(series, y_unit, color):
        trace["error_y"] = bars
    return trace


def _marks(chart: Lines, every_x: Sequence[float], unit: Scale) -> list[dict[str, Any]]:
    """Return the names of the marks inside the chart, staggered on three lines."""
    places = [_place(x / unit.divisor, chart.log_x) for x in every_x]
    low, high = min(places, default=0.0), max(places, default=0.0)
    notes = []
    for number, mark in enumerate(sorted(chart.marks, key=lambda mark: mark.x)):
        x = _place(mark.x / unit.divisor, chart.log_x)
        is_left = high == low or (x - low) / (high - low) < 0.6
        notes.append({
            "x": x, "yref": "paper", "y": 1 - _NOTE * (number % 3), "yanchor": "top", "text": words(mark.name),
            "xanchor": "left" if is_left else "right", "xshift": 3 if is_left else -3, "showarrow": False,
        })  # fmt: skip
    return notes


def _gaps(chart: Lines, colors: Sequence[str], unit: Scale) -> list[dict[str, Any]]:
    """Return why values are missing, at the upper edge in the color of the line."""
    found: dict[float, int] = {}
    notes = []
    for series, color in zip(chart.series, colors):
        for x, reason in zip(series.x, series.gaps):
            if reason:
                level = found[x] = found.get(x, -1) + 1
                notes.append({
                    "x": _place(x / unit.divisor, chart.log_x), "yref": "paper", "y": 1 - _NOTE * level,
                    "yanchor": "top", "text": words(reason, 16), "showarrow": False, "font": {"color": color},
                })  # fmt: skip
    return notes


def _place(value: float, is_log: bool) -> float:
    """Return the x of a note: on a logarithmic axis, Plotly expects the logarithm."""
    return math.log10(value) if is_log and value > 0 else value

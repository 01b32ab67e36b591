"""Axes, labels and error bars of Plotly figures.

Plotly reads markup such as `<b>` and `<a href>` in any text, so every name passes `words`.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from stepscope.document.model import Series
from stepscope.formatting import Scale, cell, fit_names, safe
from stepscope.render import axes
from stepscope.render.axes import log_ticks, tick_text

LABEL, NARROW_LABEL = 44, 18
_ROOM = 1.6
"""How far a logarithmic axis goes beyond its outermost values."""


def words(text: object, most: int = LABEL) -> str:
    """Return text escaped for Plotly.

    >>> words("<b>void</b> & co")
    '&lt;b&gt;void&lt;/b&gt; &amp; co'
    """
    return html.escape(safe(text, most), quote=False)


def lines_of_words(text: object, width: int = 64, most: int = 320) -> str:
    """Return text escaped and wrapped for a tooltip."""
    rows = textwrap.wrap(safe(text, most), width, break_on_hyphens=False)
    return "<br>".join(html.escape(row, quote=False) for row in rows)


def axis_title(name: str, unit: str) -> str:
    """Return an axis title, escaped for Plotly."""
    return words(axes.axis_title(name, unit), 80)


def scaled(values: Sequence[float | None], unit: Scale) -> list[float | None]:
    """Return values in a unit, with six digits."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in axes.scaled(values, unit)]


def texts_of(unit: str, series: Series) -> list[str]:
    """Return each value of a series as text with its interval, or why it is missing."""
    texts = [words(cell(unit, value)) for value in series.y]
    if series.low and series.high:
        texts = [
            f"{text} ({words(cell(unit, low))} – {words(cell(unit, high))})" if low is not None else text
            for text, low, high in zip(texts, series.low, series.high)
        ]
    return [words(gap) if gap else text for text, gap in zip(texts, series.gaps or [""] * len(texts))]


def interval_bars(series: Series, unit: Scale, color: str | None = None) -> dict[str, Any] | None:
    """Return the intervals of a series as error bars; None if it has none."""
    if not (series.low and series.high):
        return None
    above = [None if y is None or end is None else end - y for y, end in zip(series.y, series.high)]
    below = [None if y is None or end is None else y - end for y, end in zip(series.y, series.low)]
    bars = {"type": "data", "symmetric": False, "array": scaled(above, unit), "arrayminus": scaled(below, unit)}
    return bars | {"thickness": 1.2, "width": 3} | ({"color": color} if color else {})


def names_in(labels: Sequence[object], room: int) -> list[str]:
    """Return names in at most `room` characters; different names stay different."""
    return [html.escape(text, quote=False) for text in fit_names([safe(label, 1000) for label in labels], room)]


def names_axis(labels: Sequence[object], most: int = LABEL) -> dict[str, Any]:
    """Return an axis of names by position, so that equal names stay separate."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(labels))),
        "ticktext": names_in(labels, most),
        "ticklabelstandoff": 4,
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
    }


def figures_axis(name: str, values: Sequence[float | None], unit: Scale, is_log: bool) -> dict[str, Any]:
    """Return an axis of numbers with its unit; a logarithmic one has its own ticks."""
    axis: dict[str, Any] = {"title": {"text": axis_title(name, unit.unit)}}
    if not is_log:
        return axis | {"zeroline": False, "exponentformat": "none", "separatethousands": True}
    found = sorted({value / unit.divisor for value in values if value is not None and value > 0})
    axis["type"] = "log"
    if not found:
        return axis
    ticks = log_ticks(found)
    return axis | {
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [tick_text(tick) for tick in ticks],
        "range": [math.log10(found[0] / _ROOM), math.log10(found[-1] * _ROOM)],
    }

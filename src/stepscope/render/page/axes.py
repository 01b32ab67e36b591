"""Axes, labels and error bars of Plotly figures.

Plotly reads markup such as `<b>` and `<a href>` in any text, so every name passes `words`.
"""

import html
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from stepscope.document.model import Series
from stepscope.formatting import fit_names, safe
from stepscope.render import axes
from stepscope.render.axes import Axis, log_ticks, tick_text

LABEL, NARROW_LABEL = 44, 18
_ROOM = 1.6  # how far a logarithmic axis goes beyond its outermost values


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


def rounded(values: Sequence[float | None]) -> list[float | None]:
    """Return values with six digits; None if missing."""
    return [float(f"{value:.6g}") if value is not None and math.isfinite(value) else None for value in values]


def on(axis: Axis, values: Sequence[float | None]) -> list[float | None]:
    return rounded(axis.scaled(values))


def texts_of(unit: str, series: Series) -> list[str]:
    """Return each value of a series as text with its interval, or why it is missing."""
    texts = axes.texts_of(unit, series)
    return [words(gap) if gap else text for text, gap in zip(texts, series.gaps or [""] * len(texts))]


def interval_bars(series: Series, axis: Axis, **more: str) -> dict[str, Any] | None:
    """Return the intervals of a series as error bars; None if it has none."""
    if not (series.low and series.high):
        return None
    above = [None if y is None or end is None else end - y for y, end in zip(series.y, series.high)]
    below = [None if y is None or end is None else y - end for y, end in zip(series.y, series.low)]
    bars = {"type": "data", "symmetric": False, "array": on(axis, above), "arrayminus": on(axis, below)}
    return bars | {"thickness": 1.2, "width": 3} | more


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


def figures_axis(axis: Axis) -> dict[str, Any]:
    """Return an axis of numbers with its unit; a logarithmic one has its own ticks."""
    shown: dict[str, Any] = {"title": {"text": words(axis.title, 80)}}
    if not axis.is_log:
        return shown | {"zeroline": False, "exponentformat": "none", "separatethousands": True}
    shown["type"] = "log"
    found = [value for value in axis.values if value > 0]
    if not found:
        return shown
    ticks = log_ticks(found)
    return shown | {
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [tick_text(tick) for tick in ticks],
        "range": [math.log10(min(found) / _ROOM), math.log10(max(found) * _ROOM)],
    }

"""What the figures of a page share: names that are text, figures in one unit, axes.

Plotly reads `<b>` and `<a href>` in any text it is given, so that a name passes `words` first.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from stepscope.report.cells import Scale, title_of
from stepscope.report.text import safe

LABEL, NARROW_LABEL = 44, 18
_MOST_TICKS = 12
"""Of the figures of an axis that are few enough to be named one by one."""
_ROOM = 1.6
"""Of an axis that grows by factors: how much further it goes than its outermost figure."""


def words(text: object, most: int = LABEL) -> str:
    """Somebody else's text for Plotly.

    >>> words("<b>void</b> & co")
    '&lt;b&gt;void&lt;/b&gt; &amp; co'
    """
    return html.escape(safe(text, most), quote=False)


def lines_of_words(text: object, width: int = 64, most: int = 320) -> str:
    """The same on several lines: for what is shown under the pointer."""
    rows = textwrap.wrap(safe(text, most), width, break_on_hyphens=False)
    return "<br>".join(html.escape(row, quote=False) for row in rows)


def axis_title(name: str, unit: str) -> str:
    """What an axis says: its figure with its unit.

    >>> axis_title("total_ns", "ms"), axis_title("flops_per_s", "TFLOP/s"), axis_title("num_calls", "")
    ('total (ms)', 'TFLOP/s', 'calls')
    """
    title = title_of(name).removesuffix(" per s")
    return words(title) if not unit else unit if title in unit else f"{words(title)} ({unit})"


def largest(values: Sequence[Any]) -> float:
    """The largest figure, whatever its sign; 0 of none."""
    return max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)


def scaled(values: Sequence[float | None], unit: Scale) -> list[float | None]:
    """Figures in a unit, with six digits: more than a screen has."""
    return [
        float(f"{value / unit.divisor:.6g}") if value is not None and math.isfinite(value) else None
        for value in values
    ]


def names_axis(labels: Sequence[object], most: int = LABEL) -> dict[str, Any]:
    """An axis of names, each at its number: two of one name stay two."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(labels))),
        "ticktext": [words(label, most) for label in labels],
        "ticklabelstandoff": 4,
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
    }


def figures_axis(name: str, values: Sequence[float | None], unit: Scale, is_log: bool) -> dict[str, Any]:
    """An axis of figures with its unit; one that grows by factors has ticks of its own."""
    axis: dict[str, Any] = {"title": {"text": axis_title(name, unit.unit)}}
    if not is_log:
        return axis | {"zeroline": False, "exponentformat": "none", "separatethousands": True}
    found = sorted({value / unit.divisor for value in values if value is not None and value > 0})
    axis["type"] = "log"
    if not found:
        return axis
    if len(found) <= _MOST_TICKS and all(value == int(value) for value in found):
        ticks = found
    else:
        powers = range(math.floor(math.log10(found[0])) - 1, math.ceil(math.log10(found[-1])) + 2)
        factors = (1, 2, 5) if len(powers) <= 5 else (1,)
        ticks = [factor * 10.0**power for power in powers for factor in factors]
    return axis | {
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{tick:,.0f}" if tick >= 1 and tick == int(tick) else f"{tick:.4g}" for tick in ticks],
        "range": [math.log10(found[0] / _ROOM), math.log10(found[-1] * _ROOM)],
    }

"""Axes of charts on the page and in PNG files: titles, units, ticks and ranges."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from stepscope.document.model import Bars, Lines, Scatter, Series
from stepscope.formatting import cell, safe, scale, significant, title_of

_TITLE = 44  # characters of an axis title without its unit
_MOST_TICKS = 12  # an axis with at most this many values has a tick at each
_MOST_LEVELS = 200  # with more levels, the last is too narrow to be seen
_ROOM_FOR_MARKS = 1.25  # how far an axis goes above its largest value, for three lines of names


def finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def largest(values: Iterable[float | None]) -> float:
    """Return the largest absolute value; 0 if there is none."""
    return max(map(abs, finite(values)), default=0.0)


class Axis:
    """An axis of figures, in the unit in which its largest value is easy to read."""

    def __init__(self, name: str, values: Sequence[float | None], is_log: bool = False) -> None:
        self.name, self.is_log = name, is_log
        self.divisor, self.unit = scale(name, largest(values))
        self.title = axis_title(name, self.unit)
        self.values = self.scaled(values)

    def scaled(self, values: Sequence[float | None]) -> list[float]:
        """Return values in the unit of the axis; NaN if missing."""
        return [value / self.divisor if value is not None and math.isfinite(value) else math.nan for value in values]


def axes_of(chart: Lines | Scatter) -> tuple[Axis, Axis]:
    """Return the axes that everything on a chart is on."""
    if isinstance(chart, Lines):
        x = [value for series in chart.series for value in series.x] + [mark.x for mark in chart.marks]
        return Axis(chart.x, x, chart.log_x), Axis(chart.y, heights(chart), chart.log_y)
    x = [dot.x for dot in chart.points] + [value for limit in chart.limits for value in limit.x]
    y = [dot.y for dot in chart.points] + [value for limit in chart.limits for value in limit.y if value is not None]
    return Axis(chart.x, x, chart.log_x), Axis(chart.y, y, chart.log_y)


def axis_title(name: str, unit: str) -> str:
    """Return the title of an axis, with its unit.

    >>> axis_title("total_ns", "ms"), axis_title("flops_per_s", "TFLOP/s"), axis_title("num_calls", "")
    ('total (ms)', 'TFLOP/s', 'calls')
    """
    title = safe(title_of(name).removesuffix(" per s"), _TITLE)
    return title if not unit else unit if title in unit else f"{title} ({unit})"


def heights(chart: Lines) -> Sequence[float | None]:
    if chart.style == "areas":
        return [math.fsum(finite(column)) for column in zip(*(series.y for series in chart.series))]
    return [value for series in chart.series for value in (*series.y, *series.low, *series.high)]


def top_of(chart: Lines) -> float | None:
    """Return the top of the y axis that leaves room for the names of marks; None: automatic."""
    return _ROOM_FOR_MARKS * largest(heights(chart)) if chart.marks and not chart.log_y else None


def totals(chart: Bars) -> list[float]:
    return [math.fsum(finite(series.y[at] for series in chart.series)) for at in range(len(chart.labels))]


def why_missing(chart: Bars, at: int) -> str:
    """Return why a bar has no figure; "" if it has one, or if the reason is unknown."""
    if finite(series.y[at] for series in chart.series):
        return ""
    return next((series.gaps[at] for series in chart.series if series.gaps and series.gaps[at]), "")


def texts_of(name: str, series: Series) -> list[str]:
    """Return each value of a series as text, with its interval if it has one."""
    text_of = lru_cache(None, typed=True)(partial(cell, name))  # most levels of memory come again
    texts = [text_of(value) for value in series.y]
    if not (series.low and series.high):
        return texts
    ends = ["" if low is None else f" ({cell(name, low)} – {cell(name, high)})"
            for low, high in zip(series.low, series.high)]  # fmt: skip
    return [f"{text}{end}" for text, end in zip(texts, ends)]


def ended(chart: Lines) -> Lines:
    """Return a chart of steps or areas with an end for its last level: it lasts as long as the one before.

    >>> levels = Lines("", "", "x", "y", (Series("a", [5, 7], [1, 2]),), style="steps")
    >>> ended(levels).series[0].x, ended(levels).series[0].y
    ([1, 2, 3], [5, 7, 7])
    """
    if chart.style not in ("steps", "areas"):
        return chart
    return replace(chart, series=tuple(_ended(series) for series in chart.series))


def _ended(series: Series) -> Series:
    x = series.x
    if not 2 <= len(x) <= _MOST_LEVELS:
        return series
    y, low, high = ([*values, *values[-1:]] for values in (series.y, series.low, series.high))
    gaps = [*series.gaps, ""] if series.gaps else ()
    return replace(series, x=[*x, 2 * x[-1] - x[-2]], y=y, low=low, high=high, gaps=gaps)


def log_ticks(values: Sequence[float], exact: bool = True) -> list[float]:
    """Return the ticks of a logarithmic axis.

    `exact`: at the values themselves if they are few and whole numbers.

    >>> log_ticks([128.0, 256.0]), log_ticks([0.2, 30.0])[:4], log_ticks([])
    ([128.0, 256.0], [0.01, 0.02, 0.05, 0.1], [])
    """
    found = sorted({value for value in values if math.isfinite(value) and value > 0})
    if not found or (exact and len(found) <= _MOST_TICKS and all(value == int(value) for value in found)):
        return found
    powers = range(math.floor(math.log10(found[0])) - 1, math.ceil(math.log10(found[-1])) + 2)
    factors = (1, 2, 5) if len(powers) <= 6 else (1,)
    return [factor * 10.0**power for power in powers for factor in factors]


def tick_text(value: float) -> str:
    """Return the text of a tick, with no more digits than needed.

    >>> tick_text(0.25), tick_text(1024.0), tick_text(0.1 + 0.2), tick_text(0.00002)
    ('0.25', '1,024', '0.3', '0.00002')
    """
    if not math.isfinite(value):
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-3 else significant(value, 1)

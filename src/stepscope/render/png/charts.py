"""Bars, lines, dots and heat maps by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stepscope.document.model import Bars, Heat, Lines, Scatter, Series
from stepscope.formatting import Scale, cell
from stepscope.render.axes import axis_title, ended, heights, scaled, top_of, unit_of
from stepscope.render.colors import colors_of, ink_on
from stepscope.render.png.drawing import drawn, drawn_apart, is_figure, legend, plain_ticks

_MOST_BARS, _MOST_CELLS, _MOST_GROUPS, _MOST_NAMED = 40, 40, 24, 6
_MOST_MARKS = 12
_DARK, _LIGHT = "#111111", "#ffffff"


def draw_bars(axes: Any, chart: Bars) -> None:
    """Horizontal bars, the first on top; a single series says its figures, an absent figure why it is."""
    shown = range(min(len(chart.labels), _MOST_BARS))
    whole = [math.fsum(one.y[at] or 0.0 for one in chart.series if is_figure(one.y[at])) for at in shown]
    unit = unit_of(chart.unit, whole)
    left = [0.0] * len(shown)
    handles = []
    for series, color in zip(chart.series, colors_of(chart.series)):
        widths = [0.0 if math.isnan(value) else value for value in scaled(series.y[: len(shown)], unit)]
        ends = _errors(series, unit, len(shown))
        handles.append(
            axes.barh(shown, widths, left=left, color=color, height=0.7, xerr=ends, ecolor="#333333", capsize=3)
        )
        if len(chart.series) > 1:  # the figures of those parts that are wide enough
            room = 0.08 * max([*whole, 0.0]) / unit.divisor
            texts = [cell(chart.unit, series.y[at]) if widths[at] > room else "" for at in shown]
            _write_inside(axes, texts, left, widths, ink_on(color))
        left = [start + width for start, width in zip(left, widths)]
    for at in shown:
        said = _bar_text(chart, at, whole[at])
        reach = max([left[at], *(_high(series, at, unit) for series in chart.series)])
        axes.annotate(said, (reach, at), (5, 0), textcoords="offset points", va="center", fontsize=9, clip_on=False)
    axes.set_yticks(shown, drawn_apart([chart.labels[at] for at in shown], 40), fontsize=10 if len(shown) < 26 else 7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, (max([*left, 0.0]) or 1.0) * 1.12)
    axes.set_xlabel(drawn(axis_title(chart.unit, unit.unit)))
    plain_ticks(axes.xaxis, (), False)
    if len(chart.labels) > len(shown):
        axes.set_ylabel(f"the first {len(shown)} of {len(chart.labels):,}")
    if len(chart.series) > 1:
        legend(axes, handles, [series.name for series in chart.series])


def _write_inside(axes: Any, texts: Sequence[str], left: Sequence[float], widths: Sequence[float], ink: str) -> None:
    for at, (text, start, width) in enumerate(zip(texts, left, widths)):
        if text:
            axes.text(start + width / 2, at, text, ha="center", va="center", color=ink, fontsize=9)


def _bar_text(chart: Bars, at: int, whole: float) -> str:
    gaps = [series.gaps[at] for series in chart.series if series.gaps and series.gaps[at]]
    if gaps and not any(is_figure(series.y[at]) for series in chart.series):
        return drawn(gaps[0], 30)
    return cell(chart.unit, whole)


def _high(series: Series, at: int, unit: Scale) -> float:
    value = series.high[at] if series.high else None
    return value / unit.divisor if value is not None and math.isfinite(value) else 0.0


def _errors(series: Series, unit: Scale, most: int | None = None) -> list[list[float]] | None:
    """How far the ends of the intervals are from the figures."""
    if not series.low or not series.high:
        return None
    y, low, high = (scaled(values[:most], unit) for values in (series.y, series.low, series.high))
    ends = ([a - b for a, b in zip(y, low)], [b - a for a, b in zip(y, high)])
    return [[0.0 if math.isnan(value) else max(0.0, value) for value in side] for side in ends]


def draw_lines(axes: Any, chart: Lines) -> None:
    """Lines, steps, areas or dots; marks as lines across; an absent figure as its reason at the upper edge."""
    chart = ended(chart)
    every_x = [x for series in chart.series for x in series.x] + [mark.x for mark in chart.marks]
    x_unit, y_unit = unit_of(chart.x, every_x), unit_of(chart.y, heights(chart))
    # Before anything is drawn: a scale that is set later counts margins anew.
    axes.set_xscale("log" if chart.log_x and min(every_x, default=1) > 0 else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    colors = colors_of(chart.series)
    handles: list[Any]
    if chart.style == "areas" and chart.series:
        x = scaled(chart.series[0].x, x_unit)
        bottom = [0.0] * len(x)
        handles = []
        for series, color in zip(chart.series, colors):
            values = scaled(series.y, y_unit)
            top = [low + (0.0 if math.isnan(value) else value) for low, value in zip(bottom, values)]
            handles.append(axes.fill_between(x, bottom, top, step="post", color=color, linewidth=0))
            bottom = top
    else:
        handles = [_line(axes, chart, one, color, x_unit, y_unit) for one, color in zip(chart.series, colors)]
    if not chart.log_y:
        highest = top_of(chart)
        axes.set_ylim(bottom=0, top=highest / y_unit.divisor if highest else None)
    _gaps(axes, chart, colors, x_unit)
    _marks(axes, chart, x_unit)
    plain_ticks(axes.xaxis, scaled(every_x, x_unit), chart.log_x, exact=True)
    plain_ticks(axes.yaxis, scaled(heights(chart), y_unit), chart.log_y)
    axes.set_xlabel(drawn(axis_title(chart.x, x_unit.unit)))
    axes.set_ylabel(drawn(axis_title(chart.y, y_unit.unit)))
    if len(chart.series) > 1:
        order = slice(None, None, -1 if chart.style == "areas" else 1)  # areas are read from the top
        names = [series.name for series in chart.series]
        legend(axes, handles[order], names[order])


def _line(axes: Any, chart: Lines, series: Series, color: str, x_unit: Scale, y_unit: Scale) -> Any:
    x, y = scaled(series.x, x_unit), scaled(series.y, y_unit)
    if chart.style == "dots":
        return axes.plot(x, y, "o", color=color, markersize=4, alpha=0.8)[0]
    errors = _errors(series, y_unit)
    if errors is not None:
        axes.errorbar(x, y, yerr=errors, fmt="none", ecolor=color, elinewidth=1.2, capsize=3)
    shape = "steps-post" if chart.style == "steps" else "default"
    marker = "o" if chart.style == "lines" and len(x) <= 40 else None
    return axes.plot(x, y, color=color, drawstyle=shape, marker=marker, markersize=5, linewidth=1.8)[0]


def _gaps(axes: Any, chart: Lines, colors: Sequence[str], x_unit: Scale) -> None:
    """Reasons, below one another where several are at one x; left of it, at the first x right of it."""
    taken: dict[float, int] = {}
    first = min((x for series in chart.series for x in series.x), default=0.0)
    for series, color in zip(chart.series, colors):
        for x, y, gap in zip(series.x, series.y, series.gaps):
            if not gap or is_figure(y):
                continue
            row = taken.get(x, 0)
            taken[x] = row + 1
            place, across = x / x_unit.divisor, axes.get_xaxis_transform()
            axes.plot([place], [0.985 - 0.035 * row], "x", color=color, transform=across, markersize=7, clip_on=False)
            side, offset = ("left", 7) if x == first else ("right", -7)
            axes.annotate(
                drawn(gap, 14), (place, 0.985 - 0.035 * row), (offset, 0), xycoords=across,
                textcoords="offset points", ha=side, va="center", fontsize=9, color=color,
            )  # fmt: skip


def _marks(axes: Any, chart: Lines, x_unit: Scale) -> None:
    low, high = axes.get_xlim()
    for number, mark in enumerate(sorted(chart.marks, key=lambda mark: mark.x)[:_MOST_MARKS]):
        place = mark.x / x_unit.divisor
        axes.axvline(place, color="#333333", linewidth=1.2, linestyle=":")
        is_right = high > low and (place - low) / (high - low) > 0.6
        axes.annotate(
            drawn(mark.name, 40), (place, 0.98 - 0.05 * (number % 4)), (-4 if is_right else 4, 0),
            xycoords=axes.get_xaxis_transform(), textcoords="offset points", ha="right" if is_right else "left",
            va="top", fontsize=9, bbox={"facecolor": "#ffffff", "alpha": 0.75, "linewidth": 0, "pad": 1},
        )  # fmt: skip


def draw_scatter(axes: Any, chart: Scatter) -> None:
    """Dots by group under their limits; the heaviest few have their names."""
    dots = [dot for dot in chart.points if is_figure(dot.x) and is_figure(dot.y)]
    dots = [dot for dot in dots if (dot.x > 0 or not chart.log_x) and (dot.y > 0 or not chart.log_y)]
    every_x = [dot.x for dot in dots] + [x for limit in chart.limits for x in limit.x]
    every_y = [dot.y for dot in dots] + [y for limit in chart.limits for y in limit.y if y is not None]
    x_unit, y_unit = unit_of(chart.x, every_x), unit_of(chart.y, every_y)
    axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    handles, names = [], []
    groups = list(dict.fromkeys(dot.group for dot in dots))
    colors = colors_of(tuple(Series(group, (), color=group) for group in groups))
    for group, color in list(zip(groups, colors))[:_MOST_GROUPS]:
        own = [dot for dot in dots if dot.group == group]
        axes.scatter(
            [dot.x / x_unit.divisor for dot in own], [dot.y / y_unit.divisor for dot in own],
            s=[max(36.0, 2400 * dot.weight) for dot in own], color=color, alpha=0.75, edgecolors="#ffffff",
            linewidths=0.8,
        )  # fmt: skip
        handles.append(axes.plot([], [], "o", color=color, markersize=8)[0])
        names.append(group.replace("_", " "))
    for number, limit in enumerate(chart.limits):
        style = ("-", "--", ":", "-.")[number % 4]
        x, y = scaled(limit.x, x_unit), scaled(limit.y, y_unit)
        handles.append(axes.plot(x, y, linestyle=style, color="#666666", linewidth=1.8)[0])
        names.append(limit.name)
    # Their names would lie on one another: they have numbers, and their names are in the legend.
    heavy = sorted((dot for dot in dots if dot.weight > 0), key=lambda dot: -dot.weight)[:_MOST_NAMED]
    for number, dot in enumerate(heavy, 1):
        axes.annotate(
            str(number), (dot.x / x_unit.divisor, dot.y / y_unit.divisor), ((11, -11)[number % 2], 0),
            textcoords="offset points", ha="center", va="center", fontsize=9, fontweight="bold",
        )  # fmt: skip
    handles += [axes.plot([], [], linestyle="none")[0] for _ in heavy]
    names += [f"{number} {dot.name}" for number, dot in enumerate(heavy, 1)]
    plain_ticks(axes.xaxis, scaled(every_x, x_unit), chart.log_x)
    plain_ticks(axes.yaxis, scaled(every_y, y_unit), chart.log_y)
    axes.margins(0.08)
    axes.set_xlabel(drawn(axis_title(chart.x, x_unit.unit)))
    axes.set_ylabel(drawn(axis_title(chart.y, y_unit.unit)))
    legend(axes, handles, names)


def draw_heat(axes: Any, chart: Heat) -> None:
    """A cell a figure, dark where it is small; one without a figure is hatched and says why."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.patches import Rectangle

    num_rows, num_columns = min(len(chart.y_labels), _MOST_CELLS), min(len(chart.x_labels), _MOST_CELLS)
    values = [list(row[:num_columns]) for row in chart.values[:num_rows]]
    found = [value for row in values for value in row if value is not None and math.isfinite(value)]
    unit = unit_of(chart.unit, found)
    low, high = min(found, default=0.0) / unit.divisor, max(found, default=1.0) / unit.divisor
    is_log = low > 0 and high >= 10 * low
    norm = LogNorm(low, high) if is_log else Normalize(low, high if high > low else low + (abs(low) or 1.0))
    image = axes.imshow([scaled(row, unit) for row in values], cmap="cividis", norm=norm, aspect="auto")
    size = max(5.0, min(11.0, 110 / max(1, num_columns), 230 / max(1, num_rows)))
    for y in range(num_rows):
        for x in range(num_columns):
            is_absent = not is_figure(values[y][x])
            text = drawn(chart.texts[y][x], max(2, min(14, round(1300 / (num_columns * size)))))
            if is_absent and text:
                axes.add_patch(
                    Rectangle(
                        (x - 0.5, y - 0.5), 1, 1, facecolor="#f0f0f0", edgecolor="#b0b0b0", hatch="//", linewidth=0
                    )
                )
            is_dark = not is_absent and norm(values[y][x] / unit.divisor) < 0.55  # type: ignore[operator]
            ground = {"facecolor": "#ffffff", "linewidth": 0, "pad": 1.5} if is_absent and text else None
            axes.text(
                x, y, text, ha="center", va="center", fontsize=size, color=_LIGHT if is_dark else _DARK, bbox=ground
            )
    axes.grid(visible=False)
    axes.set_xticks(range(num_columns), drawn_apart(list(chart.x_labels[:num_columns]), 18))
    axes.set_yticks(range(num_rows), drawn_apart(list(chart.y_labels[:num_rows]), 32))
    if num_columns > 12 or sum(len(str(text)[:18]) for text in chart.x_labels[:num_columns]) > 90:
        axes.tick_params(axis="x", rotation=40)
        for text in axes.get_xticklabels():
            text.set(ha="right", rotation_mode="anchor")
    axes.set_xlabel(_counted(chart.x_title, num_columns, len(chart.x_labels)))
    axes.set_ylabel(_counted(chart.y_title, num_rows, len(chart.y_labels)))
    for x in range(num_columns - 1):
        axes.axvline(x + 0.5, color="#ffffff", linewidth=2)
    for y in range(num_rows - 1):
        axes.axhline(y + 0.5, color="#ffffff", linewidth=2)
    bar = axes.figure.colorbar(
        image, ax=axes, label=drawn(axis_title(chart.unit, unit.unit)), fraction=0.05, pad=0.02
    )
    plain_ticks(bar.ax.yaxis, [low, high], is_log)


def _counted(title: str, num_shown: int, num_all: int) -> str:
    return drawn(title) if num_shown == num_all else f"{drawn(title)} (the first {num_shown} of {num_all:,})"

"""Bars, lines, dots and heat maps by matplotlib."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from stepscope.document.model import Bars, Heat, Lines, Scatter, Series
from stepscope.formatting import cell, fit_names, safe
from stepscope.render.axes import Axis, axes_of, ended, finite, log_ticks, tick_text, top_of, totals, why_missing
from stepscope.render.colors import colors_of, ink_on


def drawn(text: object, most: int = 60) -> str:
    """Somebody else's text as the font can draw it, in one line; □ for what it has no sign for."""
    return "".join(sign if ord(sign) in _signs() else "□" for sign in safe(text, most))


def drawn_apart(names: Sequence[object], room: int) -> list[str]:
    """Names in so many characters, different ones still different where that can be."""
    return fit_names([drawn(name, 1000) for name in names], room)


@cache
def _signs() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def plain_ticks(axis: Any, values: Sequence[float], is_log: bool, exact: bool = False) -> None:
    """Figures on an axis, without powers of ten; `exact`: at whole ones."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
    if exact and not is_log and all(value == round(value) for value in finite(values)):
        axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    if is_log and (ticks := log_ticks(values, exact)):
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_locator(FixedLocator(ticks))


def legend(axes: Any, handles: Sequence[Any], names: Sequence[str], title: str = "") -> None:
    """Names beside the chart, never on it."""
    if not handles:
        return
    # A name that begins with a low line would be left out.
    texts = [f" {name}" if name.startswith("_") else name for name in drawn_apart(names, 28)]
    size = 10 if len(names) <= 24 else 7
    axes.legend(handles, texts, loc="upper left", bbox_to_anchor=(1.01, 1.0), title=title or None, fontsize=size)


_MOST_BARS, _MOST_CELLS, _MOST_GROUPS, _MOST_NAMED = 40, 40, 24, 6
_MOST_MARKS = 12
_DARK, _LIGHT = "#111111", "#ffffff"


def draw_bars(axes: Any, chart: Bars) -> None:
    """Horizontal bars, the first on top; a single series says its figures, an absent figure why it is."""
    shown = range(min(len(chart.labels), _MOST_BARS))
    whole, is_one = totals(chart)[: len(shown)], len(chart.series) == 1
    axis = Axis(chart.unit, whole)
    left = axis.scaled(chart.starts[: len(shown)]) if chart.starts else [0.0] * len(shown)
    reach = [0.0] * len(shown)
    handles = []
    for series, color in zip(chart.series, colors_of(chart.series)):
        widths = _known(axis.scaled(series.y[: len(shown)]))
        ends = _errors(series, axis, len(shown))
        handles.append(
            axes.barh(shown, widths, left=left, color=color, height=0.7, xerr=ends, ecolor="#333333", capsize=3)
        )
        if not is_one:  # the figures of those parts that are wide enough
            room = 0.08 * max([*whole, 0.0]) / axis.divisor
            for at in (at for at in shown if widths[at] > room):
                text, x = cell(chart.unit, series.y[at]), left[at] + widths[at] / 2
                axes.text(x, at, text, ha="center", va="center", color=ink_on(color), fontsize=9)
        left = [start + width for start, width in zip(left, widths)]
        if series.high:
            reach = [max(pair) for pair in zip(reach, _known(axis.scaled(series.high[: len(shown)])))]
    for at in shown:
        said = drawn(why_missing(chart, at), 30) or cell(chart.unit, whole[at])
        place = (max(left[at], reach[at]), at)
        axes.annotate(said, place, (5, 0), textcoords="offset points", va="center", fontsize=9, clip_on=False)
    axes.set_yticks(shown, drawn_apart([chart.labels[at] for at in shown], 40), fontsize=10 if len(shown) < 26 else 7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, (max([*left, 0.0]) or 1.0) * 1.12)
    axes.set_xlabel(drawn(axis.title))
    plain_ticks(axes.xaxis, (), False)
    if len(chart.labels) > len(shown):
        axes.set_ylabel(f"the first {len(shown)} of {len(chart.labels):,}")
    if not is_one:
        legend(axes, handles, [series.name for series in chart.series])


def _known(values: Sequence[float]) -> list[float]:
    return [0.0 if math.isnan(value) else value for value in values]


def _errors(series: Series, axis: Axis, most: int | None = None) -> list[list[float]] | None:
    """How far the ends of the intervals are from the figures."""
    if not series.low or not series.high:
        return None
    y, low, high = (axis.scaled(values[:most]) for values in (series.y, series.low, series.high))
    ends = ([a - b for a, b in zip(y, low)], [b - a for a, b in zip(y, high)])
    return [[max(0.0, value) for value in _known(side)] for side in ends]


def draw_lines(axes: Any, chart: Lines) -> None:
    """Lines, steps, areas or dots; marks as lines across; an absent figure as its reason at the upper edge."""
    chart = ended(chart)
    x, y = axes_of(chart)
    # Before anything is drawn: a scale that is set later counts margins anew.
    axes.set_xscale("log" if chart.log_x and min(x.values, default=1) > 0 else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    colors = colors_of(chart.series)
    handles: list[Any] = []
    if chart.style == "areas" and chart.series:
        places = x.scaled(chart.series[0].x)
        bottom = [0.0] * len(places)
        for series, color in zip(chart.series, colors):
            top = [low + value for low, value in zip(bottom, _known(y.scaled(series.y)))]
            handles.append(axes.fill_between(places, bottom, top, step="post", color=color, linewidth=0))
            bottom = top
    else:
        handles = [_line(axes, chart, series, color, x, y) for series, color in zip(chart.series, colors)]
    if not chart.log_y:
        highest = top_of(chart)
        axes.set_ylim(bottom=0, top=highest / y.divisor if highest else None)
    _gaps(axes, chart, colors, x)
    _marks(axes, chart, x)
    _label(axes, x, y, exact=True)
    if len(chart.series) > 1:
        order = slice(None, None, -1 if chart.style == "areas" else 1)  # areas are read from the top
        legend(axes, handles[order], [series.name for series in chart.series][order])


def _label(axes: Any, x: Axis, y: Axis, exact: bool = False) -> None:
    """Ticks and titles of both axes; `exact`: ticks of x at whole figures."""
    plain_ticks(axes.xaxis, x.values, x.is_log, exact)
    plain_ticks(axes.yaxis, y.values, y.is_log)
    axes.set_xlabel(drawn(x.title))
    axes.set_ylabel(drawn(y.title))


def _line(axes: Any, chart: Lines, series: Series, color: str, x_axis: Axis, y_axis: Axis) -> Any:
    x, y = x_axis.scaled(series.x), y_axis.scaled(series.y)
    if chart.style == "dots":
        return axes.plot(x, y, "o", color=color, markersize=4, alpha=0.8)[0]
    if (errors := _errors(series, y_axis)) is not None:
        axes.errorbar(x, y, yerr=errors, fmt="none", ecolor=color, elinewidth=1.2, capsize=3)
    shape = "steps-post" if chart.style == "steps" else "default"
    marker = "o" if chart.style == "lines" and len(x) <= 40 else None
    return axes.plot(x, y, color=color, drawstyle=shape, marker=marker, markersize=5, linewidth=1.8)[0]


def _gaps(axes: Any, chart: Lines, colors: Sequence[str], axis: Axis) -> None:
    """Reasons, below one another where several are at one x; left of it, at the first x right of it."""
    taken: Counter[float] = Counter()
    first, across = min((x for series in chart.series for x in series.x), default=0.0), axes.get_xaxis_transform()
    for series, color in zip(chart.series, colors):
        for x, y, gap in zip(series.x, series.y, series.gaps):
            if not gap or finite([y]):
                continue
            place = x / axis.divisor, 0.985 - 0.035 * taken[x]
            taken[x] += 1
            axes.plot([place[0]], [place[1]], "x", color=color, transform=across, markersize=7, clip_on=False)
            side, offset = ("left", 7) if x == first else ("right", -7)
            axes.annotate(
                drawn(gap, 14), place, (offset, 0), xycoords=across, textcoords="offset points", ha=side, va="center",
                fontsize=9, color=color,
            )  # fmt: skip


def _marks(axes: Any, chart: Lines, axis: Axis) -> None:
    low, high = axes.get_xlim()
    for number, mark in enumerate(sorted(chart.marks, key=lambda mark: mark.x)[:_MOST_MARKS]):
        place = mark.x / axis.divisor
        axes.axvline(place, color="#333333", linewidth=1.2, linestyle=":")
        is_right = high > low and (place - low) / (high - low) > 0.6
        axes.annotate(
            drawn(mark.name, 40), (place, 0.98 - 0.05 * (number % 4)), (-4 if is_right else 4, 0),
            xycoords=axes.get_xaxis_transform(), textcoords="offset points", ha="right" if is_right else "left",
            va="top", fontsize=9, bbox={"facecolor": "#ffffff", "alpha": 0.75, "linewidth": 0, "pad": 1},
        )  # fmt: skip


def draw_scatter(axes: Any, chart: Scatter) -> None:
    """Dots by group under their limits; the heaviest few have their names."""
    dots = [dot for dot in chart.points if len(finite((dot.x, dot.y))) == 2]
    dots = [dot for dot in dots if (dot.x > 0 or not chart.log_x) and (dot.y > 0 or not chart.log_y)]
    x, y = axes_of(replace(chart, points=tuple(dots)))
    axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    handles, names = [], []
    groups = list(dict.fromkeys(dot.group for dot in dots))
    colors = colors_of(tuple(Series(group, (), color=group) for group in groups))
    for group, color in list(zip(groups, colors))[:_MOST_GROUPS]:
        own = [dot for dot in dots if dot.group == group]
        axes.scatter(
            x.scaled([dot.x for dot in own]), y.scaled([dot.y for dot in own]),
            s=[max(36.0, 2400 * dot.weight) for dot in own], color=color, alpha=0.75, edgecolors="#ffffff",
            linewidths=0.8,
        )  # fmt: skip
        handles.append(axes.plot([], [], "o", color=color, markersize=8)[0])
        names.append(group.replace("_", " "))
    for number, limit in enumerate(chart.limits):
        style = ("-", "--", ":", "-.")[number % 4]
        line = axes.plot(x.scaled(limit.x), y.scaled(limit.y), linestyle=style, color="#666666", linewidth=1.8)
        handles.append(line[0])
        names.append(limit.name)
    # Their names would lie on one another: they have numbers, and their names are in the legend.
    heavy = sorted((dot for dot in dots if dot.weight > 0), key=lambda dot: -dot.weight)[:_MOST_NAMED]
    for number, dot in enumerate(heavy, 1):
        axes.annotate(
            str(number), (dot.x / x.divisor, dot.y / y.divisor), ((11, -11)[number % 2], 0),
            textcoords="offset points", ha="center", va="center", fontsize=9, fontweight="bold",
        )  # fmt: skip
    handles += [axes.plot([], [], linestyle="none")[0] for _ in heavy]
    names += [f"{number} {dot.name}" for number, dot in enumerate(heavy, 1)]
    _label(axes, x, y)
    axes.margins(0.08)
    legend(axes, handles, names)


def draw_heat(axes: Any, chart: Heat) -> None:
    """A cell a figure, dark where it is small; one without a figure is hatched and says why."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.patches import Rectangle

    num_rows, num_columns = min(len(chart.y_labels), _MOST_CELLS), min(len(chart.x_labels), _MOST_CELLS)
    rows = [chart.values[y][:num_columns] for y in range(num_rows)]
    axis = Axis(chart.unit, [value for row in rows for value in row])
    values = [axis.scaled(row) for row in rows]
    found = finite(axis.values)
    low, high = min(found, default=0.0), max(found, default=1.0 / axis.divisor)
    is_log = low > 0 and high >= 10 * low
    norm = LogNorm(low, high) if is_log else Normalize(low, high if high > low else low + (abs(low) or 1.0))
    image = axes.imshow(values, cmap="cividis", norm=norm, aspect="auto")
    size = max(5.0, min(11.0, 110 / max(1, num_columns), 230 / max(1, num_rows)))
    hatched: dict[str, Any] = {"facecolor": "#f0f0f0", "edgecolor": "#b0b0b0", "hatch": "//", "linewidth": 0}
    for y, x in product(range(num_rows), range(num_columns)):
        is_absent = math.isnan(values[y][x])
        text = drawn(chart.texts[y][x], max(2, min(14, round(1300 / (num_columns * size)))))
        if is_absent and text:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **hatched))
        color = _LIGHT if not is_absent and norm(values[y][x]) < 0.55 else _DARK
        ground = {"facecolor": "#ffffff", "linewidth": 0, "pad": 1.5} if is_absent and text else None
        axes.text(x, y, text, ha="center", va="center", fontsize=size, color=color, bbox=ground)
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
    bar = axes.figure.colorbar(image, ax=axes, label=drawn(axis.title), fraction=0.05, pad=0.02)
    plain_ticks(bar.ax.yaxis, [low, high], is_log)


def _counted(title: str, num_shown: int, num_all: int) -> str:
    return drawn(title) if num_shown == num_all else f"{drawn(title)} (the first {num_shown} of {num_all:,})"

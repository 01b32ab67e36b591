"""Builds the charts of a sweep: one figure over its axes as lines, heat maps and bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.analysis.comparison.sweeps import NOISY_SHARE, OK, PointSummary, SweepSummary
from stepscope.document.model import Bars, Chart, Dot, Heat, Lines, Scatter, Series, Text
from stepscope.document.sections.sweep_axes import MOST_SERIES, Layout, label, value_text
from stepscope.document.sweep_table import BEST, NOISY, TIED, digits_of
from stepscope.formatting import cell, duration, listed, plural, safe, title_of, whole_percent

MOST_FACETS = 6
MOST_BARS = 24
LOG_FACTOR = 10
_NUM_LISTED = 4
"""Points that a caption lists."""


@dataclass(frozen=True)
class Measure:
    """A figure of a point; its name ends in the unit."""

    name: str
    title: str
    value: Callable[[PointSummary], float | None]
    text: Callable[[PointSummary], str]
    """Text for a cell of a heat map."""
    more_is_better: bool = False
    low: Callable[[PointSummary], float | None] | None = None
    high: Callable[[PointSummary], float | None] | None = None


def _named(axis: str) -> str:
    return safe(axis, 60)


def figure(measure: Measure, point: PointSummary) -> float | None:
    """Return the figure of an `ok` point; other points are never drawn as numbers."""
    return measure.value(point) if point.status == OK else None


def time_text(point: PointSummary) -> str:
    """Return the median with as many digits as its noise allows, and its marks."""
    if point.time is None:
        return ""
    return f"{duration(point.time.median, min(4, digits_of(point.time)))}{_mark(point)}"


def _mark(point: PointSummary) -> str:
    return f"{NOISY if point.is_noisy else ''}{BEST if point.is_best else TIED if point.is_tied else ''}"


def _plain(name: str, attribute: str) -> Callable[[PointSummary], str]:
    return lambda point: cell(name, getattr(point, attribute))


def _of_time(name: str) -> Callable[[PointSummary], float | None]:
    return lambda point: None if point.time is None else getattr(point.time, name)


def _mfu_share(point: PointSummary) -> float | None:
    return None if point.mfu is None else point.mfu.share


TIME = Measure("time_ns", "Time", _of_time("median"), time_text, False, _of_time("ci_low"), _of_time("ci_high"))
MEASURES = (
    TIME,
    Measure("tokens_per_s", "Tokens/s", lambda p: p.tokens_per_s, _plain("tokens_per_s", "tokens_per_s"), True),
    Measure("mfu_share", "MFU", _mfu_share, lambda point: cell("mfu_share", _mfu_share(point)), True),
    Measure(
        "peak_allocated_bytes", "Peak memory", lambda point: point.peak_allocated_bytes,
        _plain("peak_allocated_bytes", "peak_allocated_bytes"),
    ),
)  # fmt: skip


def charts_of(sweep: SweepSummary, layout: Layout, measure: Measure) -> tuple[Any, ...]:
    """Return the charts of a figure, one set per combination of the other axes, the largest first."""
    if layout.x is None:
        return ()
    points = [point for point in sweep.points if point.status != OK or measure.value(point) is not None]
    facets: dict[tuple[Any, ...], list[PointSummary]] = {}
    for point in points:
        facets.setdefault(tuple(point.axes.get(name) for name in layout.facets), []).append(point)
    largest = sorted((values for values in facets if len(facets[values]) > 1), key=lambda v: -len(facets[v]))
    kept = [values for values in facets if values in largest[:MOST_FACETS]]
    parts: list[Any] = []
    for number, values in enumerate(kept, 1):
        where = label(facets[values][0], layout.facets)
        key = f"{measure.name}-{number}"
        parts += _facet(facets[values], points, layout, measure, key, f", {where}" if where else "")
    num_left = len(facets) - len(kept)
    if num_left and parts:
        more = f"{plural(num_left, 'more combination')} of {listed(map(_named, layout.facets))}"
        parts.append(Text(f"{more}: see the table of points."))
    return tuple(parts)


def _facet(
    points: list[PointSummary], every: list[PointSummary], layout: Layout, measure: Measure, key: str, where: str
) -> list[Chart]:
    axis = layout.x
    assert axis is not None
    num_x = len({point.axes.get(axis.name) for point in points})
    charts: list[Chart] = []
    if axis.is_numeric and num_x > 1:
        charts.append(_lines(points, every, layout, measure, f"{key}-lines", where))
    else:
        charts.append(_bars(points, layout, measure, f"{key}-bars", where))
    if layout.series and num_x > 1:
        charts.append(_heat(points, layout, measure, f"{key}-heat", where))
    return charts


def _lines(
    points: list[PointSummary], every: list[PointSummary], layout: Layout, measure: Measure, key: str, where: str
) -> Lines:
    assert layout.x is not None
    x = layout.x.name
    names = list(dict.fromkeys(label(point, layout.series, False) for point in every))  # one color in all charts
    series = []
    for name in names[:MOST_SERIES]:
        own = sorted((p for p in points if label(p, layout.series, False) == name), key=lambda p: p.axes[x])
        series.append(
            Series(
                name or measure.title,
                [figure(measure, point) for point in own],
                [point.axes[x] for point in own],
                low=_ends(measure.low, own),
                high=_ends(measure.high, own),
                gaps=["" if point.status == OK else point.status for point in own],
            )
        )
    drawn = [value for one in series for value in one.y if value]
    caption = _at_the_end(points, layout, measure)
    if len(names) > MOST_SERIES:
        caption += f" {plural(len(names) - MOST_SERIES, 'more line')}: see the heat map."
    if measure.low:
        caption += " Error bars: 95 % intervals of the medians."
    return Lines(
        id=key,
        title=f"{measure.title} over {safe(x, 60)}{where}",
        caption=caption.strip(),
        x=x,
        y=measure.name,
        series=tuple(series),
        log_x=layout.x.is_log,
        log_y=bool(drawn) and max(drawn) >= LOG_FACTOR * min(drawn),
    )


def _ends(
    end: Callable[[PointSummary], float | None] | None, points: Sequence[PointSummary]
) -> Sequence[float | None]:
    """Return one end of every interval."""
    return () if end is None else [end(point) if point.status == OK else None for point in points]


def _at_the_end(points: list[PointSummary], layout: Layout, measure: Measure) -> str:
    """Return the figures at the largest x."""
    assert layout.x is not None
    last = max(point.axes[layout.x.name] for point in points)
    there = [point for point in points if point.axes[layout.x.name] == last]
    found = sorted((p for p in there if figure(measure, p) is not None), key=lambda p: figure(measure, p) or 0)
    ends = found if len(found) <= _NUM_LISTED else [found[0], found[-1]]
    texts = [f"{label(point, layout.series, False)} {cell(measure.name, figure(measure, point))}" for point in ends]
    listed_texts = (", " if len(found) <= _NUM_LISTED else " to ").join(text.strip() for text in texts)
    failed = [f"{label(point, layout.series, False)} {point.status}".strip() for point in there if point.status != OK]
    more = [f"{', '.join(failed[:_NUM_LISTED])}{' …' if len(failed) > _NUM_LISTED else ''}"] if failed else []
    at = f"At {layout.x.name} = {value_text(layout.x.name, last)}: "
    return at + "; ".join([*([listed_texts] if listed_texts else []), *more]) + "."


def _heat(points: list[PointSummary], layout: Layout, measure: Measure, key: str, where: str) -> Heat:
    assert layout.x is not None
    x = layout.x.name
    columns = [value for value in layout.x.values if any(point.axes.get(x) == value for point in points)]
    rows = list(dict.fromkeys(label(point, layout.series, False) for point in points))
    cells = {(label(point, layout.series, False), point.axes.get(x)): point for point in points}
    found = [[cells.get((row, column)) for column in columns] for row in rows]
    return Heat(
        id=key,
        title=f"{measure.title} by {listed(map(_named, [*layout.series, x]))}{where}",
        caption=_cells_caption(points, len(rows) * len(columns) - len(cells), measure),
        x_title=title_of(x),
        y_title=" · ".join(title_of(name) for name in layout.series),
        x_labels=[value_text(x, value) for value in columns],
        y_labels=rows,
        unit=measure.name,
        values=[[None if point is None else figure(measure, point) for point in row] for row in found],
        texts=[[_cell_text(point, measure) for point in row] for row in found],
    )


def _cell_text(point: PointSummary | None, measure: Measure) -> str:
    if point is None:
        return ""
    return measure.text(point) if point.status == OK else point.status


def _cells_caption(points: Sequence[PointSummary], num_empty: int, measure: Measure) -> str:
    notes = []
    ok = [point for point in points if point.status == OK]
    if measure is TIME:
        if any(point.is_best for point in ok):
            notes.append(f"{BEST} fastest of the points that compute the same thing")
        if any(point.is_tied for point in ok):
            notes.append(f"{TIED} not measurably slower")
        if any(point.is_noisy for point in ok):
            notes.append(f"{NOISY} noisy: p90 − p10 exceeds {whole_percent(NOISY_SHARE)} of the median")
    counts: dict[str, int] = {}
    for point in points:
        if point.status != OK:
            counts[point.status] = counts.get(point.status, 0) + 1
    if counts:
        notes.append(f"without a result: {', '.join(f'{number} {status}' for status, number in counts.items())}")
    if num_empty:
        notes.append(f"{plural(num_empty, 'empty cell')}: not in the sweep")
    return f"{'; '.join(notes)}." if notes else ""


def _bars(points: list[PointSummary], layout: Layout, measure: Measure, key: str, where: str) -> Bars:
    names = [name for name in layout.names if len({point.axes.get(name) for point in points}) > 1]
    sign = -1 if measure.more_is_better else 1
    ranked = sorted(points, key=lambda p: (figure(measure, p) is None, sign * (figure(measure, p) or 0)))
    shown = ranked[:MOST_BARS]
    values = [figure(measure, point) for point in shown]
    caption = _cells_caption(points, 0, measure)
    if len(ranked) > len(shown):
        caption += f" {plural(len(ranked) - len(shown), 'more point')}: see the table of points."
    one = Series(
        measure.title,
        values,
        low=_ends(measure.low, shown),
        high=_ends(measure.high, shown),
        gaps=["" if point.status == OK else point.status for point in shown],
    )
    return Bars(
        id=key,
        title=f"{measure.title} by {listed(map(_named, names))}{where}",
        caption=caption.strip(),
        labels=[
            f"{label(point, names, False)} {_mark(point) if measure is TIME else ''}".rstrip() for point in shown
        ],
        series=(one,),
        unit=measure.name,
    )


def memory_and_time(sweep: SweepSummary, layout: Layout) -> Scatter | None:
    """Return peak memory over time, one dot per point; None if fewer than two points have both."""
    found = [p for p in sweep.points if p.status == OK and p.time is not None and p.peak_allocated_bytes]
    if len(found) < 2:
        return None
    lasting = max(found, key=lambda p: p.time.median if p.time else 0.0)
    least = min(found, key=lambda p: p.peak_allocated_bytes or 0)
    dots = [
        Dot(
            p.time.median, p.peak_allocated_bytes, 0.0, label(p, layout.names), label(p, layout.series, False) or "ok"
        )
        for p in found
        if p.time is not None and p.peak_allocated_bytes is not None
    ]
    notes = [
        f"the {what}, {label(point, layout.names)}: "
        f"{time_text(point)}, {cell('peak_bytes', point.peak_allocated_bytes)}"
        for what, point in (("slowest", lasting), ("smallest", least))
    ]
    caption = f"{plural(len(found), 'ok point')}; {'; '.join(notes)}."
    return Scatter(
        id="peak-and-time", title="Peak memory and time", caption=caption, x="time_ns", y="peak_allocated_bytes",
        points=tuple(dots),
    )  # fmt: skip

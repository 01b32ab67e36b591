"""The charts of a sweep: which axis is on x, which is the series, which get separate charts."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from stepscope.analysis.comparison.sweeps import IMPLEMENTATION_KNOBS, OK, PointSummary, SweepSummary
from stepscope.document.model import Axis, Bars, Chart, Dot, Heat, Lines, Part, Scatter, Series, Text
from stepscope.document.sweep_table import digits_of, mark_of, marks_in
from stepscope.formatting import cell, duration, listed, plural, safe, title_of

MOST_SERIES = 8  # as many as there are distinguishable colors
_LENGTHS = ("seq_len", "tokens", "context", "batch")
_REPETITIONS = ("seed", "warmup", "steps")
_AXIS_LOG_FACTOR = 4
_LONGEST_VALUE = 60
_MOST_LEADERS = 20  # axes that another is compared with


@dataclass(frozen=True)
class Layout:
    """Axes by their role; each independent axis is in one of the first three."""

    x: Axis | None  # the axis on x; None if nothing varies
    series: tuple[str, ...]  # axes that distinguish lines; several if they have few combinations
    facets: tuple[str, ...]  # axes with one chart per value
    follows: Mapping[str, str]  # redundant axes → the axis that determines them
    ways: tuple[str, ...]  # axes that choose an implementation

    @property
    def names(self) -> tuple[str, ...]:
        return (*((self.x.name,) if self.x else ()), *self.series, *self.facets)


def layout_of(sweep: SweepSummary, rows: Sequence[Mapping[str, Any]]) -> Layout:
    """Return the layout: a length on x, implementations as series, one chart per combination of the rest."""
    ways = {*IMPLEMENTATION_KNOBS}
    for row in rows:
        ways |= {*(row.get("reference") or {}), *(row.get("alternatives") or {})}
    axes = {name: axis_of(sweep.points, name) for name in sweep.varying}
    ranked = sorted(axes, key=lambda name: _rank(axes[name], ways))
    follows: dict[str, str] = {}
    for name in reversed(ranked):
        kept = (other for other in ranked if other != name and other not in follows)
        leaders = islice(kept, _MOST_LEADERS)  # else time grows with the square of the axes
        leader = next((other for other in leaders if _follows(sweep.points, name, other)), None)
        if leader is not None:
            follows[name] = leader
    free = [name for name in ranked if name not in follows]
    x = next((name for name in free if axes[name].is_numeric and name not in _REPETITIONS), None)
    rest = [name for name in free if name != x]
    if x is None and len(rest) > 1:  # nothing to draw a line over: the widest second one, for a heat map
        x = max(rest[1:], key=lambda name: len(axes[name].values))
        rest.remove(x)
    series = _series(sweep.points, axes, rest, ways)
    if x is None and series:
        x, series = series[0], ()
    facets = tuple(name for name in rest if name not in (x, *series))
    return Layout(
        None if x is None else axes[x], series, facets, follows, tuple(name for name in sweep.varying if name in ways)
    )


def axis_of(points: Sequence[PointSummary], name: str) -> Axis:
    values: list[Any] = list(dict.fromkeys(point.axes.get(name) for point in points))
    is_numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    if is_numeric:
        values.sort()
    grows = is_numeric and values[0] > 0 and values[-1] / values[0] >= _AXIS_LOG_FACTOR
    return Axis(name, tuple(values), is_numeric, grows)


def value_text(name: str, value: Any) -> str:
    """Return the text of a value; a knob that does not apply has none."""
    return safe(cell(name, value), _LONGEST_VALUE)


def label(point: PointSummary, names: Sequence[str], with_names: bool = True) -> str:
    """Return a point's values of these axes: `seq_len=128 attention=sdpa`, or `128 · sdpa`."""
    texts = [safe(str(point.axes.get(name, "–")), _LONGEST_VALUE) for name in names]
    if not with_names:
        return " · ".join(texts)
    return " ".join(f"{safe(name, _LONGEST_VALUE)}={text}" for name, text in zip(names, texts))


def _rank(axis: Axis, ways: Collection[str]) -> tuple[int, int, int]:
    if axis.name in _REPETITIONS:
        return 4, 0, 0
    if axis.is_numeric and axis.name in _LENGTHS:
        return 0, _LENGTHS.index(axis.name), 0
    if axis.name in ways:
        return 1, 0, -len(axis.values)
    return (2 if axis.is_numeric else 3), 0, -len(axis.values)


def _follows(points: Sequence[PointSummary], name: str, leader: str) -> bool:
    """Return whether the leader's value determines this axis' value in every point."""
    known: dict[Any, Any] = {}
    values = ((point.axes.get(leader), point.axes.get(name)) for point in points)
    return all(known.setdefault(of, value) == value for of, value in values)


def _series(
    points: Sequence[PointSummary], axes: Mapping[str, Axis], rest: Sequence[str], ways: Collection[str]
) -> tuple[str, ...]:
    """Return the first axis, and others that have few combinations with it."""
    first = next((name for name in rest if name in ways or len(axes[name].values) <= MOST_SERIES), None)
    if first is None:
        return ()
    chosen: tuple[str, ...] = (first,)
    for name in (name for name in rest if name != first):
        together = _num_combinations(points, (*chosen, name))
        is_rare = together < _num_combinations(points, chosen) * len(axes[name].values)
        if together <= MOST_SERIES and (is_rare or (name in ways and first in ways)):
            chosen = (*chosen, name)
    return chosen


def _num_combinations(points: Sequence[PointSummary], names: Sequence[str]) -> int:
    return len({tuple(point.axes.get(name) for name in names) for point in points})


MOST_FACETS = 6
MOST_BARS = 24
LOG_FACTOR = 10
_NUM_LISTED = 4  # points that a caption lists


@dataclass(frozen=True)
class Measure:
    """A figure of a point; its name ends in the unit."""

    name: str
    section: str
    title: str
    value: Callable[[PointSummary], float | None]
    more_is_better: bool = False

    def of(self, point: PointSummary) -> float | None:
        """Return the figure of an `ok` point; other points are never drawn as numbers."""
        return self.value(point) if point.status == OK else None


def time_text(point: PointSummary) -> str:
    """Return the median with as many digits as its noise allows, and its marks."""
    if point.time is None:
        return ""
    return f"{duration(point.time.median, min(4, digits_of(point.time)))}{mark_of(point)}"


TIME = Measure("time_ns", "time", "Time", lambda point: None if point.time is None else point.time.median)
MEASURES = (
    TIME,
    Measure("tokens_per_s", "tokens", "Tokens/s", lambda point: point.tokens_per_s, True),
    Measure("mfu_share", "mfu", "MFU", lambda point: None if point.mfu is None else point.mfu.share, True),
    Measure("peak_allocated_bytes", "memory", "Peak memory", lambda point: point.peak_allocated_bytes),
)


def charts_of(sweep: SweepSummary, layout: Layout, measure: Measure) -> tuple[Part, ...]:
    """Return the charts of a figure, one set per combination of the other axes, the largest first."""
    if layout.x is None:
        return ()
    points = [point for point in sweep.points if point.status != OK or measure.value(point) is not None]
    facets: dict[tuple[Any, ...], list[PointSummary]] = {}
    for point in points:
        facets.setdefault(tuple(point.axes.get(name) for name in layout.facets), []).append(point)
    largest = sorted((values for values in facets if len(facets[values]) > 1), key=lambda v: -len(facets[v]))
    kept = [values for values in facets if values in largest[:MOST_FACETS]]
    lines = list(dict.fromkeys(label(point, layout.series, False) for point in points))  # one color in all charts
    parts: list[Part] = []
    for number, values in enumerate(kept, 1):
        where = label(facets[values][0], layout.facets)
        chart = _Facet(facets[values], layout, measure, f"{measure.name}-{number}", f", {where}" if where else "")
        parts += chart.charts(lines)
    num_left = len(facets) - len(kept)
    if num_left and parts:
        more = f"{plural(num_left, 'more combination')} of {_listed(layout.facets)}"
        parts.append(Text(f"{more}: see the table of points."))
    return tuple(parts)


def _listed(axes: Sequence[str]) -> str:
    return listed(safe(axis, 60) for axis in axes)


class _Facet:
    """The charts of the points of one combination of the axes that have separate charts."""

    def __init__(self, points: list[PointSummary], layout: Layout, measure: Measure, key: str, where: str) -> None:
        assert layout.x is not None
        self.points, self.layout, self.axis, self.measure = points, layout, layout.x, measure
        self.key, self.where = key, where

    def charts(self, lines: Sequence[str]) -> list[Chart]:
        num_x = len({point.axes.get(self.axis.name) for point in self.points})
        charts: list[Chart] = [self._lines(lines) if self.axis.is_numeric and num_x > 1 else self._bars()]
        return [*charts, self._heat()] if self.layout.series and num_x > 1 else charts

    def _name(self, point: PointSummary) -> str:
        return label(point, self.layout.series, False)

    def _series(self, name: str, points: Sequence[PointSummary], x: Sequence[float] = ()) -> Series:
        """Return the figures of points with their intervals, and why some have none."""
        values, gaps = [self.measure.of(p) for p in points], ["" if p.status == OK else p.status for p in points]
        if self.measure is not TIME:
            return Series(name, values, x, gaps=gaps)
        times = [point.time if point.status == OK else None for point in points]
        low, high = ([getattr(time, end, None) for time in times] for end in ("ci_low", "ci_high"))
        return Series(name, values, x, None, low, high, gaps)

    def _lines(self, names: Sequence[str]) -> Lines:
        x, measure = self.axis.name, self.measure
        series = []
        for name in names[:MOST_SERIES]:
            own = sorted((point for point in self.points if self._name(point) == name), key=lambda p: p.axes[x])
            series.append(self._series(name or measure.title, own, [point.axes[x] for point in own]))
        drawn = [value for one in series for value in one.y if value]
        log_y = bool(drawn) and max(drawn) >= LOG_FACTOR * min(drawn)
        caption = self._at_the_end()
        if len(names) > MOST_SERIES:
            caption += f" {plural(len(names) - MOST_SERIES, 'more line')}: see the heat map."
        if measure is TIME:
            caption += " Error bars: 95 % intervals of the medians."
        title, how = f"{measure.title} over {safe(x, 60)}{self.where}", (self.axis.is_log, log_y)
        return Lines(f"{self.key}-lines", title, x, measure.name, tuple(series), (), "lines", *how, caption=caption)

    def _at_the_end(self) -> str:
        x, measure = self.axis.name, self.measure
        last = max(point.axes[x] for point in self.points)
        there = [point for point in self.points if point.axes[x] == last]
        found = sorted((p for p in there if measure.of(p) is not None), key=lambda p: measure.of(p) or 0)
        is_short = len(found) <= _NUM_LISTED
        ends = found if is_short else [found[0], found[-1]]
        texts = [f"{self._name(point)} {cell(measure.name, measure.of(point))}".strip() for point in ends]
        failed = [f"{self._name(point)} {point.status}".strip() for point in there if point.status != OK]
        more = f"{', '.join(failed[:_NUM_LISTED])}{' …' if len(failed) > _NUM_LISTED else ''}"
        said = [text for text in ((", " if is_short else " to ").join(texts), more) if text]
        return f"At {x} = {value_text(x, last)}: {'; '.join(said)}."

    def _heat(self) -> Heat:
        x, measure, series = self.axis.name, self.measure, self.layout.series
        columns = [value for value in self.axis.values if any(p.axes.get(x) == value for p in self.points)]
        cells = {(self._name(point), point.axes.get(x)): point for point in self.points}
        rows = list(dict.fromkeys(name for name, _ in cells))
        found = [[cells.get((row, column)) for column in columns] for row in rows]
        return Heat(
            f"{self.key}-heat",
            f"{measure.title} by {_listed([*series, x])}{self.where}",
            x_title=title_of(x),
            y_title=" · ".join(title_of(name) for name in series),
            x_labels=[value_text(x, value) for value in columns],
            y_labels=rows,
            unit=measure.name,
            values=[[None if point is None else measure.of(point) for point in row] for row in found],
            texts=[[self._cell_text(point) for point in row] for row in found],
            caption=self._caption(len(rows) * len(columns) - len(cells)),
        )

    def _cell_text(self, point: PointSummary | None) -> str:
        if point is None or point.status != OK:
            return "" if point is None else point.status
        return time_text(point) if self.measure is TIME else cell(self.measure.name, self.measure.value(point))

    def _caption(self, num_empty: int = 0) -> str:
        ok = [point for point in self.points if point.status == OK and self.measure is TIME]
        notes = [f"{sign} {meaning}" for sign, meaning in marks_in(ok)]
        if counts := Counter(point.status for point in self.points if point.status != OK):
            notes.append(f"without a result: {', '.join(f'{number} {status}' for status, number in counts.items())}")
        if num_empty:
            notes.append(f"{plural(num_empty, 'empty cell')}: not in the sweep")
        return f"{'; '.join(notes)}." if notes else ""

    def _bars(self) -> Bars:
        measure = self.measure
        names = [name for name in self.layout.names if len({point.axes.get(name) for point in self.points}) > 1]
        sign = -1 if measure.more_is_better else 1
        ranked = sorted(self.points, key=lambda p: (measure.of(p) is None, sign * (measure.of(p) or 0)))
        shown, caption = ranked[:MOST_BARS], self._caption()
        if len(ranked) > len(shown):
            caption += f" {plural(len(ranked) - len(shown), 'more point')}: see the table of points."
        marks = [mark_of(point) if measure is TIME else "" for point in shown]
        labels = [f"{label(point, names, False)} {mark}".rstrip() for point, mark in zip(shown, marks)]
        title, series = f"{measure.title} by {_listed(names)}{self.where}", (self._series(measure.title, shown),)
        return Bars(f"{self.key}-bars", title, labels, series, measure.name, caption=caption.strip())


def memory_and_time(sweep: SweepSummary, layout: Layout) -> Scatter | None:
    """Return peak memory over time, one dot per point; None if fewer than two points have both."""
    found = [
        (point, point.time.median, point.peak_allocated_bytes)
        for point in sweep.points
        if point.status == OK and point.time is not None and point.peak_allocated_bytes
    ]
    if len(found) < 2:
        return None
    ends = {"slowest": max(found, key=lambda one: one[1]), "smallest": min(found, key=lambda one: one[2])}
    notes = [
        f"the {what}, {label(point, layout.names)}: {time_text(point)}, {cell('peak_bytes', num_bytes)}"
        for what, (point, _, num_bytes) in ends.items()
    ]
    caption = f"{plural(len(found), 'ok point')}; {'; '.join(notes)}."
    dots = tuple(
        Dot(ns, num_bytes, 0.0, label(point, layout.names), label(point, layout.series, False) or "ok")
        for point, ns, num_bytes in found
    )
    return Scatter("peak-and-time", "Peak memory and time", "time_ns", "peak_allocated_bytes", dots, caption=caption)

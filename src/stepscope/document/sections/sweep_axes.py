"""Chooses which axis of a sweep is on x, which one is the series, and which ones get separate charts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.analysis.comparison.sweeps import IMPLEMENTATION_KNOBS, PointSummary, SweepSummary
from stepscope.document.model import Axis
from stepscope.formatting import cell, safe

MOST_SERIES = 8  # as many as there are distinguishable colors
_LENGTHS = ("seq_len", "tokens", "context", "batch")
_REPETITIONS = ("seed", "warmup", "steps")
_LOG_FACTOR = 4
_LONGEST_VALUE = 60


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
        kept = [other for other in ranked if other != name and other not in follows]
        leader = next((other for other in kept if _follows(sweep.points, name, other)), None)
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
    grows = is_numeric and values[0] > 0 and values[-1] / values[0] >= _LOG_FACTOR
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
    pairs = {(point.axes.get(leader), point.axes.get(name)) for point in points}
    return len(pairs) == len({point.axes.get(leader) for point in points})


def _series(
    points: Sequence[PointSummary], axes: Mapping[str, Axis], rest: Sequence[str], ways: Collection[str]
) -> tuple[str, ...]:
    """Return the first axis, and others that have few combinations with it."""
    first = next((name for name in rest if name in ways or len(axes[name].values) <= MOST_SERIES), None)
    if first is None:
        return ()
    chosen: tuple[str, ...] = (first,)
    for name in rest:
        if name in chosen:
            continue
        together = _num_combinations(points, (*chosen, name))
        is_rare = together < _num_combinations(points, chosen) * len(axes[name].values)
        if together <= MOST_SERIES and (is_rare or (name in ways and first in ways)):
            chosen = (*chosen, name)
    return chosen


def _num_combinations(points: Sequence[PointSummary], names: Sequence[str]) -> int:
    return len({tuple(point.axes.get(name) for name in names) for point in points})

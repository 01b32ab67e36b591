"""All points of a sweep with their axes and figures, for a page on which the reader chooses what is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepscope.document.model import Part, Value


@dataclass(frozen=True)
class Axis:
    """One knob that differs between points."""

    name: str
    values: tuple[Value, ...]
    """Each once: numbers from the smallest, else in the order of the sweep. None: the knob does not apply."""
    is_numeric: bool
    """All values are numbers: it can be an x of its own scale, else its values stand side by side."""
    is_log: bool
    """Numbers that grow by factors (128, 256, 512): an x axis of it is logarithmic."""


@dataclass(frozen=True)
class Figure:
    """One figure that may be drawn."""

    name: str
    """A key of `Explorer.figures`, the unit at its end: `cells.py` writes it (`cell`, `title_of`, `scale`)."""
    is_log: bool
    """The largest is ten times the smallest or more: its axis is logarithmic unless the reader says otherwise."""
    low: str | None = None
    """The figure that is the lower end of its 95 % interval; None where it has no interval."""
    high: str | None = None


@dataclass(frozen=True)
class Explorer(Part):
    """The points of a sweep as columns: entry `p` of every column is of point `p`.

    To draw figure `f` over axis `x` with axis `s` as series and every other axis held at one value each (`others`):
    take the points with `places[a][p] == others[a]` for all other axes `a`; a point stands at
    `axes[x].values[places[x][p]]` in the series `axes[s].values[places[s][p]]`; its height is `figures[f][p]`, from
    `figures[low][p]` to `figures[high][p]` where the figure has an interval. A heat map is the same, `s` downwards. A
    point whose `statuses[p]` is not `ok` has None in every figure: its place is marked by the status (`oom`) and
    `reasons[p]` says more. A place where no point stands was not in the sweep.
    """

    id: str
    title: str
    axes: tuple[Axis, ...]
    places: tuple[tuple[int, ...], ...]
    """By axis, then by point: which of the axis' values the point has."""
    figures: Mapping[str, Sequence[float | None]]
    """By name; also the ends of intervals, which are not in `shown`."""
    shown: tuple[Figure, ...]
    """What the reader may choose, the time first."""
    statuses: tuple[str, ...]
    reasons: tuple[str, ...]
    """"" of an `ok` point."""
    names: tuple[str, ...]
    """What tells a point from the others: `seq_len=128 attention=sdpa`."""
    marks: tuple[str, ...]
    """`best`, `tied` or "": of the rows that compute the same thing. Only `ok` points have one."""
    is_noisy: tuple[bool, ...]
    x: int | None
    """The axis to begin with on x; None where nothing varies."""
    series: int | None
    """The axis to begin with as series; None where only one axis varies."""

"""What section builders share: series of bounded length, and facts that may be absent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepscope.analysis.memory.timeline import thinned_indices
from stepscope.document.model import Fact, Series

MOST_POINTS = 2000  # points of a line: more cannot be told apart on a page


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a field of a JSON file that should be an object; empty if it is not."""
    return value if isinstance(value, Mapping) else {}


def known(facts: Iterable[Fact]) -> tuple[Fact, ...]:
    """Return the facts that have a value."""
    return tuple(fact for fact in facts if fact.value)


def thinned(name: str, x: Sequence[float], y: Sequence[float]) -> Series:
    """Return a series of at most `MOST_POINTS` points that keeps both ends and the extremes of each stretch.

    >>> len(thinned("many", range(100_000), range(100_000)).y) <= MOST_POINTS
    True
    """
    kept = thinned_indices(y, MOST_POINTS)
    return Series(name, [y[i] for i in kept], [x[i] for i in kept])


def thinning(series: Iterable[Series], num_points: int) -> str:
    """Return the sentence that says how many points were left out; empty if none were."""
    num_drawn = sum(len(one.y) for one in series)
    if num_drawn >= num_points:
        return ""
    return f" Shows {num_drawn:,} of {num_points:,} points, with the extremes of every stretch."

"""The axes of a grid from the arguments of a function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.sweep.grid import Axes


def axes_of(preset: Any, set: Mapping[str, Any] | None, **named: Any) -> Axes:
    """Return the axes: `set`, the preset and the named knobs that are not None; UsageError for a knob named twice."""
    from stepscope.sweep.grid import listed

    given = {name: value for name, value in {"preset": preset, **named}.items() if value is not None}
    twice = [name for name in given if name in (set or {})]
    if twice:
        raise UsageError(f"{twice[0]} is given twice: as an argument and in set")
    return listed({**given, **(set or {})})

"""Conditions for `--when`: `step_time > 1.5x`, `step_time > 2s`, `memory > 90%`, `memory > 60GiB`, `every 2h`,
`every 500 steps`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

STEP_TIME, MEMORY, EVERY = "step_time", "memory", "every"
DEFAULT_LIMIT = 3  # windows for each condition
_UNITS = {
    **{"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "x": 1.0, "%": 0.01, "steps": 1.0},
    **{"MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
}
_ALLOWED = {
    STEP_TIME: ("x", "ms", "s", "min"),
    MEMORY: ("%", "MiB", "GiB", "TiB"),
    EVERY: ("s", "min", "h", "steps"),
}
_TEXT = re.compile(r"\s*(?:(step_time|memory)\s*>|(every)\s)\s*(\d+(?:\.\d+)?)\s*(\S+)\s*")


@dataclass(frozen=True)
class Condition:
    """One parsed condition. `value` is in seconds, bytes, steps, or a share or factor."""

    text: str
    what: str  # `step_time`, `memory` or `every`
    value: float
    unit: str


def parse(text: str) -> Condition:
    """Return a condition; ValueError that says what it may look like.

    >>> parse("step_time > 1.5x").value, parse("every 2h").value, parse("memory > 90%").value
    (1.5, 7200.0, 0.9)
    """
    match = _TEXT.fullmatch(text)
    what = (match[1] or match[2]) if match else ""
    if match is None or match[4] not in _ALLOWED[what] or not float(match[3]) or _is_never(match[3], match[4]):
        raise ValueError(
            f"cannot read the condition {text!r}: use 'step_time > 1.5x', 'step_time > 2s', 'memory > 90%', "
            "'memory > 60GiB', 'every 2h' or 'every 500 steps'"
        )
    if match[4] == "steps" and not float(match[3]).is_integer():
        raise ValueError(f"the condition {text!r} has a part of a step: use a whole number of steps")
    if match[4] == "x" and float(match[3]) <= 1:
        raise ValueError(f"the condition {text!r} is true of almost every step: use a factor above 1, such as 1.5x")
    return Condition(" ".join(text.split()), what, round(float(match[3]) * _UNITS[match[4]], 9), match[4])


def limit_of(limit: int | None, conditions: Sequence[str]) -> int:
    """Return the most windows for each condition, `DEFAULT_LIMIT` if none is given; ValueError if it cannot be."""
    if limit is not None and not conditions:
        raise ValueError(f"--limit {limit} is the most windows for each --when: add --when 'step_time > 1.5x'")
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}: it must be 1 or more")
    return DEFAULT_LIMIT if limit is None else limit


def _is_never(number: str, unit: str) -> bool:
    return unit == "%" and float(number) >= 100


@dataclass(frozen=True)
class State:
    """Where a run stands; None for what is not known."""

    now_ns: int
    step: int
    step_ns: int | None = None  # the median of the last steps
    usual_ns: int | None = None  # the median of the run before them
    memory_bytes: int | None = None
    total_bytes: int | None = None


class Watch:
    """Tells when a condition becomes true, as often as `limit`."""

    def __init__(self, condition: Condition, limit: int, state: State) -> None:
        self.condition, self.num_left = condition, limit
        self._was_true = False
        self._from = state  # where the next interval begins

    def fires(self, state: State) -> bool:
        """Return whether a window is wanted now."""
        if not self.num_left:
            return False
        is_true = self._is_true(state)
        if self.condition.what == EVERY:
            fires = is_true
            self._from = state if is_true else self._from
        else:
            fires = is_true and not self._was_true  # as long as it stays true, one window says it all
        self._was_true = is_true
        self.num_left -= fires
        return fires

    def _is_true(self, state: State) -> bool:
        what, value, unit = self.condition.what, self.condition.value, self.condition.unit
        if what == EVERY:
            passed = state.step - self._from.step if unit == "steps" else (state.now_ns - self._from.now_ns) / 1e9
            return passed >= value
        if what == STEP_TIME:
            if state.step_ns is None or (unit == "x" and not state.usual_ns):
                return False
            return state.step_ns > value * (state.usual_ns or 0 if unit == "x" else 1e9)
        if state.memory_bytes is None or (unit == "%" and not state.total_bytes):
            return False
        return state.memory_bytes > value * (state.total_bytes or 0 if unit == "%" else 1)

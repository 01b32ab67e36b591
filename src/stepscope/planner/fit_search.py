"""Finds the largest batch or longest sequence that fits, with few predictions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb

import torch

from stepscope.errors import UsageError
from stepscope.planner.prediction import FITS, GROWS, MARGIN, NOT_KNOWN, Prediction
from stepscope.sweep.tuning.largest_passing import HIGHEST, largest

MANY_VALUES = 5  # if so many values need the same memory, the knob has no effect
MOST_GUESSES = 8
FINE = 128  # a guess is good if the next one differs by at most 1/FINE
_PLAN = str(Path(__file__).parent)
_USERS_CODE = str(Path(_PLAN).parent / "workloads" / "users_code.py")
_TORCH = str(Path(torch.__file__).parent)
_LIBRARY = str(Path(contextlib.__file__).parent)


class _ChangesNothing(Exception):
    """The search would never end."""


class Search:
    """Caches predictions of one point at different values of one knob. `predict` is called once per value."""

    def __init__(self, knob: str, predict: Callable[[int], Prediction]) -> None:
        self._knob, self._predict = knob, predict
        self._seen: dict[int, Prediction | None] = {}
        self._refused: dict[int, str] = {}

    def run(self, start: int) -> tuple[int | None, str | None]:
        """Return the largest value that fits (0 if 1 does not), and what limits it if it is not memory."""
        first = self._look(start)
        if first is None or first.usable_bytes is None:
            return None, self._refused.get(start, "a CPU has no fixed memory limit")
        if first.fits == GROWS:
            return None, "memory grows with every step, so no value fits for long"
        if first.fits == NOT_KNOWN:
            return None, "an optimizer never stepped, so the size of its state is unknown"
        try:
            guess = self._guess(start, int(first.usable_bytes * (1 - MARGIN)))
            value = largest(self._fits, guess or start, guess and max(1, guess // FINE))
        except _ChangesNothing:
            return None, f"{self._knob} does not change the memory of a step"
        if value >= HIGHEST:
            return value, "no larger value was tried"
        lowest = min(tried for tried in self._seen if tried > value)
        why = self._refused.get(lowest)
        return value, None if why is None else f"{self._knob}={lowest} cannot be planned: {why}"

    def _fits(self, value: int) -> bool:
        found = self._look(value)
        return found is not None and found.fits == FITS

    def _look(self, value: int) -> Prediction | None:
        if value not in self._seen:
            try:
                self._seen[value] = self._predict(value)
            except UsageError as error:
                if not _is_programs_own(error):
                    raise UsageError(f"{self._knob}={value}: {error}") from error
                self._seen[value], self._refused[value] = None, str(error)
            needs = [(found.flops, found.live_at_peak) for found in self._seen.values() if found is not None]
            if len(needs) == MANY_VALUES and all(need == needs[0] for need in needs):
                raise _ChangesNothing
        return self._seen[value]

    def _guess(self, start: int, room_bytes: int) -> int | None:
        """Return about where allocated memory fills the room, from parabolas through the last three values.

        Attention's memory grows with the square of the length. What fits is somewhat less. None if unknown.
        """
        points: list[tuple[int, int]] = []
        value = start
        for _ in range(MOST_GUESSES):
            found = self._look(value)
            if found is None:
                return None
            points = [*points[-2:], (value, found.peak_allocated_bytes)]
            reached = _crossing(points, room_bytes) if len(points) == 3 else None
            if reached is None:
                reached = 2 * value if found.fits == FITS else value // 2
            last, value = value, min(max(1, reached), HIGHEST)
            if abs(value - last) <= last // FINE:
                return value
        return None


def _is_programs_own(error: UsageError) -> bool:
    """Return whether the program or one of its ops rejects a size, and not the planner.

    By then the program's exception has been summarized in one line, and is the context of this one.
    """
    trace = (error.__context__ or error).__traceback__
    files = [frame.f_code.co_filename for frame, _ in walk_tb(trace)]
    theirs = [file for file in files if not file.startswith((_PLAN, _USERS_CODE, _TORCH))]
    is_theirs = any("site-packages" in file or not file.startswith(_LIBRARY) for file in theirs)
    return is_theirs and not files[-1].startswith(_PLAN)


def _crossing(points: list[tuple[int, int]], wanted: int) -> int | None:
    """Return where the parabola through three points reaches a height, or None if it does not rise there."""
    (x0, y0), (x1, y1), (x2, y2) = points
    if len({x0, x1, x2}) < 3:
        return None
    last, before = (y2 - y1) / (x2 - x1), (y1 - y0) / (x1 - x0)
    bend = (last - before) / (x2 - x0)
    slope = last + bend * (x2 - x1)
    inside = slope * slope + 4 * bend * (wanted - y2)
    if slope <= 0 or inside < 0:
        return None
    return x2 + int(2 * (wanted - y2) / (slope + math.sqrt(inside)))

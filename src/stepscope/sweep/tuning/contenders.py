"""Chooses the points that are measured again at the end of tuning."""

from __future__ import annotations

from stepscope.sweep.grid import Point
from stepscope.sweep.protocol import OK
from stepscope.sweep.tuning.trials import Trials, memory_bytes, steady_ns

MOST_CONTENDERS = 8
FEWEST = 3
"""Always measured, even without time left: the defaults, the best, the next best."""


def candidates(trials: Trials, base: Point, best: Point) -> list[Point]:
    """Return the defaults, the best, the fastest other point, and the frontier of speed and memory."""
    rows = {name: row for name, point in trials.points.items() if (row := trials.seen(point)) and row["status"] == OK}
    ordered = sorted(rows, key=lambda name: steady_ns(rows[name]))
    chosen = [point.hash for point in (base, best) if point.hash in rows]
    chosen += [name for name in ordered if name not in chosen][:1]
    smallest = float("inf")
    for name in ordered:
        peak = memory_bytes(rows[name])
        if peak is not None and peak < smallest:
            smallest = peak
            chosen.append(name)
    return [trials.points[name] for name in dict.fromkeys(chosen)][:MOST_CONTENDERS]


def affordable(trials: Trials, base: Point, best: Point) -> list[Point]:
    """Return the candidates that fit in the remaining time, and the first few in any case."""
    chosen = candidates(trials, base, best)
    while len(chosen) > FEWEST and trials.turns_s(chosen) > trials.clock.left_s:
        chosen.pop()
    return chosen

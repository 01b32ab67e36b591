"""Nanoseconds as ticks that fit into 32 bits."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

_MOST_TICKS = (1 << 32) - 1


@dataclass(frozen=True)
class Clock:
    """Converts nanoseconds to ticks of one nanosecond, or longer ones if the whole has more than 2³² of them."""

    origin_ns: int
    tick_ns: float
    total: int

    @classmethod
    def of(cls, start_ns: int, end_ns: int) -> Clock:
        """Return the clock of a window."""
        length = max(1, end_ns - start_ns)
        tick_ns = 1.0 if length <= _MOST_TICKS else length / _MOST_TICKS
        return cls(start_ns, tick_ns, min(_MOST_TICKS, length))

    def ticks(self, time: pl.Expr) -> pl.Expr:
        """Return a time in ticks since the start of the window."""
        since = time - self.origin_ns
        exact = since if self.tick_ns == 1.0 else (since / self.tick_ns).floor()
        return exact.cast(pl.Int64).clip(0, self.total)

"""Numbers of at most 32 bits: columns as bytes that a few lines of JavaScript decode, and times as ticks.

If neighbors in a column are similar, it is stored as differences modulo 2³², with the sign in the lowest bit. The
lowest bytes of all numbers come first, then the next ones, up to the highest that is not zero everywhere, which
compresses well.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import polars as pl

_MODULUS = 1 << 32


class Bytes:
    """Columns one after the other."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, numbers: pl.Series, delta: bool = False) -> dict[str, Any]:
        """Append a column and return what a reader needs: `at`, `num`, `planes`, `delta`."""
        plain = numbers.cast(pl.Int64)
        if delta:
            change = plain.diff().fill_null(plain.head(1)) if len(plain) else plain
            signed = (change + _MODULUS // 2) % _MODULUS - _MODULUS // 2
            plain = pl.select(pl.when(signed < 0).then(-2 * signed - 1).otherwise(2 * signed)).to_series()
        planes = max(1, -(-int(plain.max() or 0).bit_length() // 8))
        place = {"at": len(self._data), "num": len(plain), "planes": planes, "delta": delta}
        words = struct.pack(f"<{len(plain)}I", *plain.to_list())
        for plane in range(planes):
            self._data += words[plane::4]
        return place

    def add_text(self, text: str) -> dict[str, int]:
        """Append text as UTF-8 and return `at` and `bytes`."""
        data, at = text.encode("utf-8", "replace"), len(self._data)
        self._data += data
        return {"at": at, "bytes": len(data)}

    def joined(self) -> bytes:
        return bytes(self._data)


@dataclass(frozen=True)
class Clock:
    """Converts nanoseconds to ticks of one nanosecond, or longer ones if the whole has more than 2³² of them."""

    origin_ns: int
    tick_ns: float
    total: int

    @classmethod
    def of(cls, start_ns: int, end_ns: int) -> Clock:
        length, most = max(1, end_ns - start_ns), _MODULUS - 1
        return cls(start_ns, max(1.0, length / most), min(most, length))

    def ticks(self, time: str) -> pl.Expr:
        """Return a column of times in ticks since the start of the window."""
        since = pl.col(time) - self.origin_ns
        exact = since if self.tick_ns == 1.0 else (since / self.tick_ns).floor()
        return exact.cast(pl.Int64).clip(0, self.total)

    def placed(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return events with their `start` and `end` in ticks."""
        return frame.with_columns(start=self.ticks("start_ns"), end=self.ticks("end_ns"))

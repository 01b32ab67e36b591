"""Columns as bytes that compress well and that a few lines of JavaScript decode.

A column has unsigned numbers of up to 32 bits. If neighbors are similar, it is stored as differences modulo 2³², with
the sign in the lowest bit. The lowest bytes of all numbers come first, then the next ones, up to the highest that is
not zero everywhere.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

import polars as pl

_MODULUS = 1 << 32
_MOST_PLANES = 4


class Bytes:
    """Columns one after the other."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._length = 0

    def add(self, numbers: pl.Series, delta: bool = False) -> dict[str, Any]:
        """Append a column and return what a reader needs: `at`, `num`, `planes`, `delta`."""
        plain = numbers.cast(pl.Int64)
        if delta:
            change = plain.diff().fill_null(plain.head(1)) if len(plain) else plain
            signed = (change + _MODULUS // 2) % _MODULUS - _MODULUS // 2
            plain = pl.select(pl.when(signed < 0).then(-2 * signed - 1).otherwise(2 * signed)).to_series()
        data = _words(plain.to_list())
        highest = int(plain.max() or 0)
        planes = max(1, min(_MOST_PLANES, -(-highest.bit_length() // 8)))
        place = {"at": self._length, "num": len(plain), "planes": planes, "delta": delta}
        self._append(b"".join(data[plane::4] for plane in range(planes)))
        return place

    def add_text(self, text: str) -> dict[str, int]:
        """Append text as UTF-8 and return `at` and `bytes`."""
        data = text.encode("utf-8", "replace")
        place = {"at": self._length, "bytes": len(data)}
        self._append(data)
        return place

    def joined(self) -> bytes:
        """Return everything that was appended."""
        return b"".join(self._pieces)

    def _append(self, data: bytes) -> None:
        self._pieces.append(data)
        self._length += len(data)


def _words(numbers: list[int]) -> bytes:
    """Return numbers as little-endian words of 32 bits."""
    code = "I" if array("I").itemsize == 4 else "L"
    words = array(code, numbers)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()

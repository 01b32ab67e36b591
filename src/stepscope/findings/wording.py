"""Figures in sentences."""

from __future__ import annotations


def milliseconds(ns: float) -> str:
    """A time as people read it.

    >>> milliseconds(12_345_678.0), milliseconds(45_600.0)
    ('12.3 ms', '46 µs')
    """
    ms = ns / 1e6
    if ms >= 100:
        return f"{ms:.0f} ms"
    if ms >= 0.1:
        return f"{ms:.3g} ms"
    return f"{ns / 1e3:.0f} µs"


def gibibytes(num_bytes: float) -> str:
    """An amount of memory as people read it.

    >>> gibibytes(3 * 2**30), gibibytes(5_000_000), gibibytes(4)
    ('3.00 GiB', '4.8 MiB', '4 bytes')
    """
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    if num_bytes >= 2**20 / 10:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**10:.1f} KiB" if num_bytes >= 2**10 else f"{num_bytes:.0f} bytes"


def several(count: float, what: str) -> str:
    """A number of things.

    >>> several(1, "kernel"), several(1204, "kernel"), several(4, "stretch")
    ('1 kernel', '1,204 kernels', '4 stretches')
    """
    number = f"{count:,.0f}"
    ending = "" if number == "1" else "es" if what.endswith("ch") else "s"
    return f"{number} {what}{ending}"

"""Figures as text by the unit at the end of their name, and the scale of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from stepscope.formatting import average, duration, flops, percent, safe, significant, size


def title_of(name: str) -> str:
    """A column's name for people, without its unit.

    >>> title_of("num_calls"), title_of("device_total_ns"), title_of("flops_per_s"), title_of("peak_bytes")
    ('calls', 'device total', 'FLOP/s', 'peak')
    >>> title_of("bus_bandwidth_bytes_per_s"), title_of("power_watts")
    ('bus bandwidth', 'power')
    """
    if name in _WHOLE:
        return _WHOLE[name]
    if name.endswith("bandwidth_bytes_per_s"):
        name = name.removesuffix("_bytes_per_s")
    for suffix in ("_ns", "_bytes", *_SMALL_UNITS):
        name = name.removesuffix(suffix)
    return name.removeprefix("num_").replace("_", " ")


def heading(title: str) -> str:
    """A title as it stands above something: it begins with a capital letter."""
    return title[:1].upper() + title[1:]


def cell(name: str, value: Any) -> str:
    """A value of a column for people.

    >>> cell("total_ns", 18_760_880), cell("share", 0.123), cell("peak_bytes", 512), cell("num_calls", 80)
    ('18.8 ms', '12.3 %', '512 B', '80')
    >>> cell("power_watts", 575.83), cell("sm_clock_mhz", 1980)
    ('576 W', '1,980 MHz')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return safe(value, 1000)
    if name.endswith("_ns"):
        return duration(value, 3)
    if name.endswith("bytes_per_s"):
        return f"{significant(value / 1e9)} GB/s"
    if name.endswith("flops_per_s"):
        return flops(value, "/s")
    if name.endswith("bytes"):
        return size(value)
    if name.endswith("share"):
        return percent(value)
    if name.endswith("flops"):
        return flops(value)
    for suffix, (unit, digits) in _SMALL_UNITS.items():
        if name.endswith(suffix):
            return f"{significant(value, digits)} {unit}"
    if name.startswith("num_"):
        return average(value)
    return f"{value:,}" if isinstance(value, int) else significant(value)


def is_numeric(values: Sequence[Any]) -> bool:
    """Whether a column is one of figures: all that is known of it are numbers.

    >>> is_numeric([1, None, 2.5]), is_numeric([1, "a"]), is_numeric([True]), is_numeric([None])
    (True, False, False, False)
    """
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known)


class Scale(NamedTuple):
    """How the figures of an axis are written: divided by `divisor`, under `unit`."""

    divisor: float
    unit: str


def scale(name: str, largest: float) -> Scale:
    """The unit in which the largest figure of an axis is easy to read.

    >>> scale("total_ns", 3.2e6), scale("peak_bytes", 5 << 30), scale("busy_share", 0.4), scale("num_calls", 9)
    (Scale(divisor=1000000.0, unit='ms'), Scale(divisor=1073741824, unit='GiB'), Scale(divisor=0.01, unit='%'), \
Scale(divisor=1.0, unit=''))
    """
    for suffix, steps in _SCALES.items():
        if name.endswith(suffix):
            return next((step for step in steps if abs(largest) >= step.divisor), steps[-1])
    return Scale(1.0, "")


_SMALL_UNITS = {"_watts": ("W", 3), "_mhz": ("MHz", 4), "_joules": ("J", 4)}
"""Of figures that are always of one size: the unit, and the digits that mean something."""
_WHOLE = {
    "flops_per_s": "FLOP/s", "flops_per_byte": "FLOPs a byte", "bytes_per_s": "bandwidth", "flops": "FLOP",
    "bytes": "size", "share": "share", "tokens_per_s": "tokens/s", "mfu_share": "MFU",
    "peak_flops_per_s": "peak FLOP/s",
}  # fmt: skip
_SCALES = {
    "_ns": [Scale(1e9, "s"), Scale(1e6, "ms"), Scale(1e3, "µs"), Scale(1.0, "ns")],
    "bytes_per_s": [Scale(1e12, "TB/s"), Scale(1e9, "GB/s"), Scale(1e6, "MB/s"), Scale(1.0, "B/s")],
    "flops_per_s": [Scale(1e12, "TFLOP/s"), Scale(1e9, "GFLOP/s"), Scale(1e6, "MFLOP/s"), Scale(1.0, "FLOP/s")],
    "bytes": [Scale(1 << 30, "GiB"), Scale(1 << 20, "MiB"), Scale(1 << 10, "KiB"), Scale(1.0, "B")],
    "share": [Scale(0.01, "%")],
    "flops": [Scale(1e12, "TFLOP"), Scale(1e9, "GFLOP"), Scale(1e6, "MFLOP"), Scale(1.0, "FLOP")],
    "watts": [Scale(1.0, "W")],
    "mhz": [Scale(1.0, "MHz")],
    "joules": [Scale(1.0, "J")],
    "tokens_per_s": [Scale(1e6, "M tokens/s"), Scale(1e3, "k tokens/s"), Scale(1.0, "tokens/s")],
}
"""By the end of a name; the first that fits, so longer ends come first."""

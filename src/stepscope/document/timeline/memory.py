"""Memory over time for the timeline: one curve per device, thinned without losing extremes."""

from dataclasses import dataclass

import polars as pl

from stepscope.analysis.memory.allocator_events import DEVICE_TYPES, memory_devices, memory_timeline
from stepscope.analysis.structure.links import Linked
from stepscope.document.timeline.bytes import Clock

MOST_POINTS = 16_000  # points of all curves together
_MOST_CURVES = 8
_LEAST_BYTES = 1 << 20
"""A second curve needs at least this: a host that only feeds its GPU has no curve worth drawing."""
_MOST_UNITS = (1 << 32) - 1


@dataclass(frozen=True)
class Curve:
    title: str
    points: pl.DataFrame  # `time` in ticks, `allocated` and `reserved` in units of `unit_bytes`
    unit_bytes: int  # 1, or the smallest power of two with which all values fit into 32 bits
    has_reserved: bool
    num_all: int  # points before thinning


def memory_curves(linked: Linked, clock: Clock) -> list[Curve]:
    """Return the curves of all devices, those of GPUs first."""
    devices = sorted(memory_devices(linked), key=lambda device: (device[0] == 0, device))[:_MOST_CURVES]
    curves: list[Curve] = []
    for number, index in devices:
        name = DEVICE_TYPES.get(number, str(number))
        most = MOST_POINTS // (4 if number == 0 else max(1, sum(other != 0 for other, _ in devices)))
        points = memory_timeline(linked, name, index, most)
        highest = max(int(points[column].max() or 0) for column in ("allocated_bytes", "reserved_bytes"))  # type: ignore[arg-type]
        if curves and highest < _LEAST_BYTES:
            continue
        unit = 1
        while highest // unit > _MOST_UNITS:
            unit *= 2
        sizes = pl.col("allocated_bytes", "reserved_bytes").fill_null(0).clip(0) // unit
        title = "Memory of the host" if number == 0 else f"Memory of {name}:{index}"
        ticks = points.select(sizes.name.replace("_bytes$", ""), time=clock.ticks("time_ns"))
        is_own = (pl.col("device_type") == number) & (pl.col("device") == index).fill_null(True)
        has_reserved = points["reserved_bytes"].null_count() < points.height
        curves.append(Curve(title, ticks, unit, has_reserved, linked.memory.filter(is_own).height))
    return curves

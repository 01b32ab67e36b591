"""The section `timeline`: what a page needs to draw a trace at any zoom, in a few hundred kilobytes.

Numbers have at most 32 bits, and times are ticks. If neighbors in a column are similar, it is stored as differences
modulo 2³², with the sign in the lowest bit. The lowest bytes of all numbers come first, then the next ones, up to the
highest that is not zero everywhere, which compresses well.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from stepscope.analysis.memory.allocator_events import DEVICE_TYPES, memory_devices, memory_timeline
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.time.replay import typical_steps
from stepscope.document.model import Timeline
from stepscope.document.timeline.colors import colors
from stepscope.document.timeline.details import KINDS, TEXTS, details, strings
from stepscope.document.timeline.levels import Kept, keep, levels
from stepscope.document.timeline.tracks import TABLES, Lanes, lanes_of
from stepscope.formatting import duration, listed, plural
from stepscope.session import Session

_MODULUS = 1 << 32


class Bytes:
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
        return frame.with_columns(start=self.ticks("start_ns"), end=self.ticks("end_ns"))


MOST_POINTS = 16_000  # points of all curves together
_MOST_CURVES = 8
_LEAST_BYTES = 1 << 20
"""A second curve needs at least this: a host that only feeds its GPU has no curve worth drawing."""


@dataclass(frozen=True)
class Curve:
    """Memory over time."""

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
        unit = 1 << max(0, highest.bit_length() - 32)
        sizes = pl.col("allocated_bytes", "reserved_bytes").fill_null(0).clip(0) // unit
        title = "Memory of the host" if number == 0 else f"Memory of {name}:{index}"
        ticks = points.select(sizes.name.replace("_bytes$", ""), time=clock.ticks("time_ns"))
        is_own = (pl.col("device_type") == number) & (pl.col("device") == index).fill_null(True)
        has_reserved = points["reserved_bytes"].null_count() < points.height
        curves.append(Curve(title, ticks, unit, has_reserved, linked.memory.filter(is_own).height))
    return curves


MOST_EVENTS = 150_000  # events drawn one by one
MOST_BLOCKS = 30_000  # blocks on a level
MOST_BYTES = 1_500_000  # size of the compressed blob: 2 MB as base64
_FAR, _MINUTE_NS = 1000, 60 * 10**9
_LENGTH = pl.col("end") - pl.col("start")
_DELTAS = ("start", "end", "launch", "time", "allocated", "reserved")  # columns whose neighbors are similar


def parts(session: Session) -> tuple[Timeline]:
    return (timeline_of(session.linked),)


def timeline_of(linked: Linked, most_events: int = MOST_EVENTS, most_bytes: int = MOST_BYTES) -> Timeline:
    """Return the timeline of a rank's trace, with a blob of at most `most_bytes` if enough can be left out.

    Every moment that a lane is busy is on every level of detail exactly once: as an event or in a block.
    """
    lanes = lanes_of(linked)
    start_ns, end_ns = _window(lanes.events)
    clock = Clock.of(start_ns, end_ns)
    events = clock.placed(lanes.events.filter(pl.col("start_ns") >= start_ns, pl.col("end_ns") <= end_ns))
    curves = memory_curves(linked, clock)
    typical = typical_steps(linked)
    in_step = _in_step(events, linked, typical)
    while True:
        kept = keep(events, typical, in_step, most_events)
        found = levels(events, kept.is_kept, clock.total, max(1000, min(MOST_BLOCKS, most_events)))
        drawn = events.filter(kept.is_kept).sort("lane", "start", "end").with_row_index("at")
        described = details(linked, drawn, lanes.runs)
        texts, labels, codes = strings(described)
        columns = drawn.with_columns(described["kind"], described["launch"], *codes.get_columns(), length=_LENGTH)
        data = Bytes()
        meta = {
            "version": 1,
            "origin_ns": str(clock.origin_ns),  # more digits than a number of JavaScript has
            "tick_ns": clock.tick_ns,
            "total": clock.total,
            "num_events": lanes.events.height + lanes.num_left_out,
            "num_drawn": drawn.height,
            "note": _note(linked, lanes, kept, events.height, curves, clock.tick_ns),
            "tracks": [asdict(track) for track in lanes.tracks],
            "num_lanes": lanes.num,
            "kinds": list(KINDS),
            "colors": colors(),
            "used_colors": sorted(events["color"].unique().to_list()),
            "events": {
                **_packed(data, columns, ("start", "length", "color", "kind", "launch", *TEXTS)),
                "lanes": _offsets(data, drawn["lane"], lanes.num),
            },
            "levels": [_level(data, width, blocks, lanes.num) for width, blocks in found],
            "memory": [
                {"title": curve.title, "detail": "allocated", "unit_bytes": curve.unit_bytes, "reserved": None}
                | _packed(data, curve.points, ("time", "allocated", *(["reserved"] if curve.has_reserved else [])))
                for curve in curves
            ],
            "steps": _packed(data, clock.placed(linked.steps.table), ("start", "end")),
            "strings": data.add_text(json.dumps(texts, ensure_ascii=False)),
            "labels": data.add_text(json.dumps(labels, ensure_ascii=False)),
        }
        blob = gzip.compress(data.joined(), 6, mtime=0)
        if len(blob) <= most_bytes or most_events < 1000:
            return Timeline(meta, blob, page_only=True)
        most_events = int(min(most_events, drawn.height) * min(0.8, most_bytes / len(blob)))


def _window(events: pl.DataFrame) -> tuple[int, int]:
    """Return the first start and the last end, without events that are far away from almost all others."""
    if events.is_empty():
        return 0, 1
    low = int(events["start_ns"].quantile(0.05, "nearest"))  # type: ignore[arg-type]  # numbers
    high = int(events["start_ns"].quantile(0.95, "nearest"))  # type: ignore[arg-type]  # numbers
    reach = max(_FAR * (high - low), _MINUTE_NS)
    near = events.filter(pl.col("start_ns") >= low - reach, pl.col("end_ns") <= high + reach)
    near = near if near.height else events
    return int(near["start_ns"].min()), int(near["end_ns"].max())  # type: ignore[arg-type]  # numbers


def _in_step(events: pl.DataFrame, linked: Linked, typical: pl.DataFrame) -> pl.Series:
    """Return the typical step of each event: of GPU work that of its launch, else the one it starts in."""
    place = typical["start_ns"].search_sorted(events["start_ns"], side="right").cast(pl.Int64) - 1
    place = place.set(place < 0, None).cast(pl.UInt32)
    by_time = typical["step"].gather(place)
    is_over = (events["start_ns"] >= typical["end_ns"].gather(place)).fill_null(True)
    by_time = by_time.set(is_over, None)
    is_work = events["table"] == TABLES.index("gpu")
    row = events["place"].set(~is_work, None)
    step: pl.Series = linked.device["step"].gather(row).zip_with(is_work, by_time)
    return step


def _packed(data: Bytes, frame: pl.DataFrame, names: Iterable[str]) -> dict[str, Any]:
    return {name: data.add(frame[name], delta=name in _DELTAS) for name in names}


def _offsets(data: Bytes, lane: pl.Series, num_lanes: int) -> dict[str, Any]:
    """Add where each lane begins in an ordered column, and where the last one ends."""
    every = pl.int_range(num_lanes + 1, dtype=pl.UInt32, eager=True)
    return data.add(lane.search_sorted(every, side="left"), delta=True)


def _level(data: Bytes, width: int, blocks: pl.DataFrame, num_lanes: int) -> dict[str, Any]:
    lanes, names = _offsets(data, blocks["lane"], num_lanes), ("start", "length", "busy", "num", "color")
    return {"width": width, "lanes": lanes, **_packed(data, blocks.with_columns(length=_LENGTH), names)}


def _note(linked: Linked, lanes: Lanes, kept: Kept, num_near: int, curves: list[Curve], tick_ns: float) -> str:
    num_all, num_drawn = lanes.events.height, int(kept.is_kept.sum())
    if num_all == 0:
        return "The trace has no events to draw."
    sentences = [f"{num_drawn:,} of {plural(num_all, 'event')} drawn individually"]
    if num_drawn < num_near:
        which = [f"all of {'steps' if len(kept.steps) > 1 else 'step'} {listed(kept.steps)}"] if kept.steps else []
        if kept.least_ns is not None:
            which.append(f"elsewhere those of at least {duration(kept.least_ns, 3)} and the launches of such kernels")
        sentences[0] += f": {'; '.join(which)}. The rest is shaded"
    if lanes.left_out:
        sentences.append(f"Not shown: {'; '.join(lanes.left_out)}")
    if num_far := num_all - num_near:
        far = plural(num_far, "event not drawn because it is", "events not drawn because they are")
        sentences.append(f"{far} far away from all others in time")
    if thinned := [(curve.points.height, curve.num_all) for curve in curves if curve.points.height < curve.num_all]:
        num_shown, num_changes = map(sum, zip(*thinned))
        sentences.append(f"Memory shows {num_shown:,} of {num_changes:,} changes, with the extremes of every stretch")
    if tick_ns > 1:
        sentences.append(f"Times are rounded to {duration(tick_ns, 2)}")
    if linked.trace.facts.is_cut_off:
        sentences.append("The trace file is cut off, so later events are missing")
    return ". ".join(sentences) + "."

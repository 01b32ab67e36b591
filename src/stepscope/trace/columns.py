"""Events as columns: the tables of `tables.py`, filled slice by slice.

A slice is decoded and split into lists of numbers while it is still in the CPU cache. Columns are made from the lists
once, at the end.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, count
from operator import attrgetter
from typing import Any

import polars as pl
from msgspec import Raw

from stepscope.trace.events import Event
from stepscope.trace.tables import CATEGORIES, COLLECTIVES, HOST, MEMORY, TABLES, THREADS, Table
from stepscope.trace.values import categories, floats, id_text, integers, json_texts, names, texts, times

LONGEST_NS = 2**53  # longer events (104 days) come from a broken clock
LATEST_NS = 2**62  # so do events that start later than this, or as long before zero: their end must fit into a column

_EDGE = tuple(column for column in HOST.columns if column.name in ("event", "kind", "name", "thread", "start_ns"))
BEGINS = Table("begins", "Begin events, until `assemble.py` has paired them with ends.", _EDGE)
ENDS = Table("ends", "End events.", _EDGE)

# Arguments that each kind of event has; the table's other columns are null.
_ID = ("external_id", "old_external_id")
_OP = (*_ID, "record_function", "sequence", "forward_thread", "shapes", "dtypes", "strides", "inputs", "stack")
_GPU = (*_ID, "correlation", "device", "stream", "graph", "graph_node")
CARRIED: dict[tuple[str, str], tuple[str, ...]] = {
    ("host", "op"): _OP,
    ("host", "annotation"): _OP,
    ("host", "runtime"): (*_ID, "correlation"),
    ("host", "driver"): (*_ID, "correlation"),
    ("host", "python"): (),
    ("host", "overhead"): (),
    ("host", "other"): (),
    ("device", "kernel"): (
        *_GPU, "grid", "block", "registers_per_thread", "shared_memory_bytes", "occupancy_percent",
    ),
    ("device", "memcpy"): (*_GPU, "bytes"),
    ("device", "memset"): (*_GPU, "bytes"),
    ("device_ranges", ""): (*_ID, "device", "stream"),
    ("syncs", ""): (*_ID, "correlation", "device", "stream", "wait_on_stream", "wait_on_correlation"),
    ("memory", ""): (
        "device_type", "memory_device", "address", "memory_bytes", "allocated_bytes", "reserved_bytes",
    ),
    ("collectives", ""): tuple(name for name in COLLECTIVES.schema if name != "event"),
}  # fmt: skip
_TABLES = {table.name: table for table in (*TABLES, BEGINS, ENDS)}
COLUMN = {"memory_bytes": "bytes", "memory_device": "device"}  # arguments whose column has another name
_LABELS = ("process_name", "process_labels", "thread_name")


class Numbers(dict[Any, int]):
    """A number for each distinct key, in order of appearance."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class _Threads(dict[tuple[Any, Any], int]):
    def __init__(self) -> None:
        self.numbers = Numbers()

    def __missing__(self, key: tuple[Any, Any]) -> int:
        # Some profilers write a thread as 25738 in one event and "25738" in the next.
        number = self[key] = self.numbers[id_text(key[0]), id_text(key[1])]
        return number


Counts = Counter[tuple[str, str, str | None]]
Thread = tuple[str | None, str | None]
Label = tuple[str | None, str | None, str, str]


@dataclass
class Columns:
    """The events of a slice as columns."""

    frames: dict[str, pl.DataFrame]
    num_events: int
    counts: Counts  # events by phase letter, category and table
    threads: list[Thread]  # process and thread of each number in the `thread` columns
    labels: list[Label]  # metadata events: process, thread, `process_name`…, text


class Builder:
    """Collects events; `finish` returns them as columns."""

    def __init__(self) -> None:
        self.num_events = 0
        self._pieces: dict[tuple[str, str], _Piece] = {}
        self._counts: Counts = Counter()
        self._threads = _Threads()
        self._labels: list[Label] = []
        self._without_phase: list[int] = []

    def add(self, events: list[Event], positions: Iterable[int] | None = None) -> None:
        """Add events: the next ones, or those at the given positions of the slice."""
        buckets: dict[tuple[str, str | None], tuple[list[int], list[Event]]] = defaultdict(lambda: ([], []))
        for position, event in zip(count(self.num_events) if positions is None else positions, events):
            bucket = buckets[event.ph, event.cat]
            bucket[0].append(position)
            bucket[1].append(event)
        if positions is None:
            self.num_events += len(events)
        for (letter, category), (places, members) in buckets.items():
            self._add_alike(letter, category or "", places, members)

    def _add_alike(self, letter: str, category: str, positions: list[int], events: list[Event]) -> None:
        table, kind = CATEGORIES.get(category.lower(), (HOST.name, "other"))
        kept: str | None = None
        num_kept = len(events)
        if letter == "X":
            kept = table
            self._add((table, kind), positions, events)
            collectives = [event.args.collective for event in events]
            if collectives.count(None) < len(collectives):
                self._choose((COLLECTIVES.name, ""), positions, events, [c is not None for c in collectives])
        elif letter in ("B", "E"):
            kept = HOST.name
            edges = BEGINS if letter == "B" else ENDS
            self._add((edges.name, kind if table == HOST.name else "other"), positions, events)
        elif letter in ("i", "I"):
            kept = MEMORY.name
            num_kept = self._choose((kept, ""), positions, events, [event.name == "[memory]" for event in events])
        elif letter == "M":
            kept = THREADS.name
            labels = list(_labels(events))
            num_kept = len(labels)
            self._labels += labels
        elif not letter:
            self._without_phase += positions
        self._counts[letter, category, kept] += num_kept
        self._counts[letter, category, None] += len(events) - num_kept

    def _add(self, place: tuple[str, str], positions: list[int], events: list[Event]) -> None:
        if place not in self._pieces:
            self._pieces[place] = _Piece(*place, self._threads)
        self._pieces[place].add(positions, events)

    def _choose(
        self, place: tuple[str, str], positions: list[int], events: list[Event], is_chosen: list[bool]
    ) -> int:
        num_chosen = sum(is_chosen)
        if num_chosen:
            self._add(place, list(compress(positions, is_chosen)), list(compress(events, is_chosen)))
        return num_chosen

    def finish(self) -> tuple[Columns, dict[str, list[int]]]:
        """Return everything collected as columns, and by problem the positions of events that fit no table."""
        bad = {"no phase": self._without_phase} if self._without_phase else {}
        whole = {name: _in_order(parts, bad) for name, parts in self._frames(bad).items()}
        return Columns(whole, self.num_events, +self._counts, list(self._threads.numbers), self._labels), bad

    def _frames(self, bad: dict[str, list[int]]) -> dict[str, list[pl.DataFrame]]:
        frames: dict[str, list[pl.DataFrame]] = {}
        for (table, _), piece in self._pieces.items():
            frames.setdefault(table, []).append(piece.frame(bad))
        return frames


class _Piece:
    """The lists of one kind of event in one table."""

    def __init__(self, table: str, kind: str, threads: _Threads) -> None:
        self.schema = _TABLES[table].schema
        self.kind = kind
        self.carried = CARRIED.get((table, kind), ())
        self._get = attrgetter(*self.carried) if len(self.carried) > 1 else None
        self._threads = threads
        self._names = Numbers()
        self._positions: list[int] = []
        self._name: list[int] = []
        self._thread: list[int] = []
        self._start: list[bytes] = []
        self._duration: list[bytes] = []
        self._values: list[list[Any]] = [[] for _ in self.carried]
        self._texts: dict[str, Numbers] = {}

    def add(self, positions: list[int], events: list[Event]) -> None:
        self._positions += positions
        if "name" in self.schema:
            self._name += map(self._names.__getitem__, [e.name for e in events])
        if "thread" in self.schema:
            self._thread += map(self._threads.__getitem__, [(e.pid, e.tid) for e in events])
        if "start_ns" in self.schema or "time_ns" in self.schema:
            self._start.append(_join([e.ts for e in events]))
        if "duration_ns" in self.schema:
            self._duration.append(_join([e.dur for e in events]))
        if self._get is not None:
            lists = zip(*map(self._get, [e.args for e in events]))
            for name, column, values in zip(self.carried, self._values, lists):
                if isinstance(values[0], Raw):
                    numbers = self._texts.setdefault(name, Numbers())
                    column += map(numbers.__getitem__, _split(values))
                else:
                    column += values
        if "device" in self.carried:
            # Old traces have device and stream only in place of process and thread.
            device, stream = (self._values[self.carried.index(name)] for name in ("device", "stream"))
            first = len(device) - len(events)
            if None in device[first:] or None in stream[first:]:
                device[first:] = [e.pid if v is None else v for v, e in zip(device[first:], events)]
                threads = [e.tid.removeprefix("stream ") if isinstance(e.tid, str) else e.tid for e in events]
                stream[first:] = [thread if v is None else v for v, thread in zip(stream[first:], threads)]

    def frame(self, bad: dict[str, list[int]]) -> pl.DataFrame:
        """Return the columns present; events with invalid times go to `bad`."""
        columns = {"event": pl.Series(self._positions, dtype=pl.UInt32)}
        if self._name:
            columns["name"] = _gather(names(self._names), self._name)
        if self._thread:
            columns["thread"] = pl.Series(self._thread, dtype=pl.UInt32)
        if self._start:
            columns["start_ns" if "start_ns" in self.schema else "time_ns"] = times(b",".join(self._start))
        if self._duration:
            columns["duration_ns"] = _durations(b",".join(self._duration))
        if self.kind:
            columns["kind"] = pl.repeat(self.kind, len(self._positions), dtype=self.schema["kind"], eager=True)
        for name, values in zip(self.carried, self._values):
            if name in self._texts:
                columns[name] = _gather(json_texts(self._texts[name]), values)
            elif values.count(None) < len(values):
                columns[COLUMN.get(name, name)] = self._column(COLUMN.get(name, name), values)
        if "old_external_id" in columns:
            old = columns.pop("old_external_id")
            new = columns.get("external_id", old)
            columns["external_id"] = new.zip_with(new.is_not_null(), old)
        return with_sound_times(pl.DataFrame(columns), bad)

    def _column(self, name: str, values: list[Any]) -> pl.Series:
        dtype = self.schema.get(name, pl.Int64())
        if dtype == pl.Categorical:
            return texts(values)
        if dtype == pl.Float64:
            return floats(values)
        whole: pl.Series = integers(values).cast(dtype, strict=False)
        return whole


def _gather(different: list[str | None], codes: list[int]) -> pl.Series:
    return categories(different).gather(pl.Series(codes, dtype=pl.UInt32))


def _split(values: Sequence[Raw]) -> list[bytes]:
    parts = b"\0".join(values).split(b"\0")
    # JSON text cannot contain NUL; lists that do are converted piece by piece.
    return parts if len(parts) == len(values) else [bytes(value) for value in values]


def _join(values: list[Raw]) -> bytes:
    joined = b",".join(values)
    if joined.count(b",") < len(values):
        return joined
    return b",".join([b"?" if b"," in bytes(value) else value for value in values])  # a list is not a time


def _durations(joined: bytes) -> pl.Series:
    """Return durations; an event without one has zero and keeps its place."""
    durations = times(joined)
    if durations.null_count():
        durations = durations.set(pl.Series([part in (b"", b"null") for part in joined.split(b",")]), 0)
    return durations


def with_sound_times(frame: pl.DataFrame, bad: dict[str, list[int]]) -> pl.DataFrame:
    """Return the events with valid times; the others go to `bad`."""
    time = next((name for name in ("start_ns", "time_ns") if name in frame.columns), None)
    if time is None:
        return frame
    start = pl.col(time)
    duration = pl.col("duration_ns") if "duration_ns" in frame.columns else pl.lit(0)
    is_sound = start.is_between(-LATEST_NS, LATEST_NS) & duration.is_between(0, LONGEST_NS)
    if frame.select(is_sound.fill_null(False).all()).item():
        return frame
    faults = {
        "no usable start time": start.is_null(),
        "a start time out of range": start.abs() > LATEST_NS,
        "a duration that is not a number, or too large": duration.is_null(),
        "a negative duration": duration < 0,
        "a duration of more than 104 days": duration > LONGEST_NS,
    }
    first = pl.coalesce(pl.when(is_bad).then(pl.lit(what)) for what, is_bad in faults.items())
    checked = frame.with_columns(fault=first)
    for what, event in checked.drop_nulls("fault").select("fault", "event").iter_rows():
        bad.setdefault(what, []).append(event)
    return checked.filter(pl.col("fault").is_null()).drop("fault")


def _in_order(parts: list[pl.DataFrame], bad: dict[str, list[int]]) -> pl.DataFrame:
    """Return the kinds of one table in file order; a table without times omits bad events too."""
    whole = pl.concat(parts, how="diagonal").sort("event") if len(parts) > 1 else parts[0]
    if bad and not {"start_ns", "time_ns"} & set(whole.columns):
        events = pl.Series(list(chain.from_iterable(bad.values())), dtype=pl.UInt32)
        whole = whole.filter(~pl.col("event").is_in(events.implode()))
    return whole


def _labels(events: list[Event]) -> Iterable[Label]:
    for event in events:
        text = event.args.labels if event.name == "process_labels" else event.args.name
        if text is not None and event.name in _LABELS:
            yield id_text(event.pid), id_text(event.tid), event.name, str(text)

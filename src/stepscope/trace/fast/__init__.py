"""Events as columns by the compiled scanner beside this file, where there is one.

It is optional: built when Stepscope is installed on a machine with a C compiler, and used only if it can be imported.
Without it `columns.Builder` does all the work, with the same results. What the scanner does not take, single events
or whole pieces of text, goes there in any case.
"""

from typing import Any

import msgspec
import polars as pl

from stepscope.trace.columns import CARRIED, COLUMN, Builder, with_sound_times
from stepscope.trace.events import Args, decode_events
from stepscope.trace.tables import CATEGORIES, COLLECTIVES, COUNTS, HOST, MEMORY, TABLES, THREADS, Table
from stepscope.trace.values import categories, json_texts, names

_INTERFACE = 2  # the same as in module.c

try:
    from stepscope.trace.fast import _scan  # type: ignore[attr-defined]  # optional

    if _scan.INTERFACE != _INTERFACE:  # of another version of Stepscope
        _scan = None
except ImportError:  # not built here, or built for another system
    _scan = None

# What a column takes from an event; the same numbers as in scanner.h.
_EVENT, _KIND, _NAME, _THREAD, _START, _DURATION, _INTEGER, _FLOAT, _TEXT, _RAW = range(10)
_PARTS = {
    "event": _EVENT, "kind": _KIND, "name": _NAME, "thread": _THREAD, "start_ns": _START, "time_ns": _START,
    "duration_ns": _DURATION,
}  # fmt: skip
_KEYS = {each.name: (each.encode_name.encode(), each.type is msgspec.Raw) for each in msgspec.structs.fields(Args)}
_NUMBERS = {name: number for number, name in enumerate(_KEYS)}
# Where an integer comes from if its argument is missing: another argument, nowhere (-1), the process (-2), the thread
# or stream (-3). Old traces have device and stream only in place of process and thread.
_OTHERWISE = {"external_id": _NUMBERS["old_external_id"], "device": -2, "stream": -3}
_TABLES = [table for table in TABLES if table not in (THREADS, COUNTS)]


def _columns(table: Table) -> dict[str, tuple[int, int, int]]:
    """Return for each column what it takes from an event, which argument, and where from if that is missing."""
    columns = {name: (part, -1, -1) for name, part in _PARTS.items() if name in table.schema}
    carried = {name for (of, _), arguments in CARRIED.items() if of == table.name for name in arguments}
    for name in carried - {"old_external_id"}:
        dtype = table.schema[COLUMN.get(name, name)]
        kind = _FLOAT if dtype == pl.Float64 else _TEXT if dtype == pl.Categorical else _INTEGER
        taken = (_RAW if _KEYS[name][1] else kind, _NUMBERS[name], _OTHERWISE.get(name, -1))
        columns[COLUMN.get(name, name)] = taken
    return columns


def _place(name: str, table: str, kind: str) -> tuple[bytes, int, int, int]:
    """Return a category, its table and kind, and the arguments that its events carry, as bits."""
    number = next(i for i, each in enumerate(_TABLES) if each.name == table)
    kinds = _TABLES[number].schema.get("kind")
    code = kinds.categories.to_list().index(kind) if isinstance(kinds, pl.Enum) else 0
    return name.encode(), number, code, sum(1 << _NUMBERS[each] for each in CARRIED[table, kind])


_COLUMNS = [_columns(table) for table in _TABLES]
_LAYOUT = (
    tuple(_KEYS.values()),
    tuple(tuple(columns.values()) for columns in _COLUMNS),
    (_place("", HOST.name, "other"), *(_place(name, *place) for name, place in CATEGORIES.items())),
    _TABLES.index(MEMORY),
    _TABLES.index(COLLECTIVES),
    _NUMBERS["collective"],
)


def is_built() -> bool:
    """Return whether the compiled scanner is here."""
    return _scan is not None


def order(host: pl.DataFrame) -> pl.Series:
    """Return the rows of events by `thread`, `start_ns`, `duration_ns` (the longest first) and `event`."""
    columns = host.select("thread", "start_ns", "duration_ns", "event").rechunk()
    return pl.Series(_Array(_scan.order(columns.__arrow_c_stream__())))


def nest(ordered: pl.DataFrame) -> tuple[pl.Series, pl.Series]:
    """Return `parent` and `self_ns` of events that have this order."""
    columns = ordered.select("thread", "start_ns", "duration_ns").rechunk()
    parent, own = _scan.nest(columns.__arrow_c_stream__())
    return pl.Series(_Array(parent)).alias("parent"), pl.Series(_Array(own)).alias("self_ns")


def trim() -> None:
    """Give back the memory of slices that threads have scanned; the C library would keep it."""
    if is_built():
        _scan.trim()


class Scanner(Builder):
    """A builder that has most events scanned; only if the scanner `is_built`."""

    def __init__(self) -> None:
        super().__init__()
        self._scanner = _scan.new(*_LAYOUT)

    def scan(
        self, data: bytes, position: int, length: int, piece: int, largest: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Scan from `position` up to a piece of text that must be decoded, or to the end.

        Return where that is, and first event and position of each piece before it.
        """
        done: list[tuple[int, int]] = []
        is_left = False
        while position < length and not is_left:
            position, is_left, num_events, pieces, odd = _scan.scan(
                self._scanner, data, position, length, piece, largest, self.num_events
            )
            if odd:
                try:
                    events = decode_events(b"[" + b",".join([data[begin:end] for _, begin, end in odd]) + b"]")
                    self.add(events, [event for event, _, _ in odd])
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    _scan.undo(self._scanner)
                    num_events, position, _ = pieces.pop()
                    is_left = True
            self.num_events = num_events
            done += [(first, begin) for first, begin, _ in pieces]
        return position, done

    def _frames(self, bad: dict[str, list[int]]) -> dict[str, list[pl.DataFrame]]:
        tables, texts, raws, threads, different, counts = _scan.finish(self._scanner)
        for letter, category, table, num_kept, num_other in counts:
            kept = _TABLES[table].name if letter == "X" else MEMORY.name
            self._counts[letter, different[category], kept] += num_kept
            self._counts[letter, different[category], None] += num_other
        self._gathered: dict[int, pl.Series] = {
            _NAME: categories(names(texts)),
            _RAW: categories(json_texts(raws)),
            _THREAD: pl.Series([0, *(self._threads[_thread(both)] for both in threads[1:])], dtype=pl.UInt32),
        }
        self._gathered[_TEXT] = self._gathered[_NAME]
        frames = super()._frames(bad)
        for table, columns, arrays in zip(_TABLES, _COLUMNS, tables):
            if arrays[0] is not None:
                frame = pl.DataFrame(
                    {
                        name: self._column(table, name, kind, pl.Series(_Array(array)))
                        for (name, (kind, _, _)), array in zip(columns.items(), arrays)
                        if array is not None
                    }
                )
                frames.setdefault(table.name, []).append(with_sound_times(frame, bad))
        return frames

    def _column(self, table: Table, name: str, kind: int, values: pl.Series) -> pl.Series:
        if kind == _KIND:
            return values.cat.to(table.schema[name])
        if kind in self._gathered:
            return self._gathered[kind].gather(values)
        cast: pl.Series = values.cast(table.schema[name], strict=False)
        return cast


class _Array:
    """A column as any dataframe library takes it, once, without a copy."""

    def __init__(self, capsules: tuple[Any, Any]) -> None:
        self._capsules = capsules

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[Any, Any]:
        return self._capsules


def _thread(both: bytes) -> tuple[Any, ...]:
    """Return process and thread: a number, a text (after a quote), or nothing."""
    parts = both.decode().split("\0")[:2]
    return tuple(part[1:] if part.startswith('"') else int(part) if part else None for part in parts)

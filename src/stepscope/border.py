"""The border for data: regular files only, limits with names, and values checked against a schema once.

Everything that a reader lets through has the types and ranges that analyses rely on. Needs only the standard library.
"""

import errno
import gzip
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeGuard

LIMITS = {
    "FILE_MIB": 512,  # of JSON in one file, decompressed; a trace is streamed and has no such limit
    "RATIO": 200,  # decompressed bytes for one of a file, from 64 MiB on: gzip reaches 1,000 if all are alike
    "LINES_MIB": 4096,  # of a file of lines, such as samples.jsonl
    "LINE_MIB": 4,
    "VALUES": 10_000_000,  # names and values of JSON in one file: two bytes of it can take a hundred of memory
    "ROWS_MIB": 1024,  # of a sweep's rows
    "ROWS_VALUES": 30_000_000,  # names and values of a sweep's rows
    "STEPS": 100_000,  # steps read in full: as many as a recording has lines. Later ones are counted.
    "HISTORY_LINES": 100_000,  # of a history: ten weeks. Of more, the last ones.
    "TRACE_ROWS": 2_500_000,  # of a trace's tables, each at most 600 bytes of memory. Of more, the first in time.
    "SQLITE_ROWS": 20_000_000,  # of one table of an SQLite file
    "SNAPSHOT_MIB": 2048,
    "SNAPSHOT_ENTRIES": 20_000_000,  # segments, blocks and trace entries
    "DUMP_MIB": 64,  # of one rank's dump of the flight recorder
    "NAME": 4096,  # characters of a name in a trace
    "DEPTH": 100,  # modules inside modules; deeper ones count as part of the one around them
    "DEVICES": 64,  # of a trace or a memory file, accounted for one by one: those with most events
}
"""The most that is read. An environment variable raises each: STEPSCOPE_MAX_STEPS=1000000."""
COUNT_END = 2**63


def limit(name: str) -> int:
    """Return a limit: its default, or the environment's STEPSCOPE_MAX_<NAME> if that is a positive integer."""
    text = os.environ.get(f"STEPSCOPE_MAX_{name}", "")
    return int(text) if text.isascii() and text.isdigit() and int(text) else LIMITS[name]


def open_file(path: Path) -> BinaryIO:
    """Return a regular file, opened; OSError for anything else, since a pipe blocks and a device never ends."""
    _refuse_other_kinds(path.stat())
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _refuse_other_kinds(os.fstat(descriptor))  # again: it may have been replaced
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def _refuse_other_kinds(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")


def read_file(path: Path, name: str = "FILE_MIB", is_raw: bool = False) -> bytes:
    """Return a file's bytes, a gzip file's decompressed unless raw; OSError or ValueError says what is wrong."""
    most = limit(name) << 20
    parts, rest = [], most + 1
    with open_file(path) as stream:
        is_compressed = not is_raw and stream.read(2) == b"\x1f\x8b"
        stream.seek(0)
        source: Any = gzip.GzipFile(fileobj=stream) if is_compressed else stream
        try:
            while rest > 0 and (part := source.read(min(rest, 1 << 20))):
                parts.append(part)
                rest -= len(part)
                if is_compressed and most - rest > max(64 << 20, limit("RATIO") * stream.tell()):
                    raise ValueError("it expands to much more than its size: set STEPSCOPE_MAX_RATIO to read it")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"it is damaged ({error})") from None
    if rest <= 0:
        raise ValueError(f"it has more than {most >> 20:,} MiB: set STEPSCOPE_MAX_{name} to read more")
    return b"".join(parts)


def read_json(path: Path, name: str = "FILE_MIB") -> Any:
    """Return a JSON file's value; OSError or ValueError that says what is wrong with it."""
    return Values().parsed(read_file(path, name))


class Values:
    """Parses the JSON of one file, in one piece or line by line, as far as its names and values are not too many."""

    def __init__(self, name: str = "VALUES") -> None:
        self._name, self._left = name, limit(name)

    def parsed(self, data: bytes, **options: Any) -> Any:
        """Return the value of JSON; ValueError that says what is wrong with it."""
        self._left -= sum(map(data.count, (b",", b":", b"[", b"{")))  # before any memory is taken for them
        if self._left < 0:
            most = f"it has more than {limit(self._name):,} values"
            raise ValueError(f"{most}: set STEPSCOPE_MAX_{self._name} to read more")
        try:
            return json.loads(data, **options)
        except RecursionError:
            raise ValueError("its values are nested too deeply") from None


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, without its end beyond the limits; a line that is too long is empty."""
    longest, rest = limit("LINE_MIB") << 20, limit("LINES_MIB") << 20
    with open_file(path) as stream:
        while rest > 0 and (line := stream.readline(longest)):
            rest -= len(line)
            is_whole = line.endswith(b"\n") or len(line) < longest
            yield line if is_whole else b"\n"
            while not is_whole and (more := stream.readline(longest)):
                rest -= len(more)
                is_whole = more.endswith(b"\n") or rest <= 0


# -- schemas ------------------------------------------------------------------------------------------------------
# A schema is one of the names below; [schema] for a list, (schema,) for one that is not empty; or an object as a dict
# of field to schema, where `name?` may be absent, `name~` also null, and `*` stands for every other field (`*~`: or
# null). Without `*`, other fields must be plain.

COUNT, NUMBER, INTEGER, TEXT, FLAG = "a count", "a number", "an integer", "a text", "true or false"
TIME = "a time in nanoseconds"  # more than none
AMOUNT = "a number of zero or more"
PLACE = "a path inside its folder"
SCALAR = "a text, a number, true, false or null"
PLAIN = "plain"  # anything that can be shown and written again
_DEEPEST = 40


class NotOfSchema(ValueError):
    """A value that does not fit; the message names it."""


def check(value: Any, schema: Any, where: str = "") -> None:
    """Raise NotOfSchema that names the first value that does not fit.

    >>> check({"steps": [{"num": 1}, {"num": -1}]}, {"steps": [{"num": COUNT}]})
    Traceback (most recent call last):
    stepscope.border.NotOfSchema: steps[1].num is not a count
    """
    if isinstance(schema, str):
        if not _FITS[schema](value):
            raise NotOfSchema(f"{where or 'it'} is not {schema}")
    elif isinstance(schema, (list, tuple)):
        if not isinstance(value, list) or (isinstance(schema, tuple) and not value):
            raise NotOfSchema(f"{where or 'it'} is not a list" + ", or it is empty" * isinstance(schema, tuple))
        for index, each in enumerate(value):
            check(each, schema[0], f"{where}[{index}]")
    else:
        if not isinstance(value, dict):
            raise NotOfSchema(f"{where or 'it'} is not an object")
        before = f"{where}." if where else ""
        names = {name.rstrip("?~"): name for name in schema}
        for field, name in names.items():
            is_left_out = (
                field not in value if name.endswith("?") else value.get(field) is None and name.endswith("~")
            )
            if field != "*" and not is_left_out:
                check(value.get(field), schema[name], before + field)
        if len(value) > len(schema) or "*" in names or not value.keys() <= names.keys():
            others = schema.get("*", schema.get("*~", PLAIN))
            for name in value.keys() - names.keys():
                check(name, TEXT, f"a name in {where or 'it'}")
                if value[name] is not None or "*" in schema:
                    check(value[name], others, before + name[:80])


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < COUNT_END


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a number that arithmetic does not overflow with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e100 < value < 1e100


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < COUNT_END


def is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and not (_SURROGATE.search(value) if not value.isascii() else None)


def _is_place(value: Any) -> bool:
    if not is_text(value) or not value or "\0" in value:
        return False
    path = PurePosixPath(value)
    return not path.is_absolute() and ".." not in path.parts


_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which cannot be encoded


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value can be shown and written again: finite, encodable, not nested deeply."""
    if isinstance(value, dict):
        return depth < _DEEPEST and all(is_text(name) and _is_plain(each, depth + 1) for name, each in value.items())
    if isinstance(value, list):
        return depth < _DEEPEST and all(_is_plain(each, depth + 1) for each in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool) or _is_integer(value) or is_text(value)


_FITS: dict[str, Callable[[Any], bool]] = {
    COUNT: is_count,
    NUMBER: is_number,
    INTEGER: _is_integer,
    TEXT: is_text,
    FLAG: lambda value: isinstance(value, bool),
    TIME: lambda value: is_number(value) and 0 < value < COUNT_END,
    AMOUNT: lambda value: is_number(value) and value >= 0,
    PLACE: _is_place,
    SCALAR: lambda value: value is None or isinstance(value, bool) or is_number(value) or is_text(value),
    PLAIN: _is_plain,
}


_MOST_WARNINGS = 20


def fields_that_fit(
    values: Mapping[str, Any], schema: Mapping[str, Any], name: str, warnings: list[str]
) -> dict[str, Any]:
    """Return the fields of a file that fit their schema, unknown ones if plain; a warning names each other.

    The first 20 are named. The rest are counted.
    """
    found, num_bad = {}, 0
    for field, value in values.items():
        try:
            check(field, TEXT, "a field's name")
            if value is not None:
                check(value, schema.get(field, schema.get(f"{field}~", PLAIN)), field[:80])
            if value is not None or f"{field}~" in schema:
                found[field] = value
        except NotOfSchema as error:
            num_bad += 1
            if num_bad <= _MOST_WARNINGS:
                warnings.append(f"{name}: {error}, so {field[:80]!a} was left out")
    if num_bad > _MOST_WARNINGS:
        warnings.append(f"{name}: {num_bad - _MOST_WARNINGS:,} more fields were left out")
    return found

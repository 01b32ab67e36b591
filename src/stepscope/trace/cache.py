"""Caches a trace's columns as Parquet in the user's cache folder, valid until the trace or the reader changes.

Each trace has a folder there: one Parquet file per table, and `trace.json`. Deleting it is always safe. If anything
is wrong with it, the trace itself is read. Nothing beside a trace is taken for its columns: it came from anybody.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from stepscope.border import limit
from stepscope.trace.scan import Problem
from stepscope.trace.tables import SCHEMA_VERSION, TABLES, Table, Trace, TraceFacts
from stepscope.user_cache import own_folder, read_own

if TYPE_CHECKING:
    from stepscope.trace.reader import Progress

FOLDER = "traces"
FACTS_FILE = "trace.json"
WORTH_KEEPING = 25_000
"""Events, about 8 MiB of JSON. Fewer are read in 0.2 s, about as long as Python takes to start."""
LIMIT_VARIABLE = "STEPSCOPE_CACHE_GIB"
"""Environment variable: how much all cached traces may take. The ones unused for longest are removed."""
LIMIT_GIB = 4.0

# Measured on a 414 MB trace (608,000 host and 101,000 device events), in CPU seconds and megabytes written: level 1
# 0.39 and 9.6, level 2 0.40 and 9.3, level 3 0.46 and 9.2, level 6 0.65 and 9.1. Statistics add half to that, and
# nothing reads them. Smaller row groups need more space, larger ones more memory.
_LEVEL = 2
_ROWS_A_GROUP = 1 << 17

_OURS = re.compile(r"\.?[0-9a-f]{32}(?:\..*)?", re.DOTALL)  # names of the folders that Stepscope writes
_END = 1 << 16
_SETTLED_NS = 1_000_000_000  # a file that changes again within a tick of its clock would show the same times
_LEFT_BEHIND_S = 24 * 3600  # an older temporary folder was abandoned by its process
_UNUSED_S = 90 * 24 * 3600  # unused columns are removed after this time: their trace may be gone


@dataclass(frozen=True)
class _Key:
    """What must match for cached columns to be used.

    It only says whether the trace is still the one that was read: that nobody else wrote the columns is up to their
    folder. A digest of the whole trace would take longer than reading its columns does. Any write sets `ctime_ns`,
    and unlike `mtime_ns` no program can set it back.
    """

    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    ends: str  # hash of the first and last 64 KiB, for file systems without these
    schema_version: int
    reader: str  # hash of the reading code, so that no version number is needed
    process: int | None = None
    most_rows: int = 0


@dataclass(frozen=True)
class _Kept:
    """`trace.json`: a trace without its tables."""

    key: _Key
    facts: TraceFacts
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    num_events: int
    hashes: dict[str, str]  # of each table's file. Parquet with a flipped bit may be read without an error.


def open_trace(
    path: Path, *, process: int | None = None, use_cache: bool = True, progress: Progress | None = None
) -> Trace:
    """Return the trace at `path` from its cached columns if valid; otherwise read it, and cache it if it is large.

    `process` is one of several in a file of Nsight Systems. Raises TraceError like `read_trace`, but never because of
    the cache.
    """
    key = _key_of(path, process) if use_cache else None
    if key is None:
        return read_trace(path, progress, process)
    kept = _load(path, key)
    if kept is not None:
        return kept
    is_settled = time.time_ns() - key.ctime_ns > _SETTLED_NS
    trace = read_trace(path, progress, process)
    # A trace that changed while it was read, or may do so unnoticed, has no key.
    if trace.num_events >= WORTH_KEEPING and is_settled and _key_of(path, process) == key:
        _store(trace, key)
    return trace


def read_trace(path: Path, progress: Progress | None, process: int | None = None) -> Trace:
    from stepscope.trace import reader

    return reader.read_trace(path, progress, process=process)


def _name_of(path: Path, process: int | None = None) -> str:
    return _hash_of(os.fsencode(path.resolve()) + (b"" if process is None else b"\0%d" % process))


def _key_of(path: Path, process: int | None = None) -> _Key | None:
    """Return the current key of a trace; None if it is not a regular file: a pipe can be read only once."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            begin = stream.read(_END)
            stream.seek(max(0, status.st_size - _END))
            ends = _hash_of(begin + stream.read(_END))
        times = (status.st_mtime_ns, status.st_ctime_ns)
        reader, most_rows = _reader_hash(), limit("TRACE_ROWS")
        return _Key(status.st_size, *times, status.st_ino, ends, SCHEMA_VERSION, reader, process, most_rows)
    except OSError:
        return None


@cache
def _reader_hash() -> str:
    folder = Path(__file__).parent
    modules = sorted([*folder.rglob("*.py"), *folder.glob("fast/_scan.*")])
    return _hash_of(b"".join(module.read_bytes() for module in modules))


def _load(path: Path, key: _Key) -> Trace | None:
    """Return the cached trace; None if there is none, it is outdated or damaged, or others may have written it."""
    try:
        folder = own_folder(FOLDER) / _name_of(path, key.process)
        kept = msgspec.json.decode(read_own(folder / FACTS_FILE), type=_Kept)
        if kept.key != key:
            return None
        tables = {table.name: _load_table(folder, table, kept.hashes[table.name]) for table in TABLES}
        os.utime(folder)  # it is in use, so it is kept
        return Trace(path, kept.facts, kept.problems, kept.warnings, kept.num_events, compiler=None, **tables)
    except (Exception, pl.exceptions.PanicException):  # a decoder may fail in any way on damaged bytes
        return None


def _load_table(folder: Path, table: Table, expected: str) -> pl.DataFrame:
    data = read_own(folder / f"{table.name}.parquet")
    if _hash_of(data) != expected:
        raise ValueError(f"{table.name} is damaged")
    frame = pl.read_parquet(io.BytesIO(data), use_statistics=False, hive_partitioning=False)
    if frame.schema != table.schema:
        raise ValueError(f"{table.name} has other columns")
    return frame.rechunk()


def _hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _store(trace: Trace, key: _Key) -> None:
    """Write a trace's columns under another name, then move them into place; do nothing if that fails."""
    temporary = None
    try:
        folder = own_folder(FOLDER, create=True) / _name_of(trace.path, key.process)
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.tmp")
        temporary.mkdir(mode=0o700)
        hashes = {}
        for table in TABLES:
            file = temporary / f"{table.name}.parquet"
            frame: pl.DataFrame = getattr(trace, table.name)
            frame.write_parquet(
                file, compression="zstd", compression_level=_LEVEL, statistics=False, row_group_size=_ROWS_A_GROUP
            )
            hashes[table.name] = _hash_of(file.read_bytes())
        kept = _Kept(key, trace.facts, trace.problems, trace.warnings, trace.num_events, hashes)
        (temporary / FACTS_FILE).write_bytes(msgspec.json.encode(kept))
        for file in temporary.iterdir():
            file.chmod(0o600)
        _put(temporary, folder)
        _tidy(folder.parent)
    except (Exception, pl.exceptions.PanicException):  # a full disk, or a folder that is not writable
        return
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _put(temporary: Path, folder: Path) -> None:
    old = temporary.with_suffix(".old")
    with suppress(FileNotFoundError):
        folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        # Another process was faster: its columns are of the same trace.
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Remove what killed processes left, what was unused for long, and the oldest of what exceeds the limit.

    Another process may be doing the same, or reading what goes: it then reads its trace.
    """
    now, room = time.time(), _limit_bytes()
    with os.scandir(folder) as found:
        ours = [each for each in found if each.is_dir(follow_symlinks=False) and _OURS.fullmatch(each.name)]
    entries = [(entry.stat(follow_symlinks=False).st_mtime, Path(entry)) for entry in ours]
    for used_at, entry in sorted(entries, reverse=True):
        is_temporary = entry.name.startswith(".")
        if not is_temporary:
            with suppress(OSError):
                room -= sum(file.stat().st_size for file in entry.iterdir())
        if now - used_at > (_LEFT_BEHIND_S if is_temporary else _UNUSED_S) or room < 0:
            shutil.rmtree(entry, ignore_errors=True)


def _limit_bytes() -> int:
    try:
        return int(float(os.environ.get(LIMIT_VARIABLE, LIMIT_GIB)) * (1 << 30))
    except (ValueError, OverflowError):  # not a number: the default
        return int(LIMIT_GIB * (1 << 30))

"""Caches a trace's columns as Parquet beside it, valid until the trace changes.

`rank0.json.gz` has its columns in the folder `rank0.json.gz.stepscope`: one Parquet file per table, and `trace.json`.
Deleting the folder is always safe. If anything is wrong with it, the trace itself is read.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from stepscope.trace.scan import Problem
from stepscope.trace.tables import SCHEMA_VERSION, TABLES, Table, Trace, TraceFacts

if TYPE_CHECKING:
    from stepscope.trace.reader import Progress

SUFFIX = ".stepscope"
FACTS_FILE = "trace.json"
WORTH_KEEPING = 25_000
"""Events, about 8 MiB of JSON. Fewer are read in 0.2 s, about as long as Python takes to start."""

# Measured on a 414 MB trace (608,000 host and 101,000 device events), in CPU seconds and megabytes written: level 1
# 0.39 and 9.6, level 2 0.40 and 9.3, level 3 0.46 and 9.2, level 6 0.65 and 9.1. Statistics add half to that, and
# nothing reads them. Smaller row groups need more space, larger ones more memory.
_LEVEL = 2
_ROWS_A_GROUP = 1 << 17

_END = 1 << 16
_LEFT_BEHIND_S = 24 * 3600  # an older temporary folder was abandoned by its process
_UNUSED_S = 90 * 24 * 3600  # unused columns in the user's cache are removed after this time: their trace may be gone


@dataclass(frozen=True)
class _Key:
    """What must match for cached columns to be used."""

    num_bytes: int
    mtime_ns: int
    ends: str  # hash of the first and last 64 KiB: a file copied over another may keep its size and time
    schema_version: int
    reader: str  # hash of the reading code, so that no version number is needed


@dataclass(frozen=True)
class _Kept:
    """`trace.json`: a trace without its tables."""

    key: _Key
    facts: TraceFacts
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    num_events: int
    hashes: dict[str, str]  # of each table's file. Parquet with a flipped bit may be read without an error.


def open_trace(path: Path, *, use_cache: bool = True, progress: Progress | None = None) -> Trace:
    """Return the trace at `path` from its cached columns if valid; otherwise read it, and cache it if it is large.

    Raises TraceError like `read_trace`, but never because of the cache.
    """
    key = _key_of(path) if use_cache else None
    if key is None:
        return read_trace(path, progress)
    for folder in _places(path):
        kept = _load(folder, path, key)
        if kept is not None:
            if folder.parent == _user_cache():
                with suppress(OSError):
                    os.utime(folder)  # it is in use, so it is kept
            return kept
    trace = read_trace(path, progress)
    # A trace that changed while it was read has no key.
    if trace.num_events >= WORTH_KEEPING and _key_of(path) == key:
        any(_store(folder, trace, key) for folder in _places(path))
    return trace


def read_trace(path: Path, progress: Progress | None) -> Trace:
    from stepscope.trace import reader

    return reader.read_trace(path, progress)


def _places(path: Path) -> Iterator[Path]:
    """Return folders for a trace's columns: beside it, or the user's cache if that is not writable."""
    yield path.with_name(path.name + SUFFIX)
    shared = _user_cache()
    with suppress(OSError, RuntimeError):  # a cyclic path
        if shared is not None:
            yield shared / _hash_of(os.fsencode(path.resolve()))


def _user_cache() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "stepscope" / "traces"
    except (OSError, RuntimeError):  # no home
        return None


def _key_of(path: Path) -> _Key | None:
    """Return the current key of a trace; None if it is not a regular file: a pipe can be read only once."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            begin = stream.read(_END)
            stream.seek(max(0, status.st_size - _END))
            ends = _hash_of(begin + stream.read(_END))
        return _Key(status.st_size, status.st_mtime_ns, ends, SCHEMA_VERSION, _reader_hash())
    except OSError:
        return None


@cache
def _reader_hash() -> str:
    return _hash_of(b"".join(module.read_bytes() for module in sorted(Path(__file__).parent.glob("*.py"))))


def _load(folder: Path, path: Path, key: _Key) -> Trace | None:
    """Return the trace cached in `folder`; None if there is none, or it is outdated, damaged, or another user's."""
    try:
        kept = msgspec.json.decode(_bytes_of(folder / FACTS_FILE), type=_Kept)
        if kept.key != key:
            return None
        return Trace(
            path=path,
            facts=kept.facts,
            problems=kept.problems,
            warnings=kept.warnings,
            num_events=kept.num_events,
            compiler=None,
            **{table.name: _load_table(folder, table, kept.hashes[table.name]) for table in TABLES},
        )
    except (Exception, pl.exceptions.PanicException):  # a decoder may fail in any way on untrusted bytes
        return None


def _load_table(folder: Path, table: Table, expected: str) -> pl.DataFrame:
    data = _bytes_of(folder / f"{table.name}.parquet")
    if _hash_of(data) != expected:
        raise ValueError(f"{table.name} is damaged")
    frame = pl.read_parquet(io.BytesIO(data), use_statistics=False, hive_partitioning=False)
    if frame.schema != table.schema:
        raise ValueError(f"{table.name} has other columns")
    return frame.rechunk()


def _bytes_of(file: Path) -> bytes:
    if not file.is_file():
        raise ValueError(f"{file} is not a file")  # and reading a pipe would block
    return file.read_bytes()


def _hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _store(folder: Path, trace: Trace, key: _Key) -> bool:
    """Write a trace's columns under another name, then move them into place; return False if that fails."""
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.tmp")
    try:
        if os.path.lexists(folder) and not _is_ours(folder):
            return False
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in _unchanged_for(_LEFT_BEHIND_S, folder.parent):  # by killed processes, for this trace
            if left.name.startswith(f".{folder.name}.") and left.name.endswith((".tmp", ".old")):
                shutil.rmtree(left, ignore_errors=True)
        # Whoever may not read the trace may not read its columns.
        readable = trace.path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
        temporary.mkdir(mode=stat.S_IRWXU | readable | readable >> 2)
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
        _put(temporary, folder)
        for unused in _unchanged_for(_UNUSED_S, folder.parent) if folder.parent == _user_cache() else ():
            if _is_ours(unused):
                shutil.rmtree(unused, ignore_errors=True)
        return True
    except (Exception, pl.exceptions.PanicException):  # a full disk, or a folder that is not writable
        return False
    finally:
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


def _is_ours(folder: Path) -> bool:
    """Return whether a folder contains only files that Stepscope writes, so that it may be replaced."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return all(
            entry.is_file(follow_symlinks=False) and (entry.name == FACTS_FILE or entry.name.endswith(".parquet"))
            for entry in entries
        )


def _unchanged_for(seconds: float, folder: Path) -> list[Path]:
    """Return what a folder contains that is older than this."""
    with os.scandir(folder) as entries:
        return [Path(e) for e in entries if time.time() - e.stat(follow_symlinks=False).st_mtime > seconds]

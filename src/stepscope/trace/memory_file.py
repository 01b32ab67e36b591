"""Reads a recording's `memory.json.gz` with size limits and type checks."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stepscope.errors import RecordingError

MEMORY_FILE = "memory.json.gz"
MEMORY_VERSION = 2
MAX_BYTES = 1 << 29  # of JSON: the recorder's 200,000 allocations are a tenth of it
_TEXT_FIELDS = ("dtype", "owner", "op", "phase", "module", "caller")
_ALLOCATOR = ("start_allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "num_retries")
_LARGEST = 2**63


def read_memory(path: Path) -> dict[str, Any]:
    """Return the memory file (docs/memory.md) of any version; RecordingError in one line if it is invalid."""
    try:
        memory = json.loads(_bytes_of(path))
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path.name} is not a memory file: {error}") from None
    if not isinstance(memory, dict) or not isinstance(memory.get("allocations"), list):
        raise RecordingError(f"{path.name} is not a memory file: it has no list of allocations")
    version = memory.get("schema_version", 1)
    if not isinstance(version, int) or version > MEMORY_VERSION:
        raise RecordingError(
            f"{path.name} has schema version {version!r}, but only up to {MEMORY_VERSION} is known: upgrade Stepscope"
        )
    try:
        _check(memory, version)
    except (TypeError, ValueError) as error:
        raise RecordingError(f"{path.name}: {error}: record it again with this Stepscope") from None
    return memory if version >= MEMORY_VERSION else _of_version_1(memory)


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            is_compressed = stream.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_compressed else path.open("rb") as stream:
            data: bytes = stream.read(MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordingError(f"{path.name} is damaged: {error}") from None
    except OSError as error:
        raise RecordingError(f"{path.name}: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise RecordingError(f"{path.name} has more than {MAX_BYTES >> 20} MiB of JSON, more than any memory window")
    return data


def _check(memory: Mapping[str, Any], version: int) -> None:
    """Raise TypeError or ValueError that names the first invalid field."""
    if version >= MEMORY_VERSION:
        _text(memory.get("device"), "device")
    _count(memory.get("num_dropped", 0), "num_dropped")
    for index, each in enumerate(memory["allocations"]):
        where = f"allocations[{index}]"
        _object(each, where)
        _count(each.get("bytes"), f"{where}.bytes")
        _text(each.get("device"), f"{where}.device")
        for name in _TEXT_FIELDS:
            _text(each.get(name), f"{where}.{name}", or_none=True)
        for name in ("born", "died", "born_ns", "died_ns"):
            _count(each.get(name), f"{where}.{name}", or_none=True)
        for size in _list(each.get("shape"), f"{where}.shape"):
            _count(size, f"{where}.shape")
        for begin, end in (("born", "died"), ("born_ns", "died_ns")):
            if each.get(begin) is not None and each.get(end) is not None and each[end] < each[begin]:
                raise ValueError(f"{where} was freed before it was allocated")
    for name, field in (("stages", "name"), ("saved", None), ("left_alive", None)):
        for index, each in enumerate(_list(memory.get(name), name)):
            where = f"{name}[{index}]"
            _object(each, where)
            if field:
                _text(each.get(field), f"{where}.{field}")
                _count(each.get("event"), f"{where}.event")
            else:
                _count(each.get("bytes"), f"{where}.bytes")
                _count(each.get("num_tensors"), f"{where}.num_tensors")
                for text in ("module", "op", "frame"):
                    _text(each.get(text), f"{where}.{text}", or_none=True)
    allocator = memory.get("allocator")
    if allocator is not None:
        _object(allocator, "allocator")
        for name in _ALLOCATOR:
            _count(allocator.get(name), f"allocator.{name}", or_none=True)


def _of_version_1(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Convert version 1, which had times but no order, and no owners."""
    times = sorted(
        (each[name], name == "born_ns", index)
        for index, each in enumerate(memory["allocations"])
        for name in ("born_ns", "died_ns")
        if each.get(name) is not None
    )
    allocations = [dict(each, born=None, died=None, caller=None) for each in memory["allocations"]]
    stages: list[dict[str, Any]] = []
    for event, (_, is_birth, index) in enumerate(times):
        each = allocations[index]
        each["born" if is_birth else "died"] = event
        phase = each.get("phase")
        if is_birth and phase is not None and (not stages or stages[-1]["name"] != phase):
            stages.append({"name": phase, "event": event})
    devices = [each["device"] for each in allocations if each.get("owner") == "parameter"]
    return {
        "schema_version": MEMORY_VERSION,
        "device": max(devices or ["cpu"], key=devices.count),
        "num_dropped": memory.get("num_dropped", 0),
        "allocations": allocations,
        "stages": stages,
        "saved": [],
        "left_alive": [],
        "allocator": None,
    }


def _object(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise TypeError(f"{where} is not an object")


def _list(value: Any, where: str) -> Iterable[Any]:
    if value is not None and not isinstance(value, list):
        raise TypeError(f"{where} is not a list")
    return value or ()


def _text(value: Any, where: str, or_none: bool = False) -> None:
    if not isinstance(value, str) and not (or_none and value is None):
        raise TypeError(f"{where} is not a text")


def _count(value: Any, where: str, or_none: bool = False) -> None:
    if or_none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise TypeError(f"{where} is not a count")

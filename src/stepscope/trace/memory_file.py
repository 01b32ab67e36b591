"""Reads a recording's `memory.json.gz` with size limits and type checks."""

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
_LARGEST = 2**63
_GRAPH = {"bytes": "count", "num_tensors": "count", "module": "text?", "op": "text?", "frame": "text?"}
_KINDS = {
    "allocations": {
        **{"bytes": "count", "device": "text"},
        **dict.fromkeys(("dtype", "owner", "op", "phase", "module", "caller"), "text?"),
        **dict.fromkeys(("born", "died", "born_ns", "died_ns"), "count?"),
    },
    "stages": {"name": "text", "event": "count"},
    "saved": _GRAPH,
    "left_alive": _GRAPH,
}
"""What the fields of each list's entries must be; with a question mark, they may be missing or null."""
_ALLOCATOR = dict.fromkeys(
    ("start_allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "num_retries"), "count?"
)


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
    own = {"num_dropped": "count"} | ({"device": "text"} if version >= MEMORY_VERSION else {})
    _check_fields({"num_dropped": 0, **memory}, "", own)
    for name, kinds in _KINDS.items():
        for index, each in enumerate(_list(memory.get(name), name)):
            _check_fields(each, f"{name}[{index}].", kinds)
    for index, each in enumerate(memory["allocations"]):
        where = f"allocations[{index}]"
        if not all(map(_is_count, _list(each.get("shape"), f"{where}.shape"))):
            raise TypeError(f"{where}.shape is not a count")
        for begin, end in (("born", "died"), ("born_ns", "died_ns")):
            if each.get(begin) is not None and each.get(end) is not None and each[end] < each[begin]:
                raise ValueError(f"{where} was freed before it was allocated")
    if memory.get("allocator") is not None:
        _check_fields(memory["allocator"], "allocator.", _ALLOCATOR)


def _check_fields(value: Any, where: str, kinds: Mapping[str, str]) -> None:
    if not isinstance(value, dict):
        raise TypeError(f"{where.rstrip('.')} is not an object")
    for name, kind in kinds.items():
        found = value.get(name)
        is_valid = _is_count(found) if kind.startswith("count") else isinstance(found, str)
        if not is_valid and not (found is None and kind.endswith("?")):
            raise TypeError(f"{where}{name} is not a {kind.rstrip('?')}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _list(value: Any, where: str) -> Iterable[Any]:
    if value is not None and not isinstance(value, list):
        raise TypeError(f"{where} is not a list")
    return value or ()


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

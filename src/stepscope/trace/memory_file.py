"""Reads a recording's `memory.json.gz` with size limits and type checks."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.border import AMOUNT, COUNT, FLAG, INTEGER, TEXT, NotOfSchema, check, read_json
from stepscope.errors import RecordingError

MEMORY_FILE = "memory.json.gz"
MEMORY_VERSION = 2
_GRAPH = {"bytes": COUNT, "num_tensors": COUNT, "module~": TEXT, "op~": TEXT, "frame~": TEXT}
SCHEMA: dict[str, Any] = {
    "allocations": [{
        **{"bytes": COUNT, "device": TEXT, "shape~": [COUNT]},
        **dict.fromkeys(("dtype~", "owner~", "op~", "phase~", "module~", "caller~"), TEXT),
        **dict.fromkeys(("born~", "died~", "born_ns~", "died_ns~"), COUNT),
    }],
    "num_dropped~": COUNT,
    "stages~": [{"name": TEXT, "event": COUNT}],
    "saved~": [_GRAPH],
    "graphs~": [{"module": TEXT, "num_nodes": COUNT}],
    "left_alive~": [_GRAPH],
    "ops~": {
        "kinds": [{"op": TEXT, "phase": TEXT, "place~": TEXT, "caller~": TEXT, "is_random": FLAG}],
        "calls": [{"kind": COUNT, "reads": [INTEGER], "writes": [INTEGER], "size": COUNT}],
        "zeros": [{"call": COUNT, "share": AMOUNT, "storage~": INTEGER}],
        "unchanged": [COUNT],
        "num_dropped~": COUNT,
    },
    "allocator~": dict.fromkeys(
        ("start_allocated_bytes~", "peak_allocated_bytes~", "peak_reserved_bytes~", "num_retries~"), COUNT
    ),
}  # fmt: skip
_ABSENT = {field.rstrip("~"): None for field in SCHEMA["allocations"][0] if field.endswith("~")}
"""Fields that an allocation may lack; behind the reader it has them."""


def read_memory(path: Path) -> dict[str, Any]:
    """Return the memory file (docs/memory.md) of any version; RecordingError in one line if it is invalid."""
    try:
        memory = read_json(path)
    except ValueError as error:
        raise RecordingError(f"{path.name} is not a memory file: {error}") from None
    except OSError as error:
        raise RecordingError(f"{path.name}: {error.strerror or error}") from None
    if not isinstance(memory, dict) or not isinstance(memory.get("allocations"), list):
        raise RecordingError(f"{path.name} is not a memory file: it has no list of allocations")
    version = memory.get("schema_version", 1)
    if not isinstance(version, int) or version > MEMORY_VERSION:
        raise RecordingError(
            f"{path.name} has schema version {version!r}, but only up to {MEMORY_VERSION} is known. "
            "Run `pip install --upgrade stepscope`"
        )
    try:
        check(memory, SCHEMA | ({"device": TEXT} if version >= MEMORY_VERSION else {}))
        if memory.get("ops") is not None:
            _check_ops(memory["ops"], len(memory["allocations"]))
        for index, each in enumerate(memory["allocations"]):
            for begin, end in (("born", "died"), ("born_ns", "died_ns")):
                if each.get(begin) is not None and each.get(end) is not None and each[end] < each[begin]:
                    raise NotOfSchema(f"allocations[{index}] was freed before it was allocated")
    except NotOfSchema as error:
        raise RecordingError(f"{path.name}: {error}: record it again with this Stepscope") from None
    memory["allocations"] = [_ABSENT | each for each in memory["allocations"]]
    return memory if version >= MEMORY_VERSION else _of_version_1(memory)


def _check_ops(ops: Mapping[str, Any], num_allocations: int) -> None:
    for index, call in enumerate(ops["calls"]):
        named = (*call["reads"], *call["writes"])
        if call["kind"] >= len(ops["kinds"]) or not all(-1 <= one < num_allocations for one in named):
            raise NotOfSchema(f"ops.calls[{index}] names a kind or a storage that there is not")
    for zeros in ops["zeros"]:
        if zeros["call"] >= len(ops["calls"]) or not -1 <= (zeros.get("storage") or 0) < num_allocations:
            raise NotOfSchema("ops.zeros names a call or a storage that there is not")


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
    devices = Counter(each["device"] for each in allocations if each.get("owner") == "parameter")
    return {
        "schema_version": MEMORY_VERSION,
        "device": max(devices, key=devices.__getitem__, default="cpu"),
        "num_dropped": memory.get("num_dropped", 0),
        "allocations": allocations,
        "stages": stages,
        "saved": [],
        "left_alive": [],
        "allocator": None,
    }

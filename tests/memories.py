"""Memory files and CUDA memory snapshots written by hand: round numbers, so that every figure can be checked."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MIB = 1 << 20
B, S, D, H, V, FF = 2, 6, 8, 4, 30, 20


def tensor(num_bytes: int, owner: str = "temporary", born: int | None = None, died: int | None = None, **fields: Any):
    """An allocation of a memory file."""
    return {
        "bytes": num_bytes,
        "device": "cuda:0",
        "dtype": "float32",
        "shape": [num_bytes // 4],
        "owner": owner,
        "op": "before the window" if born is None else "aten.mm",
        "phase": None if born is None else "forward",
        "module": None,
        "caller": None,
        "born": born,
        "died": died,
        "born_ns": None if born is None else born * 1000,
        "died_ns": None if died is None else died * 1000,
        **fields,
    }


def a_step(**fields: Any) -> dict[str, Any]:
    """One step: parameters, an input, two activations and a temporary at the peak, which the allocator says is 4100.

    events  0      1      2       3          4           5           6        7
            input  act 0  act 1   temporary  -temporary  gradient    -act 1   -act 0
    bytes   1100   1700   2300    3300       2300        2700        2100     1500
    """
    memory = {
        "schema_version": 2,
        "device": "cuda:0",
        "num_dropped": 0,
        "allocations": [
            tensor(1000, "parameter", module="blocks.0.mlp"),
            tensor(100, "input", 0, phase="data", op="aten._to_copy", dtype="int64", shape=[2, 6]),
            tensor(600, "activation", 1, 7, module="blocks.0.mlp", caller="train.py:7 forward"),
            tensor(600, "activation", 2, 6, module="blocks.1.mlp", caller="train.py:7 forward"),
            tensor(1000, "temporary", 3, 4, op="aten.add", module="blocks.1", dtype="bfloat16", shape=[500]),
            tensor(400, "gradient", 5, module="blocks.0.mlp", phase="backward"),
            tensor(50_000, "input", 0, device="cpu", phase="data"),
        ],
        "stages": [
            {"name": "data", "event": 0},
            {"name": "forward", "event": 1},
            {"name": "backward", "event": 5},
            {"name": "optimizer", "event": 8},
        ],
        "saved": [
            {"module": "blocks.0.mlp", "bytes": 600, "num_tensors": 2},
            {"module": "blocks.1.mlp", "bytes": 500, "num_tensors": 1},
        ],
        "left_alive": [
            {"bytes": 77, "num_tensors": 3, "op": "MulBackward0", "module": None, "frame": "train.py:9 losses"}
        ],
        "allocator": {
            "start_allocated_bytes": 1024,
            "peak_allocated_bytes": 4100,
            "peak_reserved_bytes": 6000,
            "num_retries": 1,
        },
    }
    return memory | fields


def transformer(length: int, batch: int = B) -> dict[str, Any]:
    """What two blocks of attention and feed-forward allocate, in shapes that tell every symbol."""
    allocations: list[dict[str, Any]] = []

    def add(
        shape: list[int], owner: str, module: str, op: str = "aten.mm", item_bytes: int = 4, **fields: Any
    ) -> None:
        num_bytes = item_bytes
        for size in shape:
            num_bytes *= size
        born = None if owner == "parameter" else len(allocations)
        allocations.append(tensor(num_bytes, owner, born, module=module, op=op, shape=shape, device="cpu") | fields)

    add([V, D], "parameter", "embedding")
    for block in ("blocks.0", "blocks.1"):
        add([3 * D, D], "parameter", f"{block}.attn.qkv")
        add([D, D], "parameter", f"{block}.attn.out")
        add([FF, D], "parameter", f"{block}.mlp.up")
        add([D, FF], "parameter", f"{block}.mlp.down")
        add([D], "parameter", f"{block}.norm")
    add([batch, length], "input", "", "aten.randint", 8, dtype="int64")
    add([batch, length, D], "activation", "embedding", "aten.embedding")
    for block in ("blocks.0", "blocks.1"):
        add([batch * length, 3 * D], "activation", f"{block}.attn.qkv", "aten.addmm")
        add([batch, H, length, length], "activation", f"{block}.attn", "aten._softmax")
        add([batch, H, length, D // H], "activation", f"{block}.attn", "aten.clone")
        add([batch, length, FF], "activation", f"{block}.mlp", "aten.gelu", 2, dtype="bfloat16")
    add([batch * length, V], "activation", "", "aten._log_softmax")
    add([length + 7, 13], "temporary", "", "aten.odd")
    return {"schema_version": 2, "device": "cpu", "num_dropped": 0, "allocations": allocations}


def write_memory(path: Path, memory: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(memory).encode()))
    return path


# -- snapshots ----------------------------------------------------------------------------------------------------

BASE, SMALL = 0x7F0000000000, 0x7F1000000000
TORCH = {"filename": "/usr/lib/python3/site-packages/torch/nn/modules/linear.py", "line": 125, "name": "forward"}
CPP = {"filename": "/pytorch/c10/cuda/CUDACachingAllocator.cpp", "line": 0, "name": "malloc"}
MODEL = {"filename": "/home/me/model.py", "line": 31, "name": "forward"}
TRAIN = {"filename": "/home/me/train.py", "line": 10, "name": "step"}
LOSS = {"filename": "/home/me/train.py", "line": 12, "name": "loss"}


def snapshot() -> dict[str, Any]:
    """What `torch.cuda.memory._snapshot()` returns, of device 0, in MiB:

    before: K 2, Z 5, Q 1 = 8, reserved 20
    event   0: X 4  1: segment 2  2: Y 1  3: -Z  5: W 8 less 12 bytes  6: -X  8: OOM  9: -Y  11: -Q
    level   12                    13      8      16 (the peak)         12             11     10
    """
    w_bytes = 8 * MIB - 12

    def entry(action: str, address: int | None, num_bytes: int, frames: list[Any], **fields: Any) -> dict[str, Any]:
        where = {} if address is None else {"addr": address}
        return {
            "action": action,
            **where,
            "size": num_bytes,
            "stream": 0,
            "time_us": 1_700_000_000_000_000 + len(trace),
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": (0, 0),
            "frames": frames,
            **fields,
        }

    x, w, z, q, y = BASE + 8 * MIB, BASE, BASE + 15 * MIB, BASE + 14 * MIB, SMALL
    trace: list[dict[str, Any]] = []
    trace.append(entry("alloc", x, 4 * MIB, [CPP, TORCH, MODEL, TRAIN]))
    trace.append(entry("segment_alloc", SMALL, 2 * MIB, [CPP, LOSS]))
    trace.append(entry("alloc", y, 1 * MIB, [LOSS]))
    trace.append(entry("free_requested", z, 5 * MIB, [TRAIN]))
    trace.append(entry("free_completed", z, 5 * MIB, [TRAIN]))
    trace.append(entry("alloc", w, w_bytes, [TORCH, TRAIN]))
    trace.append(entry("free_requested", x, 4 * MIB, []))
    trace.append(entry("free_completed", x, 4 * MIB, []))
    trace.append(entry("oom", None, 64 * MIB, [TORCH, MODEL, TRAIN], device_free=32 * MIB))
    trace.append(entry("free_requested", y, 1 * MIB, []))
    trace.append(entry("free_completed", y, 1 * MIB, []))
    trace.append(entry("free_requested", q, 1 * MIB, []))
    trace.append(entry("snapshot", 0, 0, []))

    def block(address: int, size: int, state: str, frames: list[Any], requested: int | None = None) -> dict[str, Any]:
        asked = (size if state != "inactive" else 0) if requested is None else requested
        return {"address": address, "size": size, "requested_size": asked, "state": state, "frames": frames}

    def segment(address: int, kind: str, allocated: int, active: int, blocks: list[Any]) -> dict[str, Any]:
        return {
            "device": 0,
            "address": address,
            "total_size": sum(each["size"] for each in blocks),
            "allocated_size": allocated,
            "active_size": active,
            "requested_size": sum(each["requested_size"] for each in blocks),
            "stream": 0,
            "segment_type": kind,
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }

    large = [
        block(BASE, 8 * MIB, "active_allocated", [TORCH, TRAIN], w_bytes),
        block(BASE + 8 * MIB, 4 * MIB, "inactive", []),
        block(BASE + 12 * MIB, 2 * MIB, "active_allocated", [TORCH]),
        block(BASE + 14 * MIB, 1 * MIB, "active_awaiting_free", []),
        block(BASE + 15 * MIB, 5 * MIB, "inactive", []),
    ]
    return {
        "segments": [
            segment(BASE, "large", 10 * MIB, 11 * MIB, large),
            segment(SMALL, "small", 0, 0, [block(SMALL, 2 * MIB, "inactive", [])]),
        ],
        "device_traces": [trace, []],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "roundup_power2_divisions": {"1": 0, "2": 0},
        },
        "external_annotations": [],
    }

"""Flight-recorder dumps as PyTorch writes them, from a few words: `all_reduce 8 train.py:3`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

START_NS = 1_794_958_548_000_000_000


def call(text: str, number: int, group: str = "0", **more: Any) -> dict[str, Any]:
    """One entry; `text` has the collective, the number of elements, the line and the dtype."""
    given = text.split()
    name, num, place, dtype = (*given, *("", "1", "train.py:1", "Float")[len(given) :])
    file, _, line = place.partition(":")
    entry = {
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 3},
            {"name": "step", "filename": f"/home/me/{file}", "line": int(line)},
        ],
        "record_id": number - 1, "pg_id": 0, "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "profiling_name": f"nccl:{name}",
        "time_created_ns": START_NS + number * 10**6, "input_sizes": [[int(num)]], "output_sizes": [[int(num)]],
        "input_dtypes": [dtype], "output_dtypes": [dtype], "state": "completed", "retired": True,
        "timeout_ms": 600_000, "is_p2p": False,
    }  # fmt: skip
    return entry | more


def dump(entries: list[dict[str, Any]], groups: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"version": "2.10", "pg_config": groups or {}, "pg_status": {}, "entries": entries, **more}


def calls(*texts: str, group: str = "0", **more: Any) -> list[dict[str, Any]]:
    return [call(text, number, group, **more) for number, text in enumerate(texts, 1)]


def write(folder: Path, ranks: dict[int, Any]) -> Path:
    """Write a dump per rank, as a pickle like PyTorch's."""
    folder.mkdir(exist_ok=True)
    for rank, each in ranks.items():
        content = each if isinstance(each, dict) else dump(each)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    return folder

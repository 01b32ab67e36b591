"""Real exports of Nsight Systems: sums of ours against plain SQL over the same file.

Set STEPSCOPE_NSIGHT to a folder of `*.sqlite` files. Public ones are in the tests of hpcgroup/pipit and nsys-ai.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from nsight_files import COPY, FILL, KERNEL, RUNTIME, SYNC
from stepscope.errors import TraceError
from stepscope.trace.find import find_traces, open_ranks

FOLDER = os.environ.get("STEPSCOPE_NSIGHT")
SAMPLES = sorted(Path(FOLDER).rglob("*.sqlite")) if FOLDER else []
needs_samples = pytest.mark.skipif(not SAMPLES, reason="no exports here: set STEPSCOPE_NSIGHT to their folder")
QUERIES = {
    "kernels": f"SELECT deviceId, count(*), sum(end - start) FROM {KERNEL} GROUP BY 1",
    "kernels by stream": f"SELECT streamId, count(*), sum(end - start) FROM {KERNEL} GROUP BY 1",
    "kernels by name": f"SELECT value, count(*), sum(end - start) FROM {KERNEL} LEFT JOIN StringIds "
    "ON id = demangledName GROUP BY 1",
    "copies": f"SELECT deviceId, count(*), sum(bytes) FROM {COPY} GROUP BY 1",
    "fills": f"SELECT deviceId, count(*), sum(bytes) FROM {FILL} GROUP BY 1",
    "synchronizations": f"SELECT deviceId, count(*), sum(end - start) FROM {SYNC} GROUP BY 1",
}


def ours(path: Path) -> dict[str, Counter[object]]:
    """Counts and sums of every rank together, as the queries have them."""
    found: dict[str, Counter[object]] = {name: Counter() for name in QUERIES}
    for opened in open_ranks(find_traces([path]), use_cache=False):
        device, syncs = opened.trace.device, opened.trace.syncs
        is_ = {kind: device.filter(device["kind"] == kind) for kind in ("kernel", "memcpy", "memset")}
        for name, frame, key, value in (
            ("kernels", is_["kernel"], "device", "duration_ns"),
            ("kernels by stream", is_["kernel"], "stream", "duration_ns"),
            ("kernels by name", is_["kernel"], "name", "duration_ns"),
            ("copies", is_["memcpy"], "device", "bytes"),
            ("fills", is_["memset"], "device", "bytes"),
            ("synchronizations", syncs, "device", "duration_ns"),
        ):
            for group, amount in frame.select(key, value).iter_rows():
                found[name][group, "count"] += 1
                found[name][group, "sum"] += amount
    return found


def plain_sql(path: Path) -> dict[str, Counter[object]]:
    database = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    found: dict[str, Counter[object]] = {name: Counter() for name in QUERIES}
    for name, query in QUERIES.items():
        for table in (KERNEL, COPY, FILL, SYNC):
            if table in tables and f"FROM {table} " in query:
                for group, num, amount in database.execute(query):
                    long = isinstance(group, str) and len(group) > 4096
                    found[name][f"{group[:4096]}…" if long else group, "count"] += num
                    found[name][f"{group[:4096]}…" if long else group, "sum"] += amount
    database.close()
    return found


@needs_samples
@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_sums_equal_plain_sql_exactly(path: Path) -> None:
    database = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    database.close()
    if not tables & {KERNEL, RUNTIME, "NVTX_EVENTS"}:
        with pytest.raises(TraceError, match="without the tables of Nsight Systems"):
            find_traces([path])
        return
    assert ours(path) == plain_sql(path)

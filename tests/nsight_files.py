"""Exports of Nsight Systems written by hand, with the schema that NVIDIA documents; times in microseconds.

export = NsightBuilder().range("step 1", 0, 100).range("aten::mm, op_id = 5", 10, 20)
export.launch("gemm", 12, runs=(30, 40))      # the call at 12 µs, the kernel 40 µs long from 30 µs on
path = export.write(tmp_path)
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

_GPU = "deviceId INT, contextId INT, streamId INT, correlationId INT, globalPid INT"
_NAMES = "demangledName INT NOT NULL, shortName INT NOT NULL, mangledName INT"
_SIZES = "registersPerThread INT, gridX INT, gridY INT, gridZ INT, blockX INT, blockY INT, blockZ INT"
_SHARED = "staticSharedMemory INT, dynamicSharedMemory INT"
_SPAN = "start INTEGER NOT NULL, end INTEGER NOT NULL"
KERNEL, RUNTIME, COPY, FILL, SYNC, EVENT, GRAPH = (
    f"CUPTI_ACTIVITY_KIND_{name}"
    for name in ("KERNEL", "RUNTIME", "MEMCPY", "MEMSET", "SYNCHRONIZATION", "CUDA_EVENT", "GRAPH_TRACE")
)
SCHEMA = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    KERNEL: f"{_SPAN}, {_GPU}, {_NAMES}, {_SIZES}, {_SHARED}, graphNodeId INT, graphId INT, greenContextId INT",
    GRAPH: f"{_SPAN}, {_GPU}, graphId INT, graphExecId INT",
    RUNTIME: f"{_SPAN}, eventClass INT NOT NULL, globalTid INT, correlationId INT, nameId INT NOT NULL",
    COPY: f"{_SPAN}, {_GPU}, bytes INT, copyKind INT, srcKind INT, dstKind INT, graphNodeId INT",
    FILL: f"{_SPAN}, {_GPU}, bytes INT, value INT, memKind INT, graphNodeId INT",
    SYNC: f"{_SPAN}, {_GPU}, syncType INT, eventId INT, eventSyncId INT",
    EVENT: f"timestamp INT, {_GPU}, eventId INT, eventSyncId INT",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INT, eventType INT, rangeId INT, category INT, text TEXT, "
    "globalTid INT, endGlobalTid INT, textId INT, domainId INT",
    "PROFILER_OVERHEAD": f"{_SPAN}, globalTid INT, nameId INT, overheadType INT",
    "PROCESSES": "globalPid INT, pid INT, name TEXT",
    "ThreadNames": "nameId INT, priority INT, globalTid INT",
    "TARGET_INFO_GPU": "id INT, name TEXT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INT, utcTime TEXT",
    "META_DATA_EXPORT": "name TEXT, value TEXT",
}
OLD_SCHEMA = {
    **{name: columns for name, columns in SCHEMA.items() if name not in (GRAPH, EVENT, "META_DATA_EXPORT")},
    KERNEL: f"{_SPAN}, {_GPU}, {_NAMES}, {_SIZES}, {_SHARED}, graphNodeId INT",
    SYNC: f"{_SPAN}, {_GPU}, syncType INT, eventId INT",
    "EXPORT_META_DATA": "name TEXT, value TEXT",
}
"""As of Nsight Systems 2022: no ids of graphs or synchronizations, and another name for the table of versions."""


def thread_id(pid: int, tid: int) -> int:
    return 1 << 48 | pid << 24 | tid


class NsightBuilder:
    """Rows in the order in which they are told; every method returns the builder."""

    def __init__(self, pid: int = 100, gpu: int = 0) -> None:
        self.pid, self.gpu = pid, gpu
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.strings: dict[str, int] = {}
        self.num_launches = 0

    def row(self, table: str, **values: Any) -> NsightBuilder:
        self.rows.setdefault(table, []).append(values)
        return self

    def process(self, pid: int, gpu: int = 0) -> NsightBuilder:
        """Everything after this belongs to another process, whose correlation ids begin anew."""
        self.pid, self.gpu, self.num_launches = pid, gpu, 0
        return self

    def text(self, value: str) -> int:
        return self.strings.setdefault(value, len(self.strings) + 1)

    def range(self, text: str, ts: float, dur: float, tid: int = 1, **values: Any) -> NsightBuilder:
        row = {"text": text, "globalTid": thread_id(self.pid, tid), "eventType": 59, **_span(ts, dur), **values}
        return self.row("NVTX_EVENTS", **row)

    def call(self, name: str, ts: float, dur: float, tid: int = 1, correlation: int | None = None) -> NsightBuilder:
        thread = thread_id(self.pid, tid)
        names = {"nameId": self.text(name), "correlationId": correlation, "eventClass": 0}
        return self.row(RUNTIME, globalTid=thread, **names, **_span(ts, dur))

    def gpu_row(self, table: str, ts: float, dur: float, correlation: int, **values: Any) -> NsightBuilder:
        where = {"globalPid": thread_id(self.pid, 0), "deviceId": self.gpu, "streamId": 7, "contextId": 1}
        return self.row(table, **{**where, "correlationId": correlation, **_span(ts, dur), **values})

    def launch(
        self, name: str, ts: float, runs: tuple[float, float], dur: float = 5, tid: int = 1, **values: Any
    ) -> NsightBuilder:
        """A call that launches a kernel, and when the kernel runs: start and duration."""
        self.num_launches += 1
        self.call("cudaLaunchKernel_v7000", ts, dur, tid, self.num_launches)
        names = {"demangledName": self.text(name), "shortName": self.text(name.partition("<")[0])}
        sizes = {"gridX": 4, "gridY": 2, "gridZ": 1, "blockX": 128, "blockY": 1, "blockZ": 1}
        memory = {"staticSharedMemory": 16, "dynamicSharedMemory": 1024, "registersPerThread": 32}
        return self.gpu_row(KERNEL, *runs, self.num_launches, **{**names, **sizes, **memory, **values})

    def write(
        self, folder: Path, name: str = "run.sqlite", schema: dict[str, str] = SCHEMA, without: tuple[str, ...] = ()
    ) -> Path:
        """Write the tables of the schema; a column that it does not have is left out."""
        path = folder / name
        about = "META_DATA_EXPORT" if "META_DATA_EXPORT" in schema else "EXPORT_META_DATA"
        rows = {
            "StringIds": [{"id": number, "value": text} for text, number in self.strings.items()],
            about: [{"name": "EXPORT_PRODUCT_VERSION", "value": "2026.2.1"}],
            **self.rows,
        }
        with sqlite3.connect(path) as database:
            for table, columns in schema.items():
                if table in without:
                    continue
                database.execute(f'CREATE TABLE "{table}" ({columns})')
                known = {each.split()[0] for each in columns.split(", ") if " AS " not in each}
                for values in rows.get(table, []):
                    kept = {column: value for column, value in values.items() if column in known}
                    slots = ", ".join("?" * len(kept))
                    named = ", ".join(f'"{column}"' for column in kept)
                    database.execute(f'INSERT INTO "{table}" ({named}) VALUES ({slots})', list(kept.values()))
        database.close()
        return path


def _span(ts: float, dur: float) -> dict[str, int]:
    return {"start": round(ts * 1000), "end": round((ts + dur) * 1000)}


def training_run(num_steps: int = 4, label: str = "step {}", shapes: bool = True) -> NsightBuilder:
    """Steps of 1,000 µs: two ops forward, one backward, an optimizer; 100 µs of kernels in each of four launches."""
    export = NsightBuilder()
    for step in range(num_steps):
        at = 1000 * step
        if label:
            export.range(label.format(step), at, 990)
        _op(
            export,
            "aten::mm",
            at + 20,
            "sgemm_128x64_nn",
            f", seq = {10 * step}",
            "[[64, 32], [32, 16]]" if shapes else "",
        )
        _op(
            export,
            "aten::relu",
            at + 120,
            "vectorized_elementwise_kernel<4, relu>",
            "",
            "[[64, 16]]" if shapes else "",
        )
        name = "autograd::engine::evaluate_function: MmBackward0"
        _op(export, name, at + 320, "sgemm_128x64_nt", f", seq = {10 * step}", "", tid=2)
        export.range("Optimizer.step#AdamW.step, op_id = 9", at + 600, 100)
        _op(export, "aten::_fused_adamw_", at + 610, "multi_tensor_apply_kernel<adamw>", "", "")
    return export


def _op(export: NsightBuilder, name: str, ts: float, kernel: str, sequence: str, shapes: str, tid: int = 1) -> None:
    sizes = f", sizes = {shapes}" if shapes else ""
    export.range(f"{name}{sequence}, op_id = {round(ts)}{sizes}", ts, 50, tid)
    export.launch(kernel, ts + 10, runs=(ts + 30, 100), tid=tid)


def changed(path: Path, *statements: str) -> Path:
    """Run statements on a database, which is made if there is none."""
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)
    database.close()
    return path

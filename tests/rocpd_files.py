"""Databases of rocprofv3 written by hand, with the columns of schema version 3; times in microseconds.

run = RocpdBuilder().range("step 1", 0, 100).launch("gemm", 12, runs=(30, 40))
path = run.write(tmp_path)
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

_ID, _SPAN, _WHERE = "id INTEGER PRIMARY KEY", "start BIGINT, end BIGINT", "nid INT, pid INT, tid INT"
_STREAM = "queue_id INT, stream_id INT, event_id INT"
_SIZES = ", ".join(f"{what}_size_{axis} INT" for what in ("workgroup", "grid") for axis in "xyz")
SCHEMA = {
    "metadata": f"{_ID}, tag TEXT, value TEXT",
    "string": f"{_ID}, string TEXT",
    "info_process": f"{_ID}, pid INT, command TEXT",
    "info_thread": f"{_ID}, pid INT, tid INT, name TEXT",
    "info_agent": f"{_ID}, type TEXT, type_index INT, name TEXT, product_name TEXT",
    "info_kernel_symbol": f"{_ID}, kernel_name TEXT, display_name TEXT",
    "event": f"{_ID}, category_id INT, stack_id INT, parent_stack_id INT, correlation_id INT, extdata JSONB",
    "region": f"{_ID}, {_WHERE}, {_SPAN}, name_id INT, event_id INT",
    "kernel_dispatch": f"{_ID}, {_WHERE}, {_SPAN}, {_STREAM}, {_SIZES}, agent_id INT, kernel_id INT, "
    "group_segment_size INT",
    "memory_copy": f"{_ID}, {_WHERE}, {_SPAN}, {_STREAM}, name_id INT, dst_agent_id INT, src_agent_id INT, size INT",
}
CPU, FIRST_GPU = 0, 4  # agents: the CPUs come first


class RocpdBuilder:
    """Rows in the order in which they are told; every method returns the builder."""

    def __init__(self, pid: int = 100, gpu: int = 0) -> None:
        self.pid, self.gpu = pid, gpu
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMA}
        self.row("metadata", tag="schema_version", value="3")
        self.row("info_process", id=pid, pid=pid, command="python train.py").row("info_thread", id=pid, name="main")
        self.row("info_agent", id=CPU, type="CPU", type_index=0, name="EPYC", product_name="EPYC")
        for number in range(2):
            name = "AMD Instinct MI300X"
            self.row("info_agent", id=FIRST_GPU + number, type="GPU", type_index=number, product_name=name)
        self.strings: dict[str, int] = {}

    def row(self, table: str, **values: Any) -> RocpdBuilder:
        self.rows[table].append(values)
        return self

    def text(self, value: str) -> int:
        return self.strings.setdefault(value, len(self.strings) + 1)

    def event(self, category: str, call: int, **extra: Any) -> int:
        number = len(self.rows["event"]) + 1
        known = {"category_id": self.text(category), "stack_id": call, "correlation_id": 0}
        self.row("event", id=number, extdata=json.dumps(extra), **known)
        return number

    def region(self, name: str, category: str, ts: float, dur: float, call: int = 0, **extra: Any) -> RocpdBuilder:
        where = {"pid": self.pid, "tid": self.pid, "event_id": self.event(category, call, **extra)}
        return self.row("region", name_id=self.text(name), **where, **_span(ts, dur))

    def range(self, text: str, ts: float, dur: float) -> RocpdBuilder:
        return self.region("roctxThreadRangeA", "MARKER_CORE_RANGE_API", ts, dur, message=text)

    def launch(self, name: str, ts: float, runs: tuple[float, float], **values: Any) -> RocpdBuilder:
        call = len(self.rows["event"]) + 1000
        self.region("hipLaunchKernel", "HIP_RUNTIME_API_EXT", ts, 5, call)
        kernel = len(self.rows["info_kernel_symbol"]) + 1
        self.row("info_kernel_symbol", id=kernel, kernel_name=f"{name}.kd", display_name=name)
        sizes = {"workgroup_size_x": 256, "workgroup_size_y": 1, "workgroup_size_z": 1, "grid_size_x": 1000}
        sizes |= {"grid_size_y": 2, "grid_size_z": 1, "group_segment_size": 4096}
        on = {"agent_id": FIRST_GPU + self.gpu, "stream_id": 3, "queue_id": 9, "kernel_id": kernel}
        number = self.event("KERNEL_DISPATCH", call)
        return self.row("kernel_dispatch", **{**on, "event_id": number, **sizes, **_span(*runs), **values})

    def copy(self, what: str, ts: float, dur: float, size: int, to_host: bool = False) -> RocpdBuilder:
        call = len(self.rows["event"]) + 1000
        self.region("hipMemcpyWithStream", "HIP_RUNTIME_API_EXT", ts, dur + 5, call)
        agents = (FIRST_GPU + self.gpu, CPU) if to_host else (CPU, FIRST_GPU + self.gpu)
        on = dict(zip(("src_agent_id", "dst_agent_id"), agents), queue_id=9, event_id=self.event("MEMORY_COPY", call))
        return self.row("memory_copy", name_id=self.text(f"MEMORY_COPY_{what}"), size=size, **on, **_span(ts, dur))

    def write(self, folder: Path, name: str = "100_results.db", suffix: str = "_0000aa_bb") -> Path:
        """Add the tables to a file: a second builder with another suffix adds another process."""
        path = folder / name
        self.rows["string"] = [{"id": number, "string": text} for text, number in self.strings.items()]
        with sqlite3.connect(path) as database:
            for table, columns in SCHEMA.items():
                database.execute(f"CREATE TABLE `rocpd_{table}{suffix}` ({columns})")
                database.execute(
                    f"CREATE VIEW IF NOT EXISTS `rocpd_{table}` AS SELECT * FROM `rocpd_{table}{suffix}`"
                )
                for values in self.rows[table]:
                    named, slots = ", ".join(f'"{each}"' for each in values), ", ".join("?" * len(values))
                    sql = f"INSERT INTO `rocpd_{table}{suffix}` ({named}) VALUES ({slots})"
                    database.execute(sql, list(values.values()))
        database.close()
        return path


def _span(ts: float, dur: float) -> dict[str, int]:
    return {"start": round(ts * 1000), "end": round((ts + dur) * 1000)}


def training_run(num_steps: int = 4) -> RocpdBuilder:
    """Steps of 1,000 µs: an op with a kernel of 100 µs forward and one backward, and a copy of 50 µs to the host."""
    run = RocpdBuilder()
    for step in range(num_steps):
        at = 1000 * step
        run.range(f"step {step}", at, 990)
        run.range(f"aten::mm, seq = {step}, op_id = {step}, sizes = [[64, 32], [32, 16]]", at + 20, 50)
        run.launch("Cijk_Ailk_Bljk_HHS", at + 30, runs=(at + 60, 100))
        run.range(f"autograd::engine::evaluate_function: MmBackward0, seq = {step}, op_id = 9", at + 320, 50)
        run.launch("Cijk_Alik_Bljk_HHS", at + 330, runs=(at + 360, 100))
        run.copy("DEVICE_TO_HOST", at + 700, 50, 4, to_host=True)
    return run

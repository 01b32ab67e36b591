"""Reads the SQLite export of Nsight Systems as a `Trace`, with the tables that a Kineto trace gives.

An id of a process (`globalPid`) and of a thread (`globalTid`) share all but their last 24 bits, which are the thread.
"""

from collections.abc import Callable, Iterator

import polars as pl

from stepscope.errors import TraceError
from stepscope.trace.columns import Label, Thread
from stepscope.trace.databases.event_rows import EventRows, json_list, with_op_parts
from stepscope.trace.databases.sqlite_file import Database
from stepscope.trace.tables import DEVICE_TABLE, HOST, SYNCS, Trace, TraceFacts

_CUPTI = "CUPTI_ACTIVITY_KIND_"
KERNELS, GRAPHS, COPIES, FILLS = (_CUPTI + name for name in ("KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET"))
_GPU_TABLES = (KERNELS, GRAPHS, COPIES, FILLS)
_CALLS, _WAITS, _RECORDS = (_CUPTI + name for name in ("RUNTIME", "SYNCHRONIZATION", "CUDA_EVENT"))
_RANGES = "NVTX_EVENTS"
_OF_NSIGHT = {*_GPU_TABLES, _CALLS, _RANGES}
_OVERHEADS = ("PROFILER_OVERHEAD", _CUPTI + "OVERHEAD")
_RANGE_TYPES = [59, 60, 70, 71]  # push and pop, start and end; the same two, imported from text
_PROCESS_BITS = 24
_MOST_GPUS = 1024

# As CUPTI numbers them, and as Kineto names them.
_DIRECTIONS = ("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP", "HtoD", "DtoH", "DtoD")
_MEMORIES = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
_SYNC_TYPES = ("Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync")
_NO_STREAM = 2**32 - 1

_ABI = r"(_ptsz|_ptds)?_v\d{4,5}$"  # of `cudaLaunchKernel_v7000`
_RECORD_OPS = "`nsys profile --pytorch=autograd-shapes-nvtx` records them"


def is_nsight(database: Database) -> bool:
    return bool(_OF_NSIGHT & {*database.tables, *database.not_plain})


def gpu_processes(database: Database) -> list[int]:
    """Return the processes that used a GPU, by GPU and then by number; empty if the export does not tell."""
    _check(database)
    used = [database.read(table, ("globalPid", "deviceId"), is_distinct=True) for table in _GPU_TABLES]
    by_process = pl.concat(used).drop_nulls("globalPid").group_by(_process("globalPid"))
    return by_process.agg(pl.col("deviceId").min()).sort("deviceId", "globalPid")["globalPid"].to_list()


def read_nsight(database: Database, process: int | None, progress: Callable[[float], None]) -> Trace:
    """Return one process of an export; all of it if none is named."""
    _check(database)
    return _Reading(database, process, progress).run()


def _check(database: Database) -> None:
    if not is_nsight(database):
        raise TraceError(
            f"{database.path} is an SQLite database without the tables of Nsight Systems ({KERNELS}, {_CALLS}, "
            f"{_RANGES}) or of rocprofv3: export a report that traced CUDA or NVTX with `nsys export --type sqlite`"
        )


def _process(column: str) -> pl.Expr:
    return pl.col(column) // (1 << _PROCESS_BITS)


class _Reading(EventRows):
    def run(self) -> Trace:
        strings = self.database.read("StringIds", ("id",), ("value",))
        self.strings = strings.drop_nulls("id").unique("id", keep="first")
        for share, read in enumerate((self._calls, self._ranges, self._overheads, self._gpu_work, self._waits)):
            self.progress(share / 5)
            read()
        facts = self._facts()
        return self.finish(self._threads(), self._labels(), facts, self._unknown(facts))

    def _read(self, table: str, integers: tuple[str, ...], texts: tuple[str, ...] = ()) -> pl.DataFrame:
        """Return the rows of the process, with `start_ns` and `duration_ns`."""
        owner = "globalPid" if "globalPid" in integers else "globalTid"
        frame = self.database.read(table, ("start", "end", *integers), texts)
        if self.process is not None:
            frame = frame.filter(_process(owner).fill_null(self.process) == self.process)
        length = (pl.col("end") - pl.col("start")).alias("duration_ns")
        return frame.with_columns(length, start_ns="start").drop("start", "end")

    def _named(self, frame: pl.DataFrame, *columns: str) -> pl.DataFrame:
        ids = (frame.select(id=column) for column in columns)
        texts = [each.join(self.strings, on="id", how="left", maintain_order="left")["value"] for each in ids]
        return frame.with_columns(name=pl.coalesce(texts)).drop(columns)

    def _calls(self) -> None:
        calls = self._read(_CALLS, ("globalTid", "correlationId", "nameId"))
        named = self._named(calls, "nameId").with_columns(pl.col("name").str.replace(_ABI, ""))
        kind = pl.when(pl.col("name").str.contains("^cu[A-Z]")).then(pl.lit("driver")).otherwise(pl.lit("runtime"))
        calls = self.on_thread(named.rename({"correlationId": "correlation"}), "globalTid", kind)
        self.keep(_CALLS, HOST.name, calls)

    def _ranges(self) -> None:
        found = self._read(_RANGES, ("globalTid", "eventType", "textId"), ("text",))
        # Marks and names of threads have no end, nor has a range that was open when recording stopped.
        ranges = found.filter(pl.col("eventType").is_in(_RANGE_TYPES), pl.col("duration_ns").is_not_null())
        self.counts["X", _RANGES, None] += found.height - ranges.height
        named = self._named(ranges, "textId").with_columns(pl.coalesce("text", "name").alias("text"))
        parts, kind = with_op_parts(named.drop("name", "eventType"))
        self.keep(_RANGES, HOST.name, self.on_thread(parts, "globalTid", kind))

    def _overheads(self) -> None:
        for table in _OVERHEADS:
            found = self._named(self._read(table, ("globalTid", "nameId")), "nameId")
            self.keep(table, HOST.name, self.on_thread(found, "globalTid", "overhead"))

    def _gpu_work(self) -> None:
        names = ("demangledName", "shortName", "mangledName")
        sizes = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
        memory = ("staticSharedMemory", "dynamicSharedMemory")
        kernels = self._named(self._on_stream(KERNELS, (*names, *sizes, *memory, "registersPerThread")), *names)
        shared = pl.sum_horizontal(memory, ignore_nulls=False)
        grid, block = json_list(sizes[:3]), json_list(sizes[3:])
        kernels = kernels.with_columns(grid=grid, block=block, shared_memory_bytes=shared)
        self.keep_on_gpu(KERNELS, "kernel", kernels.drop(*sizes, *memory))
        graphs = self._on_stream(GRAPHS, ())
        self.keep_on_gpu(GRAPHS, "kernel", graphs.with_columns(name=pl.format("CUDA graph {}", "graph")))
        if not graphs.is_empty():
            self.warnings.append(
                f"{graphs.height:,} CUDA graph launches were recorded without their kernels: each counts as one "
                "kernel. `nsys profile --cuda-graph-trace=node` records the kernels"
            )
        copies = self._on_stream(COPIES, ("bytes", "copyKind", "srcKind", "dstKind"))
        places = [_text_of(kind, _MEMORIES, 0) for kind in ("srcKind", "dstKind")]
        name = pl.format("Memcpy {} ({} -> {})", _text_of("copyKind", _DIRECTIONS, 1), *places)
        self.keep_on_gpu(COPIES, "memcpy", copies.with_columns(name=name).drop("copyKind", "srcKind", "dstKind"))
        fills = self._on_stream(FILLS, ("bytes", "memKind"))
        name = pl.format("Memset ({})", _text_of("memKind", _MEMORIES, 0))
        self.keep_on_gpu(FILLS, "memset", fills.with_columns(name=name).drop("memKind"))

    def _on_stream(self, table: str, integers: tuple[str, ...]) -> pl.DataFrame:
        where = ("globalPid", "deviceId", "streamId", "correlationId", "graphId", "graphNodeId")
        frame = self._read(table, (*where, *integers))
        renamed = {
            "deviceId": "device", "streamId": "stream", "correlationId": "correlation", "graphId": "graph",
            "graphNodeId": "graph_node", "registersPerThread": "registers_per_thread",
        }  # fmt: skip
        typed = frame.with_columns(pl.col("deviceId").cast(pl.Int32, strict=False)).drop("globalPid")
        return typed.rename(renamed, strict=False)

    def _waits(self) -> None:
        waits = self._on_stream(_WAITS, ("syncType", "eventId", "eventSyncId"))
        # With `--cuda-event-trace=true`: where the event was recorded that is waited for.
        event = ["eventId", "eventSyncId"]
        records = self.database.read(_RECORDS, ("globalPid", "streamId", "correlationId", *event)).drop_nulls(event)
        if self.process is not None:
            records = records.filter(_process("globalPid") == self.process)
        records = records.unique(event, keep="first", maintain_order=True)
        records = records.select(*event, wait_on_stream="streamId", wait_on_correlation="correlationId")
        waits = waits.join(records, on=event, how="left", maintain_order="left").with_columns(
            pl.when(pl.col("stream") != _NO_STREAM).then("stream").alias("stream"),
            name=_text_of("syncType", _SYNC_TYPES, 1),
        )
        self.keep(_WAITS, SYNCS.name, waits.drop("graph", "graph_node", "syncType", *event))

    def _labels(self) -> Iterator[Label]:
        processes = self.database.read("PROCESSES", ("globalPid",), ("name",)).select(_process("globalPid"), "name")
        threads = self._named(self.database.read("ThreadNames", ("globalTid", "nameId")), "nameId")
        by_process, by_thread = dict(processes.iter_rows()), dict(threads.iter_rows())
        for key, (pid, tid) in zip(self.threads, self._threads()):
            names = {"process_name": by_process.get(key >> _PROCESS_BITS), "thread_name": by_thread.get(key)}
            yield from ((pid, tid, what, name) for what, name in names.items() if name)

    def _threads(self) -> list[Thread]:
        return [(str(key >> _PROCESS_BITS & 0xFFFFFF), str(key & 0xFFFFFF)) for key in self.threads]

    def _facts(self) -> TraceFacts:
        read = self.database.read
        gpus = read("TARGET_INFO_GPU", ("id",), ("name",)).filter(pl.col("id").is_between(0, _MOST_GPUS))
        begin = read("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",))["utcEpochNs"].drop_nulls()
        about = [read(table, (), ("name", "value")) for table in ("META_DATA_EXPORT", "EXPORT_META_DATA")]
        known = dict(pl.concat(about).iter_rows())
        names = {f"nsight_systems_{what}_version": f"EXPORT_{what.upper()}_VERSION" for what in ("product", "schema")}
        versions = {name: known.get(written) or "" for name, written in names.items()}
        return self.facts(dict(gpus.iter_rows()), versions, begin[0] if len(begin) else 0)

    def _unknown(self, facts: TraceFacts) -> Iterator[str]:
        """Yield what the export cannot tell, and how to record it if Nsight Systems can."""
        if not self.has(DEVICE_TABLE.name, "kernel"):
            yield "the export has no kernels: record with `nsys profile --trace=cuda,nvtx`"
        if not self.has(HOST.name, "op"):
            yield f"the export has no PyTorch ops, so all time between CUDA calls counts as Python: {_RECORD_OPS}"
        elif not facts.has_shapes:
            yield f"the export has ops without shapes, so FLOPs and bytes are unknown: {_RECORD_OPS}"
        yield "Nsight Systems does not record dtypes, strides, Python stacks or the memory of tensors"


def _text_of(column: str, texts: tuple[str, ...], first: int) -> pl.Expr:
    """Return the texts of numbers that count from `first`; `Unknown` for others."""
    return pl.col(column).replace_strict(dict(enumerate(texts, first)), default="Unknown", return_dtype=pl.String)

"""Reads the SQLite export of Nsight Systems as a `Trace`, with the tables that a Kineto trace gives.

An id of a process (`globalPid`) and of a thread (`globalTid`) share all but their last 24 bits, which are the thread.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from stepscope.errors import TraceError
from stepscope.trace.assemble import Assembler
from stepscope.trace.columns import Columns, Label, Numbers, Thread, with_sound_times
from stepscope.trace.decode import Decoded
from stepscope.trace.scan import Problems
from stepscope.trace.sqlite_file import Database
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
_EMITTED = (
    r"^(?P<op>.*?)(?:, seq = (?P<sequence>\d{1,18}))?(?:, op_id = (?P<id>\d{1,18}))?"
    r"(?:, sizes = (?P<shapes>\[[\[\]\d, -]*\]))?(?:, input_op_ids = \[.*\])?$"
)
"""The text that `torch.autograd.profiler.emit_nvtx` gives an op: the parts that it knows, in this order."""
_OP = r"^\w+::[\w:.]+$|^autograd::engine::evaluate_function: "
_BACKWARD = r"^autograd::engine::evaluate_function: |Backward\d*$|^torch::autograd::"

_RECORD_OPS = "`nsys profile --pytorch=autograd-shapes-nvtx` records them"


def is_nsight(path: Path) -> bool:
    """Return False only for an SQLite database that surely is something else."""
    try:
        with Database(path) as database:
            return bool(_OF_NSIGHT & {*database.tables, *database.not_plain})
    except TraceError:
        return True  # and the reader says what is wrong with it


def gpu_processes(path: Path) -> list[int]:
    """Return the processes in an export that used a GPU, by GPU and then by number; empty if it does not tell."""
    with _opened(path) as database:
        used = [database.read(table, ("globalPid", "deviceId"), is_distinct=True) for table in _GPU_TABLES]
    by_process = pl.concat(used).drop_nulls("globalPid").group_by(_process("globalPid"))
    return by_process.agg(pl.col("deviceId").min()).sort("deviceId", "globalPid")["globalPid"].to_list()


def read_nsight(path: Path, process: int | None = None, progress: Callable[[float], None] | None = None) -> Trace:
    """Return one process of an export; all of it if none is named."""
    with _opened(path) as database:
        return _Reading(database, process, progress or (lambda _: None)).run()


def _opened(path: Path) -> Database:
    database = Database(path)
    if not _OF_NSIGHT & {*database.tables, *database.not_plain}:
        with database:
            is_rocpd = any("rocpd" in name for name in database.tables)
        if is_rocpd:
            raise TraceError(
                f"{path} is a database of rocprofv3, which Stepscope cannot read: record with torch.profiler"
            )
        raise TraceError(
            f"{path} is an SQLite database without the tables of Nsight Systems ({KERNELS}, {_CALLS}, {_RANGES}): "
            "export a report that traced CUDA or NVTX with `nsys export --type sqlite`"
        )
    return database


def _process(column: str) -> pl.Expr:
    return pl.col(column) // (1 << _PROCESS_BITS)


@dataclass
class _Reading:
    database: Database
    process: int | None
    progress: Callable[[float], None]
    warnings: list[str] = field(default_factory=list)
    frames: dict[str, list[pl.DataFrame]] = field(default_factory=dict)
    counts: Counter[tuple[str, str, str | None]] = field(default_factory=Counter)
    threads: Numbers = field(default_factory=Numbers)
    num_events: int = 0

    def run(self) -> Trace:
        strings = self.database.read("StringIds", ("id",), ("value",))
        self.strings = strings.drop_nulls("id").unique("id", keep="first")
        for share, read in enumerate((self._calls, self._ranges, self._overheads, self._gpu_work, self._waits)):
            self.progress(share / 5)
            read()
        if not self.num_events:
            raise TraceError(f"{self.database.path} has no events that can be read")
        assembler = Assembler()
        frames = {name: pl.concat(parts, how="diagonal") for name, parts in self.frames.items()}
        columns = Columns(frames, self.num_events, self.counts, self._threads(), list(self._labels()))
        assembler.add(Decoded(columns, Problems(), 0, is_closed=True, is_lost=False))
        facts = self._facts(frames.get(HOST.name, HOST.empty()))
        return assembler.finish(self.database.path, facts, [*self.warnings, *self._unknown(frames, facts)])

    def _read(self, table: str, integers: tuple[str, ...], texts: tuple[str, ...] = ()) -> pl.DataFrame:
        """Return the rows of the process, with `start_ns` and `duration_ns`."""
        owner = "globalPid" if "globalPid" in integers else "globalTid"
        frame = self.database.read(table, ("start", "end", *integers), texts)
        if self.process is not None:
            frame = frame.filter(_process(owner).fill_null(self.process) == self.process)
        length = (pl.col("end") - pl.col("start")).alias("duration_ns")
        return frame.with_columns(length, start_ns="start").drop("start", "end")

    def _keep(self, source: str, table: str, frame: pl.DataFrame) -> None:
        """Add rows to a table, without those whose times make no sense."""
        if frame.is_empty():
            return
        first = self.num_events
        self.num_events += frame.height
        numbered = frame.with_row_index("event", first).cast({"event": pl.UInt32, "name": pl.Categorical()})
        bad: dict[str, list[int]] = {}
        sound = with_sound_times(numbered, bad)
        self.warnings += [f"{source}: {len(rows):,} rows have {what} and were skipped" for what, rows in bad.items()]
        self.counts["X", source, table] += sound.height
        self.frames.setdefault(table, []).append(sound)

    def _named(self, frame: pl.DataFrame, *columns: str) -> pl.DataFrame:
        """Return the rows with their `name`: the text of the first of the columns that has one."""
        ids = (frame.select(id=column) for column in columns)
        texts = [each.join(self.strings, on="id", how="left", maintain_order="left")["value"] for each in ids]
        return frame.with_columns(name=pl.coalesce(texts)).drop(columns)

    def _on_thread(self, frame: pl.DataFrame, kind: str | pl.Expr) -> pl.DataFrame:
        known = frame["globalTid"].fill_null(0)
        numbers = {key: self.threads[key] for key in known.unique(maintain_order=True)}
        thread = known.replace_strict(numbers, return_dtype=pl.UInt32).alias("thread")
        kind = pl.lit(kind) if isinstance(kind, str) else kind
        return frame.drop("globalTid").with_columns(thread, kind=kind.cast(HOST.schema["kind"]))

    def _calls(self) -> None:
        calls = self._read(_CALLS, ("globalTid", "correlationId", "nameId"))
        named = self._named(calls, "nameId").with_columns(pl.col("name").str.replace(_ABI, ""))
        kind = pl.when(pl.col("name").str.contains("^cu[A-Z]")).then(pl.lit("driver")).otherwise(pl.lit("runtime"))
        self._keep(_CALLS, HOST.name, self._on_thread(named, kind).rename({"correlationId": "correlation"}))

    def _ranges(self) -> None:
        found = self._read(_RANGES, ("globalTid", "eventType", "textId"), ("text",))
        # Marks and names of threads have no end, nor has a range that was open when recording stopped.
        ranges = found.filter(pl.col("eventType").is_in(_RANGE_TYPES), pl.col("duration_ns").is_not_null())
        self.counts["X", _RANGES, None] += found.height - ranges.height
        named = self._named(ranges, "textId").with_columns(pl.coalesce("text", "name").alias("text"))
        parts = named.with_columns(pl.col("text").str.extract_groups(_EMITTED).struct.unnest())
        op, sequence = pl.col("op"), pl.col("sequence")
        is_emitted = sequence.is_not_null() | pl.col("id").is_not_null()
        is_op = is_emitted & (op.str.contains(_OP) | sequence.is_not_null())
        kind = pl.when(is_op).then(pl.lit("op")).otherwise(pl.lit("annotation"))
        ranges = self._on_thread(parts, kind).with_columns(
            pl.when(is_emitted).then("op").otherwise("text").alias("name"),
            sequence.cast(pl.Int64),
            pl.col("shapes").cast(pl.Categorical()),
            # A thread's number is not recorded: one thread is taken to run every forward.
            forward_thread=pl.when(sequence.is_not_null()).then(op.str.contains(_BACKWARD).cast(pl.Int64)),
            record_function=pl.col("id").cast(pl.Int64),
        )
        self._keep(_RANGES, HOST.name, ranges.drop("text", "eventType", "op", "id"))

    def _overheads(self) -> None:
        for table in _OVERHEADS:
            found = self._named(self._read(table, ("globalTid", "nameId")), "nameId")
            self._keep(table, HOST.name, self._on_thread(found, "overhead"))

    def _gpu_work(self) -> None:
        names = ("demangledName", "shortName", "mangledName")
        sizes = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
        memory = ("staticSharedMemory", "dynamicSharedMemory")
        kernels = self._named(self._on_stream(KERNELS, (*names, *sizes, *memory, "registersPerThread")), *names)
        grid, block = (
            pl.concat_str(pl.lit("["), pl.concat_str(each, separator=", "), pl.lit("]")).cast(pl.Categorical())
            for each in (sizes[:3], sizes[3:])
        )
        shared = pl.sum_horizontal(memory, ignore_nulls=False)
        kernels = kernels.with_columns(grid=grid, block=block, shared_memory_bytes=shared)
        self._on_gpu(KERNELS, "kernel", kernels.drop(*sizes, *memory))
        graphs = self._on_stream(GRAPHS, ())
        self._on_gpu(GRAPHS, "kernel", graphs.with_columns(name=pl.format("CUDA graph {}", "graph")))
        if not graphs.is_empty():
            self.warnings.append(
                f"{graphs.height:,} CUDA graph launches were recorded without their kernels: each counts as one "
                "kernel. `nsys profile --cuda-graph-trace=node` records the kernels"
            )
        copies = self._on_stream(COPIES, ("bytes", "copyKind", "srcKind", "dstKind"))
        places = [_text_of(kind, _MEMORIES, 0) for kind in ("srcKind", "dstKind")]
        name = pl.format("Memcpy {} ({} -> {})", _text_of("copyKind", _DIRECTIONS, 1), *places)
        self._on_gpu(COPIES, "memcpy", copies.with_columns(name=name).drop("copyKind", "srcKind", "dstKind"))
        fills = self._on_stream(FILLS, ("bytes", "memKind"))
        name = pl.format("Memset ({})", _text_of("memKind", _MEMORIES, 0))
        self._on_gpu(FILLS, "memset", fills.with_columns(name=name).drop("memKind"))

    def _on_stream(self, table: str, integers: tuple[str, ...]) -> pl.DataFrame:
        where = ("globalPid", "deviceId", "streamId", "correlationId", "graphId", "graphNodeId")
        frame = self._read(table, (*where, *integers))
        renamed = {
            "deviceId": "device", "streamId": "stream", "correlationId": "correlation", "graphId": "graph",
            "graphNodeId": "graph_node", "registersPerThread": "registers_per_thread",
        }  # fmt: skip
        typed = frame.with_columns(pl.col("deviceId").cast(pl.Int32, strict=False)).drop("globalPid")
        return typed.rename(renamed, strict=False)

    def _on_gpu(self, source: str, kind: str, frame: pl.DataFrame) -> None:
        kinds = pl.lit(kind).cast(DEVICE_TABLE.schema["kind"])
        self._keep(source, DEVICE_TABLE.name, frame.with_columns(kind=kinds))

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
        self._keep(_WAITS, SYNCS.name, waits.drop("graph", "graph_node", "syncType", *event))

    def _labels(self) -> Iterator[Label]:
        """Yield the names of the processes and threads that have events."""
        processes = self.database.read("PROCESSES", ("globalPid",), ("name",)).select(_process("globalPid"), "name")
        by_process = dict(processes.iter_rows())
        by_thread = dict(
            self._named(self.database.read("ThreadNames", ("globalTid", "nameId")), "nameId").iter_rows()
        )
        for key, (pid, tid) in zip(self.threads, self._threads()):
            names = {"process_name": by_process.get(key >> _PROCESS_BITS), "thread_name": by_thread.get(key)}
            yield from ((pid, tid, what, name) for what, name in names.items() if name)

    def _threads(self) -> list[Thread]:
        return [(str(key >> _PROCESS_BITS & 0xFFFFFF), str(key & 0xFFFFFF)) for key in self.threads]

    def _facts(self, host: pl.DataFrame) -> TraceFacts:
        gpus = self.database.read("TARGET_INFO_GPU", ("id",), ("name",)).filter(
            pl.col("id").is_between(0, _MOST_GPUS)
        )
        names = dict(gpus.iter_rows())
        begin = self.database.read("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",))["utcEpochNs"].drop_nulls()
        about = [
            self.database.read(table, (), ("name", "value")) for table in ("META_DATA_EXPORT", "EXPORT_META_DATA")
        ]
        known = dict(pl.concat(about).iter_rows())
        versions = {what: known.get(f"EXPORT_{what.upper()}_VERSION") for what in ("product", "schema")}
        return TraceFacts(
            devices=tuple(names.get(i) or "unknown device" for i in range(max(names, default=-1) + 1)),
            base_time_ns=begin[0] if len(begin) else 0,
            has_shapes="shapes" in host.columns and host["shapes"].null_count() < host.height,
            has_stacks=False,
            has_memory=False,
            versions={f"nsight_systems_{what}_version": text[:80] for what, text in versions.items() if text},
        )

    def _unknown(self, frames: dict[str, pl.DataFrame], facts: TraceFacts) -> Iterator[str]:
        """Yield what the export cannot tell, and how to record it if Nsight Systems can."""
        if not (frames.get(DEVICE_TABLE.name, DEVICE_TABLE.empty())["kind"] == "kernel").any():
            yield "the export has no kernels: record with `nsys profile --trace=cuda,nvtx`"
        if not (frames.get(HOST.name, HOST.empty())["kind"] == "op").any():
            yield f"the export has no PyTorch ops, so all time between CUDA calls counts as Python: {_RECORD_OPS}"
        elif not facts.has_shapes:
            yield f"the export has ops without shapes, so FLOPs and bytes are unknown: {_RECORD_OPS}"
        yield "Nsight Systems does not record dtypes, strides, Python stacks or the memory of tensors"


def _text_of(column: str, texts: tuple[str, ...], first: int) -> pl.Expr:
    """Return the texts of numbers that count from `first`; `Unknown` for others."""
    return pl.col(column).replace_strict(dict(enumerate(texts, first)), default="Unknown", return_dtype=pl.String)

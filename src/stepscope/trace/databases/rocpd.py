"""Reads a database of AMD's rocprofv3 (rocpd) as a `Trace`, with the tables that a Kineto trace gives.

The tables of each process have names of their own, `rocpd_region_<id of the process>`; views join them, and are not
used. An event has a number (`stack_id`) that the kernel or copy shares with the call that started it.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress

import polars as pl

from stepscope.errors import TraceError
from stepscope.trace.columns import Label, Thread
from stepscope.trace.databases.event_rows import EventRows, json_list, with_op_parts
from stepscope.trace.databases.sqlite_file import Database
from stepscope.trace.tables import DEVICE_TABLE, HOST, Trace, TraceFacts

KERNELS, REGIONS, COPIES = "rocpd_kernel_dispatch", "rocpd_region", "rocpd_memory_copy"
_EVENTS, _AGENTS, _STRINGS = "rocpd_event", "rocpd_info_agent", "rocpd_string"
_OLDER = "rocpd_op"  # of rocmProfileData, whose module has the same name
_SPAN = ("start", "end")
_KINDS = {"HIP": "runtime", "RCCL": "runtime", "HSA": "driver", "MARKER": "annotation"}
_DIRECTION = r"_(HOST|DEVICE)_TO_(HOST|DEVICE)$"
_RECORD = "`rocprofv3 --hip-trace --kernel-trace --memory-copy-trace --marker-trace` records"
_MOST_GPUS = 1024


def is_rocpd(database: Database) -> bool:
    return any(name.startswith((KERNELS, REGIONS, _OLDER)) for name in (*database.tables, *database.not_plain))


def gpu_processes(database: Database) -> list[int]:
    """Return the processes that have kernels or copies, by GPU and then by number; empty if there are none."""
    first: dict[int, int] = {}
    for number, process in enumerate(_processes(database)):
        for table, agent in ((KERNELS, "agent_id"), (COPIES, "dst_agent_id")):
            for (used,) in database.read(table + process, (agent,), is_distinct=True).iter_rows():
                first[number] = min(first.get(number, _MOST_GPUS), used or 0)
    return sorted(first, key=lambda number: (first[number], number))


def read_rocpd(database: Database, process: int | None, progress: Callable[[float], None]) -> Trace:
    """Return one process of a database; all of it if none is named."""
    return _Reading(database, process, progress).run()


def _processes(database: Database) -> list[str]:
    """Return what the names of each process's tables end with."""
    if any(name.startswith(_OLDER) for name in database.tables):
        raise TraceError(
            f"{database.path} is a database of rocmProfileData, which Stepscope cannot read: record with "
            "rocprofv3 or torch.profiler"
        )
    found = {name[len(each) :] for each in (KERNELS, REGIONS) for name in database.tables if name.startswith(each)}
    for process in found:
        for table in (KERNELS, REGIONS):
            columns = database.tables.get(table + process)
            if columns and not {*_SPAN} <= {*columns}:
                raise TraceError(
                    f"{database.path} is a database of rocprofv3 with a schema that Stepscope cannot read: {table} "
                    "has no start and end. Version 3 can be read. Record with torch.profiler instead"
                )
    return sorted(found)


class _Reading(EventRows):
    def run(self) -> Trace:
        processes = _processes(self.database)
        chosen = processes if self.process is None else processes[self.process : self.process + 1]
        self.gpus: dict[int, str | None] = {}
        self.names: dict[int, dict[str, str | None]] = {}
        versions: dict[str, str] = {}
        for number, self.suffix in enumerate(chosen):
            self.progress(number / len(chosen))
            self._read_process()
            about = dict(self._table("rocpd_metadata", (), ("tag", "value")).iter_rows())
            versions |= {"rocpd_schema_version": about["schema_version"]} if about.get("schema_version") else {}
        facts = self.facts(self.gpus, versions)
        return self.finish(self._threads(), self._labels(), facts, self._unknown(facts))

    def _table(self, table: str, integers: tuple[str, ...], texts: tuple[str, ...] = ()) -> pl.DataFrame:
        return self.database.read(table + self.suffix, integers, texts)

    def _read_process(self) -> None:
        strings = self._table(_STRINGS, ("id",), ("string",)).drop_nulls("id").unique("id", keep="first")
        self.strings = strings.select("id", "string")
        events = self._table(_EVENTS, ("id", "category_id", "stack_id"), ("extdata",))
        self.events = events.drop_nulls("id").unique("id", keep="first").rename({"stack_id": "correlation"})
        agents = self._table(_AGENTS, ("id", "type_index"), ("type", "product_name", "name")).filter(type="GPU")
        agents = agents.filter(pl.col("type_index").is_between(0, _MOST_GPUS))
        agents = agents.drop_nulls("id").unique("id", keep="first")
        self.agents = agents.select("id", device=pl.col("type_index").cast(pl.Int32))
        self.gpus |= dict(agents.select("type_index", pl.coalesce("product_name", "name")).iter_rows())
        self._calls_and_ranges()
        self._kernels()
        self._copies()
        for what, table, columns in (("process_name", "process", ("command",)), ("thread_name", "thread", ("name",))):
            for number, name in self._table(f"rocpd_info_{table}", ("id",), columns).iter_rows():
                self.names.setdefault(number, {})[what] = name and name.split(" ")[0]  # of a command line

    def _read(self, table: str, integers: tuple[str, ...]) -> pl.DataFrame:
        """Return the rows with their event, `start_ns` and `duration_ns`."""
        frame = self._table(table, (*_SPAN, "event_id", *integers))
        length = (pl.col("end") - pl.col("start")).alias("duration_ns")
        frame = frame.with_columns(length, start_ns="start").drop(_SPAN)
        return self._joined(frame, "event_id", self.events)

    def _joined(self, frame: pl.DataFrame, column: str, other: pl.DataFrame) -> pl.DataFrame:
        return frame.join(other, left_on=column, right_on="id", how="left", maintain_order="left").drop(column)

    def _text(self, frame: pl.DataFrame, column: str, name: str) -> pl.DataFrame:
        return self._joined(frame, column, self.strings.rename({"string": name}))

    def _calls_and_ranges(self) -> None:
        found = self._text(self._read(REGIONS, ("pid", "tid", "name_id")), "name_id", "name")
        found = self._text(found, "category_id", "category")
        thread = (pl.col("pid").fill_null(0) & 0x7FFFFFFF) * (1 << 32) + (pl.col("tid").fill_null(0) & 0xFFFFFFFF)
        library = pl.col("category").str.extract("^([A-Z]+)_")
        kind = library.replace_strict(_KINDS, default=None, return_dtype=pl.String)
        found = found.with_columns(key=thread, kind=kind).drop("pid", "tid", "category")
        known = found.filter(pl.col("kind").is_not_null())
        self.counts["X", REGIONS, None] += found.height - known.height
        is_range = pl.col("kind") == "annotation"
        calls = known.filter(~is_range).drop("extdata")
        self.keep(REGIONS, HOST.name, self.on_thread(calls, "key", pl.col("kind")))
        ranges = known.filter(is_range).drop("kind", "correlation")
        text = ranges["extdata"].map_elements(_message, return_dtype=pl.String)
        ranges = ranges.with_columns(text=pl.coalesce(text, "name")).drop("extdata", "name")
        parts, op_or_range = with_op_parts(ranges)
        self.keep(REGIONS, HOST.name, self.on_thread(parts, "key", op_or_range))

    def _kernels(self) -> None:
        sizes = [f"{what}_size_{axis}" for what in ("grid", "workgroup") for axis in "xyz"]
        where = ("agent_id", "stream_id", "queue_id", "kernel_id", "group_segment_size")
        kernels = self._read(KERNELS, (*where, *sizes)).drop("extdata", "category_id")
        symbols = self._table("rocpd_info_kernel_symbol", ("id",), ("display_name", "kernel_name"))
        symbols = symbols.select("id", name=pl.coalesce("display_name", "kernel_name")).drop_nulls("id")
        kernels = self._joined(kernels, "kernel_id", symbols.unique("id", keep="first"))
        # rocprofv3 counts the threads of a grid, and CUDA its blocks.
        blocks = [(pl.col(grid) + pl.col(block) - 1) // pl.col(block) for grid, block in zip(sizes[:3], sizes[3:])]
        grid, block = json_list(blocks), json_list(sizes[3:])
        kernels = kernels.with_columns(grid=grid, block=block, shared_memory_bytes="group_segment_size")
        self._keep_on_stream(KERNELS, "kernel", kernels.drop(sizes, "group_segment_size"))

    def _copies(self) -> None:
        copies = self._read(COPIES, ("src_agent_id", "dst_agent_id", "stream_id", "queue_id", "name_id", "size"))
        named = self._text(copies.drop("extdata", "category_id"), "name_id", "what")
        ends = [pl.col("what").str.extract(_DIRECTION, group) for group in (1, 2)]
        places = [end.str.to_titlecase().fill_null("Unknown") for end in ends]
        letters = [end.str.head(1).fill_null("?") for end in ends]
        named = named.with_columns(
            name=pl.format("Memcpy {}to{} ({} -> {})", *letters, *places),
            agent_id=pl.when(ends[1] == "HOST").then("src_agent_id").otherwise("dst_agent_id"),
            bytes="size",
        )
        self._keep_on_stream(COPIES, "memcpy", named.drop("src_agent_id", "dst_agent_id", "what", "size"))

    def _keep_on_stream(self, source: str, kind: str, frame: pl.DataFrame) -> None:
        placed = self._joined(frame, "agent_id", self.agents)
        placed = placed.with_columns(stream=pl.coalesce("stream_id", "queue_id")).drop("stream_id", "queue_id")
        self.keep_on_gpu(source, kind, placed)

    def _threads(self) -> list[Thread]:
        return [(str(key >> 32), str(key & 0xFFFFFFFF)) for key in self.threads]

    def _labels(self) -> Iterator[Label]:
        for key, (pid, tid) in zip(self.threads, self._threads()):
            for what, number in (("process_name", key >> 32), ("thread_name", key & 0xFFFFFFFF)):
                if name := self.names.get(number, {}).get(what):
                    yield pid, tid, what, name

    def _unknown(self, facts: TraceFacts) -> Iterator[str]:
        """Yield what the database cannot tell, and how to record it if rocprofv3 can."""
        if not self.has(DEVICE_TABLE.name, "kernel"):
            yield f"the database has no kernels: {_RECORD} them"
        if not self.has(DEVICE_TABLE.name, "memcpy"):
            yield f"the database has no copies: {_RECORD} them"
        if not self.has(HOST.name, "op"):
            yield (
                "the database has no PyTorch ops, so all time between HIP calls counts as Python: put `with "
                "torch.autograd.profiler.emit_nvtx(record_shapes=True):` around the loop and add --marker-trace"
            )
        elif not facts.has_shapes:
            yield "the ops have no shapes, so FLOPs and bytes are unknown: emit_nvtx(record_shapes=True) records them"
        yield (
            "rocprofv3 does not record dtypes, strides, Python stacks, the memory of tensors, waits between streams "
            "or the sizes of fills"
        )


def _message(data: str | None) -> str | None:
    """Return the text of a range: `{"message": "step 1"}`, or the beginning of a text that is too long."""
    for text in (data or "{}", f'{data}"}}'):
        with suppress(ValueError, RecursionError):
            found = json.loads(text)
            message = found.get("message") if isinstance(found, dict) else None
            return message if isinstance(message, str) else None
    return None

"""A trace as tables: every column with its type and meaning (`docs/tables.md` is generated from here)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.trace.scan import Problem
from stepscope.trace.values import integer

SCHEMA_VERSION = 1

HOST_KINDS = ("op", "annotation", "runtime", "driver", "python", "overhead", "other")
DEVICE_KINDS = ("kernel", "memcpy", "memset")

# Lower-case category names of any profiler version → table and kind. A complete event of another category is a host
# event of kind `other`.
_DRIVERS = ("cuda_driver", "privateuse1_driver", "xpu_driver")
_RUNTIMES = ("cuda_runtime", "runtime", "hip_runtime", "xpu_runtime", "mtia_runtime", "privateuse1_runtime")
CATEGORIES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("cpu_op", "operator"), ("host", "op")),
    "user_annotation": ("host", "annotation"),
    **dict.fromkeys(_RUNTIMES, ("host", "runtime")),
    **dict.fromkeys(_DRIVERS, ("host", "driver")),
    **dict.fromkeys(("python_function", "python"), ("host", "python")),
    "overhead": ("host", "overhead"),
    "kernel": ("device", "kernel"),
    **dict.fromkeys(("gpu_memcpy", "memcpy"), ("device", "memcpy")),
    **dict.fromkeys(("gpu_memset", "memset"), ("device", "memset")),
    "gpu_user_annotation": ("device_ranges", ""),
    **dict.fromkeys(("cuda_sync", "hip_sync"), ("syncs", "")),
}


@dataclass(frozen=True)
class Column:
    """A column: its type and what it means."""

    name: str
    dtype: pl.DataType | type[pl.DataType]
    doc: str


@dataclass(frozen=True)
class Table:
    """One of a trace's tables."""

    name: str
    doc: str
    columns: tuple[Column, ...]

    @cached_property
    def schema(self) -> pl.Schema:
        return pl.Schema({column.name: column.dtype for column in self.columns})

    def empty(self) -> pl.DataFrame:
        return pl.DataFrame(schema=self.schema)


EVENT = Column("event", pl.UInt32, "Position of the event in the file; identifies it across all tables.")
NAME = Column("name", pl.Categorical(), "Name as recorded.")
THREAD = Column("thread", pl.UInt32, "Row of `threads`.")
START = Column("start_ns", pl.Int64, "Start on the trace's own clock, exact.")
DURATION = Column("duration_ns", pl.Int64, "Duration, exact.")
CORRELATION = Column("correlation", pl.Int64, "Joins a launch to the work it put on the device.")
EXTERNAL_ID = Column("external_id", pl.Int64, "Joins a launch and its device work to the op around them.")
DEVICE = Column("device", pl.Int32, "Index of the device.")
STREAM = Column("stream", pl.Int64, "Stream on the device.")
_ON_STREAM = (EVENT, NAME, DEVICE, STREAM, START, DURATION)

HOST = Table(
    "host",
    "CPU activity: ops, annotations, runtime and driver calls, Python functions; by thread and time.",
    (
        EVENT,
        Column("kind", pl.Enum(HOST_KINDS), f"One of {', '.join(f'`{kind}`' for kind in HOST_KINDS)}."),
        NAME,
        THREAD,
        START,
        DURATION,
        CORRELATION,
        EXTERNAL_ID,
        Column("record_function", pl.Int64, "Number of the call, the same in an execution trace of the run."),
        Column("sequence", pl.Int64, "Autograd's sequence number: the same in a forward op and its backward."),
        Column("forward_thread", pl.Int64, "Autograd's number for the forward thread; 0 in the forward itself."),
        Column("shapes", pl.Categorical(), "Sizes of the inputs, JSON as recorded."),
        Column("dtypes", pl.Categorical(), "Types of the inputs, JSON as recorded."),
        Column("strides", pl.Categorical(), "Strides of the inputs, JSON as recorded."),
        Column("inputs", pl.Categorical(), "Values of the inputs that are not tensors, JSON as recorded."),
        Column("stack", pl.Categorical(), "Call stack of an op, frames separated by `;` (old profilers)."),
        Column(
            "parent", pl.UInt32, "Row of this table, from 0: the innermost event of the thread open at its start."
        ),
        Column("self_ns", pl.Int64, "The part of the duration that no event inside covers."),
    ),
)

DEVICE_TABLE = Table(
    "device",
    "GPU activity: kernels, copies and fills.",
    (
        EVENT,
        Column("kind", pl.Enum(DEVICE_KINDS), f"One of {', '.join(f'`{kind}`' for kind in DEVICE_KINDS)}."),
        NAME,
        DEVICE,
        STREAM,
        START,
        DURATION,
        CORRELATION,
        EXTERNAL_ID,
        Column("bytes", pl.Int64, "Bytes copied or filled."),
        Column("grid", pl.Categorical(), "Blocks of a kernel, JSON as recorded."),
        Column("block", pl.Categorical(), "Threads of a block, JSON as recorded."),
        Column("registers_per_thread", pl.Int64, "Registers per thread."),
        Column("shared_memory_bytes", pl.Int64, "Shared memory per block."),
        Column("occupancy_percent", pl.Float64, "Occupancy estimated by the profiler."),
        Column("graph", pl.Int64, "Number of the CUDA graph that the work belongs to, if recorded."),
        Column("graph_node", pl.Int64, "Its node in that graph."),
    ),
)

DEVICE_RANGES = Table(
    "device_ranges",
    "Annotations as the profiler drew them on the GPU: first to last kernel launched inside.",
    (*_ON_STREAM, EXTERNAL_ID),
)

SYNCS = Table(
    "syncs",
    "Synchronizations reported by the driver (only if enabled in the profiler).",
    (
        *_ON_STREAM,
        CORRELATION,
        EXTERNAL_ID,
        Column("wait_on_stream", pl.Int64, "The stream waited for."),
        Column("wait_on_correlation", pl.Int64, "Correlation of the event record waited for."),
    ),
)

MEMORY = Table(
    "memory",
    "Every allocation and free recorded by the profiler.",
    (
        EVENT,
        THREAD,
        Column("time_ns", pl.Int64, "Time on the trace's own clock."),
        Column("device_type", pl.Int64, "PyTorch's number: 0 is the CPU, 1 CUDA, 6 HIP."),
        DEVICE,
        Column("address", pl.Int64, "Address of the block."),
        Column("bytes", pl.Int64, "Bytes allocated; negative when freed."),
        Column("allocated_bytes", pl.Int64, "Bytes allocated after it."),
        Column("reserved_bytes", pl.Int64, "Bytes reserved after it."),
    ),
)

COLLECTIVES = Table(
    "collectives",
    "Collectives: one row for each op or kernel with information about one.",
    (
        EVENT,
        Column("collective", pl.Categorical(), "Its name."),
        Column("dtype", pl.Categorical(), "Type of the elements."),
        Column("num_in_elements", pl.Int64, "Elements each rank sends."),
        Column("num_out_elements", pl.Int64, "Elements each rank receives."),
        Column("group_size", pl.Int64, "Ranks taking part."),
        Column("group", pl.Categorical(), "Name of the process group."),
        Column("group_ranks", pl.Categorical(), "Ranks of the group as recorded; may be abridged by the profiler."),
    ),
)

THREADS = Table(
    "threads",
    "Threads of the processes in the trace, and streams that the trace names.",
    (
        THREAD,
        Column("pid", pl.String, "Process, as recorded."),
        Column("tid", pl.String, "Thread, as recorded."),
        Column("process_name", pl.String, "Name of the process."),
        Column("process_labels", pl.String, "Its labels: `CPU`, `GPU 0`."),
        Column("thread_name", pl.String, "Name of the thread."),
    ),
)

COUNTS = Table(
    "counts",
    "Number of events in the file, including those in no table.",
    (
        Column("phase", pl.String, "The format's own letter: `X` complete, `s` and `f` flow, `M` metadata…"),
        Column("category", pl.String, "Category as recorded."),
        Column("table", pl.String, "The table that contains them; null if they are only counted."),
        Column("num_events", pl.Int64, "How many."),
    ),
)

TABLES: tuple[Table, ...] = (HOST, DEVICE_TABLE, DEVICE_RANGES, SYNCS, MEMORY, COLLECTIVES, THREADS, COUNTS)


@dataclass(frozen=True)
class TraceFacts:
    """What a trace says about itself."""

    rank: int | None = None
    world_size: int | None = None
    devices: tuple[str, ...] = ()  # names of the machine's devices, by index
    base_time_ns: int = 0  # add to the trace's clock to get nanoseconds since 1970, if known
    has_shapes: bool | None = None
    has_stacks: bool | None = None
    has_memory: bool | None = None
    versions: dict[str, str] = field(default_factory=dict)  # of driver, runtime and tracer, as recorded
    is_cut_off: bool = False  # whether the file ended, or became unreadable, before its list of events was closed


@dataclass(frozen=True)
class Trace:
    """A trace as tables."""

    path: Path
    facts: TraceFacts
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    num_events: int
    host: pl.DataFrame
    device: pl.DataFrame
    device_ranges: pl.DataFrame
    syncs: pl.DataFrame
    memory: pl.DataFrame
    collectives: pl.DataFrame
    threads: pl.DataFrame
    counts: pl.DataFrame
    compiler: Mapping[str, Any] | None = None  # `compile.json` of the trace's recording; None for other traces

    @property
    def num_problems(self) -> int:
        """Events, or stretches between events, that could not be read as they are."""
        return sum(problem.num for problem in self.problems)


def facts_of(fields: dict[str, Any]) -> TraceFacts:
    """Return the metadata from a trace's top-level fields; missing or malformed ones are omitted."""
    distributed = fields.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    properties = fields.get("deviceProperties")
    devices = [p for p in properties if isinstance(p, dict)] if isinstance(properties, list) else []
    return TraceFacts(
        rank=integer(distributed.get("rank")),
        world_size=integer(distributed.get("world_size")),
        devices=tuple(str(device.get("name", "unknown device"))[:200] for device in devices),
        base_time_ns=integer(fields.get("baseTimeNanoseconds")) or 0,
        has_shapes=_flag(fields.get("record_shapes")),
        has_stacks=_flag(fields.get("with_stack")),
        has_memory=_flag(fields.get("profile_memory")),
        versions={
            key: str(value)[:80] for key, value in fields.items() if key.endswith("_version") and len(key) < 80
        },
    )


def _flag(value: Any) -> bool | None:
    number = integer(value)
    return None if number is None else bool(number)

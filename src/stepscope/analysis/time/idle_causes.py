"""GPU idle time by cause: every nanosecond, by what the host did in the meantime."""

import polars as pl

from stepscope.analysis.structure.intervals import complement, last_covering, spans, sweep
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import matches
from stepscope.analysis.structure.once import once

CAUSES = {
    "launch": "The host was inside an op or a launch, and the GPU waited for the next kernel: launch-bound.",
    "synchronization": "The host waited for the GPU, so nothing was queued when the GPU finished.",
    "data": "The host was fetching the next batch.",
    "allocator": "The host was in the driver's allocator (`cudaMalloc`, `cudaFree`…).",
    "python": "The host ran Python with no op open.",
    "compile": "The host was compiling, loading code, capturing a graph, or spent over a millisecond in one op or "
    "launch before its kernel, as when libraries plan or tune and drivers load code.",
    "other_ranks": "The host waited for other ranks.",
    "queued": "The kernel was launched but did not start: a stream, an event or the device blocked it.",
    "unknown": "The trace does not show what launched the next kernel.",
}

ALLOCATING = (
    r"(?i:^(cuda|hip)(Malloc|Free|HostAlloc|HostMalloc|MallocHost|FreeHost|MemPool)"
    r"|^cuMem(Alloc|Free|Create|Map|Unmap|Release|AddressReserve))"
)
# Names that identify a host event, tried in this order.
_NAMES = {
    "synchronization": r"(?i:^(cuda|hip|cu)\w*Synchronize|^cudaMemcpy(_|$)|^hipMemcpy(WithStream)?$)",
    "allocator": ALLOCATING,
    "compile": r"_dynamo/convert_frame|_inductor/(compile_fx|graph|scheduler|select_algorithm)"
    r"|triton/compiler|dynamo_timed|^cu(Module|Library)(Load|Unload)|^hipModule(Load|Unload)"
    r"|^(cuda|hip)GraphInstantiate|Lazy Function Loading",
    "other_ranks": r"(?i:^(c10d::|gloo:|nccl:barrier|nccl:.*wait|mpi:|ncclComm|ncclGroupEnd))",
}

_CAPTURE = r"^(cuda|hip)Stream(Begin|End)Capture"
_WORK = ["op", "runtime", "driver"]
_CAUSE: pl.DataType = pl.Enum(list(CAUSES))
_GAPS = pl.Schema([("gap", pl.UInt32()), ("start_ns", pl.Int64()), ("end_ns", pl.Int64()), ("cause", _CAUSE)])
_LONGEST_NS = 2**62
PLANNING_NS = 1_000_000  # ops and launches take the host microseconds; from a millisecond on, they do something else


@once
def idle_gaps(linked: Linked) -> pl.DataFrame:
    """Return every GPU idle stretch cut by cause: `gap`, `start_ns`, `end_ns`, `cause`.

    `gap` numbers the stretches between consecutive GPU work; its parts cover it without gaps.
    """
    device = linked.device
    if device.is_empty():
        return pl.DataFrame(schema=_GAPS)
    first, last = int(device["start_ns"].min()), int(device["end_ns"].max())  # type: ignore[arg-type]  # numbers
    gaps = with_next_work(complement(spans(device), first, last).with_row_index("gap"), device)
    gaps = gaps.with_columns(
        linked.host["thread"].gather(gaps["launch"]),
        linked.host["end_ns"].gather(gaps["launch"]).alias("launch_end_ns"),
    )
    # A launch after its kernel's start is due to clock differences: the whole gap belongs to the launch. A slow
    # launch does other work too, so the thread is examined until it returns.
    is_long = pl.col("launch_end_ns") - pl.col("launch_start_ns") >= PLANNING_NS
    launch = (
        pl.when(pl.col("launch_start_ns") > pl.col("end_ns"))
        .then("start_ns")
        .when(is_long)
        .then(pl.col("launch_end_ns").clip("start_ns", "end_ns"))
        .otherwise(pl.max_horizontal("launch_start_ns", "start_ns"))
    )
    is_queued = pl.col("launch_start_ns") < pl.col("start_ns")
    waiting = pl.when(is_queued).then(pl.lit("queued")).otherwise(pl.lit("launch")).alias("cause")
    has_length = pl.col("end_ns") > pl.col("start_ns")
    known, unknown = gaps.filter(pl.col("launch").is_not_null()), gaps.filter(pl.col("launch").is_null())
    parts = [
        unknown.select("gap", "start_ns", "end_ns", pl.lit("unknown").alias("cause")),
        known.select("gap", launch.alias("start_ns"), "end_ns", waiting),
        by_host(linked, known.select("gap", "start_ns", launch.alias("end_ns"), "thread").filter(has_length)),
    ]
    return pl.concat(parts).filter(has_length).cast({"cause": _CAUSE}).sort("start_ns")


def with_next_work(gaps: pl.DataFrame, device: pl.DataFrame) -> pl.DataFrame:
    """Return gaps with the event that ended each: of those that start with its end, one with a known launch."""
    ending = (
        device.select("start_ns", "launch", "launch_start_ns", "step", "name")
        .filter(pl.col("start_ns").is_in(gaps["end_ns"].implode()))
        .sort("launch_start_ns", nulls_last=True, maintain_order=True)
        .unique("start_ns", keep="first")
        .rename({"start_ns": "end_ns"})
    )
    return gaps.join(ending, on="end_ns", how="left", maintain_order="left")


def by_host(linked: Linked, late: pl.DataFrame) -> pl.DataFrame:
    """Return stretches of threads (`gap`, `start_ns`, `end_ns`, `thread`) cut by the thread's activity (`cause`).

    `cause` is one of `CAUSES`. Stretches of one thread do not overlap.
    """
    if late.is_empty():
        return late.select("gap", "start_ns", "end_ns", pl.lit("python").alias("cause"))
    # One time axis for all threads, one after the other, so that a single pass handles them.
    numbers = late["thread"].unique().sort()
    low_ns, high_ns = int(late["start_ns"].min()), int(late["end_ns"].max())  # type: ignore[arg-type]  # numbers
    if len(numbers) > 1 and len(numbers) * (high_ns - low_ns + 1) >= _LONGEST_NS:  # a trace that spans centuries
        return pl.concat([by_host(linked, part) for part in late.partition_by("thread")])
    shifts = pl.DataFrame({"thread": numbers, "shift_ns": pl.int_range(len(numbers), eager=True)})
    shifts = shifts.with_columns(pl.col("shift_ns") * (high_ns - low_ns + 1))

    def on_axis(spans: pl.DataFrame) -> pl.DataFrame:
        cut = pl.col("start_ns", "end_ns").clip(low_ns, high_ns)
        return spans.join(shifts, on="thread", maintain_order="left").with_columns(cut + pl.col("shift_ns"))

    # Only columns that are needed, of rows that are: these may be most events of a trace.
    span = ("thread", "start_ns", "end_ns")
    every = linked.host.select(*span, "row", "kind", "name", "parent", "self_ns")
    is_on_thread = every["thread"].is_in(numbers.implode())
    is_meanwhile = is_on_thread & (every["end_ns"] > low_ns) & (every["start_ns"] < high_ns)
    special = every.filter(is_meanwhile & matches(every["name"], "|".join(_NAMES.values())))
    sets = {cause: special.filter(matches(special["name"], name)).select(span) for cause, name in _NAMES.items()}
    captures = _captures(every.filter(is_on_thread & matches(every["name"], _CAPTURE)))
    slow = every.filter(is_meanwhile & (every["self_ns"] >= PLANNING_NS))
    sets["compile"] = pl.concat([sets["compile"], captures, _planning(linked, slow)])
    main = pl.lit(linked.steps.main_thread, every.schema["thread"]).alias("thread")
    sets["data"] = linked.steps.phases.filter(pl.col("phase") == "data").select(main, "start_ns", "end_ns")
    # Events inside an op do not add to the time it covers.
    is_work = every["kind"].is_in(_WORK)
    is_inside = is_work.gather(every["parent"]) & (every["end_ns"] <= every["end_ns"].gather(every["parent"]))
    sets["launch"] = every.select(span).filter(is_meanwhile & is_work & ~is_inside.fill_null(False))
    stretches = sweep({"late": on_axis(late), **{name: on_axis(found) for name, found in sets.items()}})
    cause = last_covering(("launch", "data", "other_ranks", "compile", "allocator", "synchronization"), "python")
    found = stretches.filter("late").select("start_ns", "end_ns", cause.alias("cause")).sort("start_ns")
    owners = on_axis(late.select("gap", *span)).select("gap", "shift_ns", pl.col("start_ns").alias("_start"))
    found = found.join_asof(owners.sort("_start"), left_on="start_ns", right_on="_start", check_sortedness=False)
    return found.select("gap", *(pl.col(name) - pl.col("shift_ns") for name in ("start_ns", "end_ns")), "cause")


def _captures(host: pl.DataFrame) -> pl.DataFrame:
    """Return graph captures from begin to end, by `thread`; launches in between are recorded, not run."""
    begins = host.filter(matches(host["name"], r"StreamBeginCapture")).sort("start_ns")
    ends = host.filter(matches(host["name"], r"StreamEndCapture")).sort("start_ns")
    return (
        begins.select("thread", "start_ns")
        .join_asof(
            ends.select("thread", pl.col("start_ns").alias("end_ns")),
            left_on="start_ns",
            right_on="end_ns",
            by="thread",
            strategy="forward",
            check_sortedness=False,
        )
        .drop_nulls()
    )


def _planning(linked: Linked, long: pl.DataFrame) -> pl.DataFrame:
    """Return those of slow ops and calls that launch kernels, with nothing inside that explains their time.

    Copies and graph launches are excluded: their time grows with size.
    """
    kernels = linked.device["launch"].filter(linked.device["kind"] == "kernel")
    launching = pl.concat([linked.device["op"], kernels]).drop_nulls()
    is_other = matches(long["name"], rf"GraphLaunch|{_NAMES['synchronization']}|{_NAMES['allocator']}")
    planned = long.filter(~is_other & long["row"].is_in(launching.implode()))
    return planned.select("thread", "start_ns", "end_ns")


def idle_causes(gaps: pl.DataFrame) -> pl.DataFrame:
    """Return idle time by cause: `cause`, `num_gaps`, `total_ns`, `share`; every cause has a row."""
    sums = gaps.group_by("cause").agg(
        pl.col("gap").n_unique().cast(pl.Int64).alias("num_gaps"),
        (pl.col("end_ns") - pl.col("start_ns")).sum().alias("total_ns"),
    )
    every = pl.DataFrame({"cause": pl.Series(list(CAUSES), dtype=_CAUSE)})
    table = every.join(sums, on="cause", how="left", maintain_order="left").fill_null(0)
    whole = max(1, int(table["total_ns"].sum()))
    return table.with_columns((pl.col("total_ns") / whole).alias("share"))

"""The allocator from a trace: levels over time, memory alive at the peak, allocations for `account`, driver calls."""

from dataclasses import dataclass
from typing import Any

import polars as pl

from stepscope.analysis.kernels.copies import COPYING, FILLING
from stepscope.analysis.memory.account import BEFORE_THE_WINDOW
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import NO_ROW, climb, is_named, matches, outermost, python_callers
from stepscope.analysis.structure.once import once
from stepscope.border import limit
from stepscope.errors import Unavailable

DEVICE_TYPES = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "privateuseone"}
"""PyTorch's numbers (`c10/core/DeviceType.h`)."""
ORIGINS = {
    "before_the_trace": "Allocated before the trace began.",
    "in_the_trace": "Allocated in the trace.",
    "unknown": "Old profilers record no addresses, so frees cannot be matched.",
}
UNATTRIBUTED = "unattributed"

# Ops that allocate on behalf of another, which is around them.
_ALLOCATING = """
    empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize_ resize_as_ set_
"""
ALLOCATING = frozenset("aten::" + name for name in _ALLOCATING.split())

_TAKING = (
    r"(?i)^((cuda|hip)(Malloc|HostAlloc|HostMalloc|HostRegister)|cuMem(Alloc|Create|Map|AddressReserve|HostAlloc))"
)
_GIVING_BACK = r"(?i)^((cuda|hip)(Free|HostFree|HostUnregister)|cuMem(Free|Unmap|Release|AddressFree))"


@dataclass(frozen=True)
class MemorySummary:
    """The memory of one device in a trace."""

    device_type: str
    device: int  # its index; -1 is the CPU
    start_bytes: int
    """Allocated when the trace began; if `is_start_known` is false, only what the trace saw freed later."""
    is_start_known: bool  # whether the trace has the allocator's totals; without them, every figure is a lower bound
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None  # the most memory reserved at any time; None if unknown
    peak_time_ns: int  # the first time of the peak
    peak_step: int | None
    peak_phase: str | None
    peak_op: str | None  # the op whose allocation made the peak
    peak_module: str | None
    num_allocations: int
    num_releases: int
    num_allocations_per_step: float | None  # within steps; None without steps
    at_peak: pl.DataFrame
    """Memory alive at the peak: `origin` (one of `ORIGINS`), allocating `op`, `module` and `phase`, `num_blocks`,
    `bytes`. The bytes add up to `peak_allocated_bytes`."""

    def to_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in self.__dict__.items() if name != "at_peak"}
        return plain | {f"at_peak_by_{name}": at_peak_by(self, name).to_dicts() for name in ("op", "module", "phase")}


@once
def memory_summary(linked: Linked) -> tuple[MemorySummary, ...]:
    """Return one summary per device with `[memory]` events, the largest peak first."""
    summaries = [_summary(linked, *device) for device in memory_devices(linked)]
    return tuple(sorted(summaries, key=lambda summary: -summary.peak_allocated_bytes))


@once
def memory_devices(linked: Linked) -> list[tuple[int, int]]:
    """Return type (a key of `DEVICE_TYPES`, or another) and index of each device with `[memory]` events.

    Of too many devices, these are the ones with most events.
    """
    columns = linked.memory.select("bytes", "device_type", "device")
    counts = _sound(columns).group_by("device_type", "device").len()
    devices = counts.sort("len", "device_type", "device", descending=[True, False, False]).head(limit("DEVICES"))
    devices = devices.select("device_type", "device").sort("device_type", "device")
    return [(device_type, index) for device_type, index in devices.iter_rows()]


def memory_timeline(
    linked: Linked, device_type: str = "cuda", device: int | None = None, max_points: int = 2000
) -> pl.DataFrame:
    """Return memory after each allocation and free: `time_ns`, `allocated_bytes`, `reserved_bytes`, in order.

    Without an index, it is the first device of the type. The first row is the state before the first event. Above
    `max_points` rows, the lowest and highest of each stretch are kept, so all rows are real and include the peak.
    Without the allocator's totals, it starts at the lower bound (`start_bytes`).
    """
    columns = ("time_ns", "allocated_bytes", "reserved_bytes")
    devices = [each for each in memory_devices(linked) if _type_name(each[0]) == device_type]
    chosen = [each for each in devices if device in (None, each[1])]
    if not chosen:
        return pl.DataFrame(schema=dict.fromkeys(columns, pl.Int64))
    events = _events(linked, *chosen[0])
    start, _ = _start(events)
    before = pl.DataFrame({"time_ns": events["time_ns"].head(1), "allocated_bytes": [start]})
    return _thinned(pl.concat([before, _running(events, start).select(columns)], how="diagonal"), max_points)


def at_peak_by(summary: MemorySummary, column: str) -> pl.DataFrame:
    """Return memory alive at the peak by `op`, `module` or `phase`: `name`, `num_blocks`, `bytes`, `share`.

    Earlier memory is `before_the_trace`, unknown memory `unattributed`. All adds up to the peak.
    """
    is_before = pl.col("origin") == "before_the_trace"
    name = pl.when(is_before).then(pl.lit("before_the_trace")).otherwise(pl.col(column).cast(pl.String))
    return (
        summary.at_peak.group_by(name.fill_null(UNATTRIBUTED).alias("name"), maintain_order=True)
        .agg(pl.col("num_blocks").sum(), pl.col("bytes").sum())
        .with_columns((pl.col("bytes") / max(1, summary.peak_allocated_bytes)).alias("share"))
        .sort("bytes", descending=True, maintain_order=True)
    )


@once
def main_memory(linked: Linked) -> tuple[MemorySummary, pl.DataFrame] | None:
    """Return the device with the highest peak, preferring a GPU, and all its events in order; None without events.

    `next_order` is the next event at the address; `is_seen` tells for a free whether the trace has its allocation.
    """
    summaries = memory_summary(linked)
    if not summaries:
        return None
    chosen = max(summaries, key=lambda each: (each.device_type != "cpu", each.peak_allocated_bytes))
    wanted = (chosen.device_type, chosen.device)
    (device,) = (each for each in memory_devices(linked) if (_type_name(each[0]), each[1]) == wanted)
    lives = _lifetimes(_events(linked, *device))
    return chosen, lives.with_columns(_op_names(linked, lives["op"]).alias("op"))


def _sound(memory: pl.DataFrame) -> pl.DataFrame:
    """Return events with a size; a trace may omit the index if there is one device."""
    return memory.filter(pl.col("bytes") != 0, pl.col("device_type").is_not_null()).with_columns(
        pl.col("device").fill_null(pl.when(pl.col("device_type") == 0).then(-1).otherwise(0))
    )


def _events(linked: Linked, device_type: int, device: int) -> pl.DataFrame:
    """Return events of one device in order, numbered by `order`."""
    # The CPU allocator has no totals: its zeros are not measurements.
    reserved = pl.when(pl.lit(device_type != 0)).then("reserved_bytes").alias("reserved_bytes")
    return (
        _sound(linked.memory)
        .filter(pl.col("device_type") == device_type, pl.col("device") == device)
        .select("time_ns", "address", "bytes", "allocated_bytes", reserved, "op", "module", "step", "phase")
        .with_row_index("order")
    )


def _lifetimes(events: pl.DataFrame) -> pl.DataFrame:
    """Return events with `next_order` (the next event at the same address) and `is_seen` (whether the previous event
    there was an allocation, so that a free has its allocation in the trace)."""
    is_known = pl.col("address").is_not_null()
    is_after_birth = (pl.col("bytes").shift(1).over("address") > 0).fill_null(False)
    return events.with_columns(
        next_order=pl.when(is_known).then(pl.col("order").shift(-1).over("address")),
        is_seen=is_known & is_after_birth,
    )


def _start(events: pl.DataFrame) -> tuple[int, bool]:
    """Return the bytes allocated before the first event, and whether the trace has them."""
    known = events.select((pl.col("allocated_bytes") - pl.col("bytes").cum_sum()).drop_nulls().first()).item()
    if known is not None:
        return int(known), True
    if events["address"].null_count():
        return max(0, -int(events.select(pl.col("bytes").cum_sum().min()).item())), False
    unseen = _lifetimes(events).filter(pl.col("bytes") < 0, ~pl.col("is_seen"))
    return -int(unseen["bytes"].sum()), False


def _running(events: pl.DataFrame, start: int) -> pl.DataFrame:
    total = pl.col("bytes").cum_sum() + start
    return events.with_columns(pl.coalesce("allocated_bytes", total).alias("allocated_bytes"))


def _summary(linked: Linked, device_type: int, device: int) -> MemorySummary:
    events = _events(linked, device_type, device)
    start, is_known = _start(events)
    running = _running(events, start)
    highest = running.row(running["allocated_bytes"].arg_max() or 0, named=True)
    is_at_start = start >= highest["allocated_bytes"]
    peak_bytes = max(start, highest["allocated_bytes"])
    alive = _lifetimes(events).filter(
        pl.lit(not is_at_start),
        pl.col("bytes") > 0,
        pl.col("order") <= highest["order"],
        pl.col("next_order").is_null() | (pl.col("next_order") > highest["order"]),
    )
    allocations = events.filter(pl.col("bytes") > 0)
    num_in_steps = allocations["step"].count()
    reserved = running["reserved_bytes"].max()
    place = {} if is_at_start else highest  # no event made the peak if it is at the start
    return MemorySummary(
        device_type=_type_name(device_type),
        device=device,
        start_bytes=start,
        is_start_known=is_known,
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=int(reserved) if isinstance(reserved, int) else None,
        peak_time_ns=int(events["time_ns"][0]) if is_at_start else highest["time_ns"],
        peak_step=place.get("step"),
        peak_phase=place.get("phase"),
        peak_op=_op_names(linked, pl.Series([place.get("op")], dtype=pl.UInt32)).item(),
        peak_module=place.get("module"),
        num_allocations=allocations.height,
        num_releases=events.height - allocations.height,
        num_allocations_per_step=num_in_steps / linked.steps.num if linked.steps.num else None,
        at_peak=_at_peak(linked, alive, peak_bytes, has_addresses=not events["address"].null_count()),
    )


def _at_peak(linked: Linked, alive: pl.DataFrame, peak_bytes: int, has_addresses: bool) -> pl.DataFrame:
    alive, rest = (alive, "before_the_trace") if has_addresses else (alive.head(0), "unknown")
    seen = (
        alive.with_columns(_op_names(linked, alive["op"]).alias("op"))
        .group_by("op", "module", "phase", maintain_order=True)
        .agg(pl.len().cast(pl.Int64).alias("num_blocks"), pl.col("bytes").sum())
        .sort("bytes", descending=True, maintain_order=True)
        .with_columns(pl.lit("in_the_trace").alias("origin"))
    )
    others = pl.DataFrame({"origin": [rest], "bytes": [peak_bytes - int(seen["bytes"].sum())]})
    columns = ("origin", "op", "module", "phase", "num_blocks", "bytes")
    return pl.concat([seen, others], how="diagonal_relaxed").select(columns).cast({"origin": pl.Enum(list(ORIGINS))})


def _op_names(linked: Linked, ops: pl.Series) -> pl.Series:
    """Return the names of the ops that needed the memory, from the rows of the allocating ops."""
    around, is_copying = _needed_by(linked)
    ops = outermost(linked.host, climb(ops, around), is_copying)
    names: pl.Series = linked.host["name"].gather(ops).cast(pl.String)
    return names


@once
def _needed_by(linked: Linked) -> tuple[pl.Series, pl.Series]:
    """Return the op around each op that only allocates, and which ops copy or fill for another."""
    host = linked.host
    around = host["op"].gather(host["parent"]).zip_with(is_named(host, ALLOCATING).fill_null(False), NO_ROW)
    return around, is_named(host, COPYING | FILLING)


def _thinned(points: pl.DataFrame, max_points: int) -> pl.DataFrame:
    if points.height <= max_points:
        return points
    num_stretches = max(1, (max_points - 2) // 2)
    numbered = points.with_row_index("index")
    stretch = pl.col("index").cast(pl.Int64) * num_stretches // points.height
    allocated = pl.col("allocated_bytes")
    kept = numbered.group_by(stretch.alias("stretch")).agg(
        pl.col("index").gather(allocated.arg_min()).first().alias("lowest"),
        pl.col("index").gather(allocated.arg_max()).first().alias("highest"),
    )
    ends = pl.Series([0, points.height - 1], dtype=pl.UInt32)
    indices = pl.concat([kept["lowest"], kept["highest"], ends]).unique().sort()
    kept_points: pl.DataFrame = points[indices]
    return kept_points


def _type_name(device_type: int) -> str:
    return DEVICE_TYPES.get(device_type, str(device_type))


@once
def allocator_calls(linked: Linked) -> pl.DataFrame:
    """Return calls that allocate from the driver or return memory to it, by time, without nested ones."""
    host = linked.host
    gives_back = matches(host["name"], _GIVING_BACK)
    is_call = host["kind"].is_in(["runtime", "driver"]) & (gives_back | matches(host["name"], _TAKING))
    is_call = is_call & ~is_call.gather(host["parent"]).fill_null(False)
    calls = host.with_columns(gives_back.alias("gives_back")).filter(is_call)
    return calls.select(
        "event", pl.col("name").cast(pl.String), "start_ns", "end_ns", "gives_back",
        host["name"].gather(calls["op"]).cast(pl.String).alias("op"), pl.col("module").cast(pl.String),
        python_callers(host, calls["row"]), "step", pl.col("phase").cast(pl.String),
    ).sort("start_ns")  # fmt: skip


_OF_A_LIFE = ("op", "module", "phase", "order", "next_order", "bytes")


def trace_memory(linked: Linked) -> dict[str, Any]:
    """Return the allocations of the device with the highest peak, preferring a GPU.

    A trace has op, module and phase of an allocation, but not its owner, dtype or shape.
    """
    found = main_memory(linked)
    if found is None:
        raise Unavailable("The trace has no [memory] events. Record it with profile(profile_memory=True).")
    chosen, lives = found
    if lives["address"].null_count():
        raise Unavailable("The [memory] events of the trace have no addresses, so frees cannot be matched.")
    name = chosen.device_type if chosen.device < 0 else f"{chosen.device_type}:{chosen.device}"
    times = (lives["time_ns"] - lives["time_ns"][0]).to_list()
    before = {"device": name, "op": BEFORE_THE_WINDOW, "phase": BEFORE_THE_WINDOW, "born": None}
    allocations: list[dict[str, Any]] = []
    rows = lives.filter((pl.col("bytes") > 0) | ~pl.col("is_seen"))
    for op, module, phase, order, next_order, num_bytes in rows.select(_OF_A_LIFE).rows():
        if num_bytes > 0:
            died_ns = None if next_order is None else times[next_order]
            life = {"born": order, "born_ns": times[order], "died": next_order, "died_ns": died_ns}
            allocations.append(
                {"device": name, "op": op, "module": module, "phase": phase, "bytes": num_bytes, **life}
            )
        else:
            life = {"born_ns": None, "died": order, "died_ns": times[order]}
            allocations.append({**before, "bytes": -num_bytes, **life})
    totals = {
        "start_allocated_bytes": chosen.start_bytes,
        "peak_allocated_bytes": chosen.peak_allocated_bytes,
        "peak_reserved_bytes": chosen.peak_reserved_bytes,
    }
    unseen = chosen.start_bytes - sum(each["bytes"] for each in allocations if each["born"] is None)
    if unseen > 0:
        allocations.append({**before, "bytes": unseen, "died": None})
    return {
        "device": name,
        "allocations": allocations,
        "stages": [{"name": phase, "event": order} for order, phase in _changes(lives, "phase")],
        "reserved": _changes(lives, "reserved_bytes"),
        "allocator": totals if chosen.is_start_known else None,
    }


def _changes(lives: pl.DataFrame, column: str) -> list[tuple[int, Any]]:
    """Return the events from which on a column has another value, and the values."""
    known = lives.select("order", column).drop_nulls()
    return known.filter(pl.col(column).ne_missing(pl.col(column).shift(1))).rows()

"""Calls of the driver's allocator, which a caching allocator should make only in the first steps."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.structure.callers import python_callers
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.names import matches

_TAKING = (
    r"(?i)^((cuda|hip)(Malloc|HostAlloc|HostMalloc|HostRegister)|cuMem(Alloc|Create|Map|AddressReserve|HostAlloc))"
)
_GIVING_BACK = r"(?i)^((cuda|hip)(Free|HostFree|HostUnregister)|cuMem(Free|Unmap|Release|AddressFree))"


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

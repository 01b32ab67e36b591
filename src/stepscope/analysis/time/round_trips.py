"""Tensors that go to the host and come back."""

from bisect import bisect_left

import polars as pl

from stepscope.analysis.structure.callers import python_callers
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import is_aten_op, outermost

_LEAST_BYTES = 256  # smaller copies are single values, whose sizes match by chance
_MOST_KERNELS = 8  # with more kernels launched in between, the copies are probably unrelated
_SCHEMA = {
    "start_ns": pl.Int64(), "end_ns": pl.Int64(), "out": pl.Int64(), "back": pl.Int64(), "bytes": pl.Int64(),
    "num_kernels": pl.Int64(), "step": pl.Int64(), "phase": pl.String(), "module": pl.String(),
    "caller": pl.String(), "op": pl.String(),
}  # fmt: skip


def round_trips(linked: Linked, copies: pl.DataFrame) -> pl.DataFrame:
    """Return pairs of a copy to the host and the next copy of the same size back, in one phase of a step.

    `start_ns`, `end_ns`: on the host, from the start of the first op to the end of the second. `out` and `back` are
    the copies' `event`s, `num_kernels` counts launches in between; the rest describes the first copy.
    """
    host, device = linked.host, linked.device
    made = device.filter(pl.col("kind") == "memcpy", pl.col("launch").is_not_null(), pl.col("bytes") >= _LEAST_BYTES)
    made = made.join(copies.select("event", "what"), on="event").sort("issued_ns")
    outer = outermost(host, made["op"].zip_with(made["op"].is_not_null(), made["launch"]), is_aten_op(host))
    made = made.select(
        "event", "what", "bytes", "step", "phase", "module", "issued_ns", pl.col("op_name").alias("op"),
        host["start_ns"].gather(outer), host["end_ns"].gather(outer), python_callers(host, made["launch"]),
    )  # fmt: skip
    launched = device.filter(pl.col("kind") == "kernel")["issued_ns"].sort().to_list()
    taken: dict[tuple[object, ...], list[dict[str, object]]] = {}
    rows = []
    for copy in made.iter_rows(named=True):
        key = (copy["bytes"], copy["step"], copy["phase"])
        if copy["what"] == "device_to_host":
            taken.setdefault(key, []).append(copy)
        elif copy["what"] == "host_to_device" and taken.get(key):
            out = taken[key].pop()
            between = bisect_left(launched, copy["issued_ns"]) - bisect_left(launched, out["issued_ns"])
            if between <= _MOST_KERNELS:
                pair = {"end_ns": copy["end_ns"], "out": out["event"], "back": copy["event"], "num_kernels": between}
                rows.append({**out, **pair})
    return pl.DataFrame(rows, schema=_SCHEMA)

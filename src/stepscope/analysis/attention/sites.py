"""Calls of scaled dot-product attention: backend, shape, mask, module, forward and backward time.

They are read from host ops, so a trace without GPU work has them too. `backends.py` has the GPU kernels.
"""

from collections.abc import Collection
from typing import Any

import polars as pl

from stepscope.analysis.attention.backends import DISPATCHER, at, backend_of, inputs_of, is_dense, mask_shape
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import COLUMNS, argument_place, argument_values, operands
from stepscope.analysis.memory.module_tree import starred
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import ancestor, is_named, matches, outermost, python_callers

_FLEX_KERNEL = r"(?i)flex_(attention|decoding)"
SIGNATURE = (
    "backend", "dtype", "batch", "num_heads", "num_key_heads", "num_queries", "num_keys", "head_size", "value_size",
    "mask", "is_causal", "dropout", "is_dense",
)  # fmt: skip
"""The columns that describe a call's inputs."""
_CALLS = {
    "row": pl.Int64(), "direction": pl.String(), "step": pl.Int64(), "phase": pl.String(),
    "module": pl.String(), "caller": pl.String(), "backend": pl.String(), "dtype": pl.String(),
    "batch": pl.Int64(), "num_heads": pl.Int64(), "num_key_heads": pl.Int64(), "num_queries": pl.Int64(),
    "num_keys": pl.Int64(), "head_size": pl.Int64(), "value_size": pl.Int64(), "mask": pl.String(),
    "is_causal": pl.Boolean(), "dropout": pl.Float64(), "is_dense": pl.Boolean(),
    "forward_ns": pl.Int64(), "backward_ns": pl.Int64(), "beside_ns": pl.Int64(),
}  # fmt: skip


_FORWARD = [
    DISPATCHER, "aten::_scaled_dot_product_attention_math", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward", "flex_attention",
]  # fmt: skip
_BACKWARD = [
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::_flash_attention_backward",
    "aten::_scaled_dot_product_flash_attention_backward", "aten::_efficient_attention_backward",
    "aten::_scaled_dot_product_efficient_attention_backward", "aten::_cudnn_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward",
]  # fmt: skip
_MATH = [name for name in _FORWARD if backend_of(name) == "math"]
_PACKED = ("aten::_flash_attention_", "aten::_efficient_attention_")
"""Ops with the sequence axis before the heads, or with packed sequences of different lengths."""


def attention_sites(linked: Linked) -> pl.DataFrame:
    """Return attention calls by time; a backward is merged with its forward if the trace links them.

    `row` is the host row. `direction` is `backward` only without a linked forward, as in compiled code. `mask` is the
    mask's shape or null; `is_dense` means stride(-1) == 1. `forward_ns` and `backward_ns` are GPU time (host time
    without GPU work), `beside_ns` the time besides the attention kernel: mask conversion and padding.
    """
    host = linked.host
    is_on_gpu = linked.device.height > 0
    forward, backward = _calls(host, _FORWARD), _calls(host, _BACKWARD)
    pieces = (
        linked.device.select(pl.col("op").alias("row"), "duration_ns").drop_nulls("row")
        if is_on_gpu
        else host.filter(pl.col("kind") == "op").select("row", pl.col("self_ns").alias("duration_ns"))
    )

    def inside(calls: pl.DataFrame, rows: pl.Series) -> pl.DataFrame:
        around = ancestor(host, host["row"].is_in(calls["row"].implode())).gather(rows)
        return pl.DataFrame({"row": around}).join(calls, on="row", how="left", maintain_order="left")

    here = inside(forward, pieces["row"])
    is_dispatcher = host["name"].gather(here["row"]).cast(pl.String) == DISPATCHER
    pieces = pieces.with_columns(
        here["site"],
        inside(forward, host["forward"].gather(pieces["row"]))["site"].alias("backward_of"),
        inside(backward, pieces["row"])["site"].alias("orphan"),
        (~is_dispatcher | here["op"].is_in(_MATH)).fill_null(False).alias("is_kernel"),
    )
    inner = pieces.filter(pl.col("site").is_not_null())
    forward_ns = _sums(inner.filter("is_kernel"), "site")
    beside_ns = _sums(inner.filter(~pl.col("is_kernel")), "site")
    rest = pieces.filter(pl.col("site").is_null())
    backward_ns = _sums(rest, "backward_of")
    orphan_ns = _sums(rest.filter(pl.col("backward_of").is_null()), "orphan")
    known = pl.concat([forward["site"], forward["kernel"], backward["site"], backward["kernel"]]).unique()
    texts, places = _texts(host, known), _places(host, known)
    rows = []
    for direction, calls in (("forward", forward), ("backward", backward)):
        for site, kernel, op in calls.select("site", "kernel", "op").unique().iter_rows():
            times = (forward_ns.get(site, 0), backward_ns.get(site, 0), beside_ns.get(site, 0))
            if direction == "forward" or site in orphan_ns:
                times = times if direction == "forward" else (0, orphan_ns[site], 0)
                rows.append((site, direction, *places[site], None, *_facts(texts, site, kernel, op), *times))
    rows += _flex(linked, set(forward["row"])) if is_on_gpu else []
    callers = python_callers(host, pl.Series([row[0] for row in rows], dtype=pl.UInt32))
    table = pl.DataFrame(rows, schema=_CALLS, orient="row")
    return table.with_columns(callers.alias("caller")).sort("row")


def attention_summary(calls: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    """Return calls per step grouped by inputs and by module (numbers starred), the longest first.

    Columns: `SIGNATURE`, `module` (`blocks.*`), `caller`, `num_calls`, `forward_ns`, `backward_ns`, `beside_ns`,
    `total_ns`.
    """
    modules = pl.Series("module", [starred(name) for name in calls["module"]], dtype=pl.String)
    num_calls, steps = (pl.col("direction") == "forward").sum().alias("num_calls"), max(1, num_steps)
    groups = calls.with_columns(modules).group_by(*SIGNATURE, "module", "caller", maintain_order=True)
    table = groups.agg(num_calls / steps, pl.col("forward_ns", "backward_ns", "beside_ns").sum() / steps)
    total = pl.sum_horizontal("forward_ns", "backward_ns", "beside_ns").alias("total_ns")
    return _joined(table).with_columns(total).sort("total_ns", descending=True, maintain_order=True)


def _joined(table: pl.DataFrame) -> pl.DataFrame:
    """Return the table with each unlinked backward merged into the only forward with the same inputs."""
    keys = [name for name in SIGNATURE if name not in ("is_causal", "dropout", "is_dense")]
    alone = table.filter(pl.col("num_calls") == 0)
    if alone.is_empty():
        return table
    with_forward = table.filter(pl.col("num_calls") > 0).with_row_index("place")
    only = with_forward.filter(pl.len().over(keys) == 1).select(*keys, "place")
    found = alone.join(only, on=keys, how="left", nulls_equal=True, maintain_order="left")
    added = found.drop_nulls("place").group_by("place").agg(pl.col("backward_ns").sum().alias("added_ns"))
    with_forward = with_forward.join(added, on="place", how="left", maintain_order="left")
    with_forward = with_forward.with_columns(pl.col("backward_ns") + pl.col("added_ns").fill_null(0))
    left = found.filter(pl.col("place").is_null()).select(table.columns)
    return pl.concat([with_forward.select(table.columns), left])


def _calls(host: pl.DataFrame, ops: Collection[str]) -> pl.DataFrame:
    """Return attention ops: `row`, `site` (the outermost around it), row and name of that call's `kernel` op."""
    rows = host["row"].filter((host["kind"] == "op") & is_named(host, ops))
    names = host["name"].gather(rows).cast(pl.String)
    calls = pl.DataFrame({"row": rows, "site": outermost(host, rows, is_named(host, ops)), "op": names})
    kernels = calls.sort(pl.col("op") == DISPATCHER, "row").unique("site", keep="first", maintain_order=True)
    return calls.drop("op").join(kernels.rename({"row": "kernel"}), on="site", maintain_order="left")


def _sums(pieces: pl.DataFrame, key: str) -> dict[int, int]:
    return dict(pieces.drop_nulls(key).group_by(key).agg(pl.col("duration_ns").sum()).iter_rows())


def _places(host: pl.DataFrame, rows: pl.Series) -> dict[int, tuple[Any, ...]]:
    """Return step, phase and module of rows."""
    places = host.select("step", "phase", "module").gather(rows)
    return dict(zip(rows, places.with_columns(pl.col("phase", "module").cast(pl.String)).rows()))


def _facts(texts: dict[int, tuple[Any, ...]], site: int, kernel: int, op: str) -> tuple[Any, ...]:
    """Return backend to is_dense from the kernel's op; mask, causal, dropout and layout from the program's call."""
    name, shapes, dtypes, _, _ = texts[kernel]
    tensors = operands(shapes, dtypes)
    query, key, value = inputs_of(op, tensors)
    if name.startswith(_PACKED):
        return (backend_of(op), query.dtype if isinstance(query, Tensor) else None, *(None,) * 11)
    if not all(isinstance(one, Tensor) and len(one.shape) >= 3 for one in (query, key, value)):
        return (backend_of(op), *(None,) * 12)
    called = site if texts[site][0] in _FORWARD else kernel
    given, shapes, dtypes, strides, inputs = texts[called]
    passed, values = operands(shapes, dtypes, strides), argument_values(inputs) or ()
    causal, dropout = (at(values, argument_place(given, name)) for name in ("is_causal", "dropout_p"))
    try:
        rate = None if dropout is None else float(dropout)
    except ValueError:
        rate = None
    return (
        backend_of(op), query.dtype, query.shape[0] if len(query.shape) > 3 else 1, query.shape[-3], key.shape[-3],
        query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1], mask_shape(given, passed),
        None if causal not in ("True", "False") else causal == "True", rate, is_dense(given, passed),
    )  # fmt: skip


def _texts(host: pl.DataFrame, rows: pl.Series) -> dict[int, tuple[Any, ...]]:
    """Return what was recorded of the ops in rows."""
    return dict(zip(rows, host.select(COLUMNS).gather(rows).select(pl.all().cast(pl.String)).rows()))


def _flex(linked: Linked, sites: Collection[int]) -> list[tuple[Any, ...]]:
    """Return FlexAttention kernels without an op in the trace, recognized by name."""
    kernels = linked.device.filter(matches(linked.device["name"], _FLEX_KERNEL))
    rows: list[tuple[Any, ...]] = []
    known = kernels["op"].drop_nulls().unique()
    texts, places = _texts(linked.host, known), _places(linked.host, known)
    for row, name, duration_ns in kernels.select("op", pl.col("name").cast(pl.String), "duration_ns").iter_rows():
        if row is None or row in sites:
            continue
        facts = _facts(texts, row, row, "flex_attention")
        direction, times = ("backward", (0, duration_ns)) if "backward" in name else ("forward", (duration_ns, 0))
        rows.append((row, direction, *places[row], None, *facts, *times, 0))
    return rows

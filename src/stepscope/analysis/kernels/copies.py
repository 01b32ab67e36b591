"""GPU work that only moves data: copies, casts, layout changes and fills, with bytes, op and module."""

import re
from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.op_calls import ITEM_BYTES
from stepscope.analysis.costs.op_costs import COLUMNS, DTYPES, OpCost, op_cost, parsed_list, touched_bytes
from stepscope.analysis.kernels.kernel_classes import fused_ops
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import is_named, outermost, with_answers

KINDS = {
    "host_to_device": "A copy from the host's memory.",
    "device_to_host": "A copy to the host's memory.",
    "device_to_device": "A copy by the driver inside one device.",
    "peer": "A copy from another device.",
    "fill": "Memory set to one value.",
    "cast": "A copy that changes the dtype.",
    "layout": "A copy that changes the memory layout, or makes a view contiguous.",
    "concatenate": "Several tensors copied into one.",
    "copy": "Any other copy by a kernel.",
}

_COPYING = """
    copy_ _to_copy to clone contiguous reshape flatten type_as cat _cat concat concatenate stack _stack hstack vstack
    _chunk_cat split_with_sizes_copy repeat tile _foreach_copy_ _foreach_clone lift_fresh_copy
"""
_FILLING = """
    fill_ zero_ zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full _foreach_zero_
"""
COPYING = frozenset("aten::" + name for name in _COPYING.split())
FILLING = frozenset("aten::" + name for name in _FILLING.split())

_CONCATENATING = re.compile(r"aten::(_?cat|concat\w*|_?stack|[hv]stack|_chunk_cat)$")
# Kernels recognized by their own name, if the op does not identify them: no shapes, or a convolution's helper.
_NAMED = (
    ("concatenate", re.compile(r"CatArrayBatched|chunk_cat")),
    (
        "cast",
        re.compile(r"LoadWithCast|(b?float|half|fp)\d*\w*_copy_kernel|quantize|cast_?transpose|SubTensorOpWithCast"),
    ),
    ("layout", re.compile(r"nchwToNhwc|nhwcToNchw|transpose|::elementwise_kernel<.*direct_copy|permute")),
)
_DIRECTIONS = re.compile(r"(?i)memcpy ([hdap])to([hdap])\b")
_ELEMENT = re.compile(r"CatArrayBatched\w*<(?:[^<]*OpaqueType<(\d{1,3})u?>|(\w+(?:::\w+)*))")


def copies(linked: Linked) -> pl.DataFrame:
    """Return every copy, cast, layout change and fill on the device, by time.

    `what` is one of `KINDS`. `outer_op` is the copying op that the program called (`aten::contiguous` around
    `aten::copy_`), `caller` the op around that. `bytes` is as recorded for memcpy and memset, for kernels the least
    that the op reads and writes; null if unknown. In `bandwidth_bytes_per_s`, a memcpy within the device counts as
    read and written. `pageable` means that the host side is not pinned.
    """
    host = linked.host
    # A kernel's class follows its op, so all kernels of `aten::copy_` are included.
    moved = linked.device.filter((pl.col("kind") != "kernel") | pl.col("class").is_in(["copy_cast", "memset_memcpy"]))
    outer = outermost(host, moved["op"], is_named(host, COPYING | FILLING))
    around = host["op"].gather(host["parent"].gather(outer))
    moved = moved.select(
        "event", "kind", "name", "class", "device", "stream", "start_ns", "duration_ns", "op", "op_name", "module",
        "phase", "step", pl.col("bytes").alias("recorded_bytes"),
        host["name"].gather(outer).alias("outer_op"), host["name"].gather(around).alias("caller"),
        *(host[text].gather(moved["op"]).alias(text) for text in COLUMNS[1:]),
    )  # fmt: skip
    moved = classified_copies(moved)
    # An op's bytes are divided over its kernels, so that they add up.
    is_kernel = pl.col("kind") == "kernel"
    num_kernels = is_kernel.sum().over("op")
    is_first = pl.when(is_kernel).then("op").is_first_distinct()
    part = pl.col("op_bytes") // num_kernels + pl.when(is_first).then(pl.col("op_bytes") % num_kernels).otherwise(0)
    num_bytes = pl.when(is_kernel).then(part).otherwise("recorded_bytes").cast(pl.Int64)
    return moved.with_columns(num_bytes.alias("bytes")).select(
        "event", "what", pl.col("op_name").alias("op"), "outer_op", "caller", "module", "phase", "step", "device",
        "stream", "start_ns", "duration_ns", "bytes",
        bandwidth(_traffic(), pl.col("duration_ns")).alias("bandwidth_bytes_per_s"), "pageable",
    )  # fmt: skip


def copies_summary(copies: pl.DataFrame, num_steps: int, busy_ns: int) -> pl.DataFrame:
    """Return copies by `what`, `op` (the outer one), `caller` and `module`, the longest first.

    `busy_share` is relative to `busy_ns`. `bytes` and bandwidth cover the calls with known bytes. The `total_ns` add
    up to the table's `duration_ns`.
    """
    has_bytes = pl.col("bytes").is_not_null()
    return (
        copies.group_by("what", pl.col("outer_op").alias("op"), "caller", "module", maintain_order=True)
        .agg(
            pl.len().cast(pl.Int64).alias("num_calls"),
            pl.col("pageable").sum().cast(pl.Int64).alias("num_pageable"),
            pl.col("duration_ns").sum().alias("total_ns"),
            pl.when(has_bytes.any()).then(pl.col("bytes").sum()).alias("bytes"),
            bandwidth(_traffic().sum(), pl.col("duration_ns").filter(has_bytes).sum()).alias("bandwidth_bytes_per_s"),
        )
        .with_columns(
            (pl.col("num_calls") / num_steps if num_steps else pl.lit(None, pl.Float64)).alias("num_calls_per_step"),
            (pl.col("total_ns") / busy_ns if busy_ns else pl.lit(None, pl.Float64)).alias("busy_share"),
        )
        .sort("total_ns", descending=True, maintain_order=True)
    )


def bandwidth(num_bytes: pl.Expr, duration_ns: pl.Expr) -> pl.Expr:
    """Return bytes per second as an integer; null if either is unknown or no time passed.

    >>> pl.select(bandwidth(pl.lit(3), pl.lit(2))).item()
    1500000000
    """
    return pl.when(duration_ns > 0).then((num_bytes * 1e9 / duration_ns).round()).cast(pl.Int64, strict=False)


def _traffic() -> pl.Expr:
    return pl.col("bytes") * pl.when(pl.col("what") == "device_to_device").then(2).otherwise(1)


def classified_copies(moved: pl.DataFrame) -> pl.DataFrame:
    """Return copies with `what`, `pageable` and `op_bytes`, from their kind, names and the op's texts."""
    keys = ("kind", "name", "class", "op_name", "outer_op", *COLUMNS[1:])
    schema = {"what": pl.Enum(list(KINDS)), "pageable": pl.Boolean(), "op_bytes": pl.Int64()}
    return with_answers(moved, keys, _judge, schema)


def _judge(
    kind: str, name: str | None, kernel_class: str, op_name: str | None, outer_op: str | None, *texts: str | None
) -> tuple[str, bool | None, int | None]:
    name, op = name or "", op_name or ""
    if kind == "memset":
        return "fill", None, None
    if kind == "memcpy":
        return *direction(name, op), None
    if op in COPYING | FILLING:
        num_bytes = moved_bytes(op_cost(op, *texts), name, texts[0])
    else:
        num_bytes = touched_bytes(*texts[:3]) if fused_ops(name) else None
    if kernel_class == "memset_memcpy":
        return "fill", None, num_bytes
    if _CONCATENATING.match(op):
        return "concatenate", None, num_bytes
    what = _by_operands(*texts[:3]) if op == "aten::copy_" else None
    return what or _by_names(name, outer_op or ""), None, num_bytes


def direction(name: str | None, op: str | None) -> tuple[str, bool | None]:
    """Return what a memcpy of this name is (one of `KINDS`) and whether its host side is pageable.

    >>> direction("Memcpy DtoH (Device -> Pageable)", "aten::copy_")
    ('device_to_host', True)
    """
    name = name or ""
    found = _DIRECTIONS.match(name)
    source, target = (found[1].lower(), found[2].lower()) if found else ("", "")
    if source == "h" and target != "h":
        what = "host_to_device"
    elif (target == "h" and source != "h") or op == "aten::_local_scalar_dense":
        what = "device_to_host"  # ROCm writes DtoD for a copy into pinned memory: use the op instead
    elif source == "p":
        what = "peer"
    else:
        what = "device_to_device" if source and source != "h" else "copy"
    is_at_host = what in ("host_to_device", "device_to_host")
    pageable = True if "Pageable" in name else False if "Pinned" in name else None
    return what, pageable if is_at_host else None


def _by_operands(shapes: str | None, dtypes: str | None, strides: str | None) -> str | None:
    """Return what `aten::copy_` changes, from its recorded target and source."""
    types, sizes, steps = _parsed(dtypes), _parsed(shapes), _parsed(strides)
    if types and types[0] and types[1] and types[0] != types[1]:
        return "cast" if isinstance(types[0], str) and isinstance(types[1], str) else None
    if not sizes or not steps:
        return None
    if sizes[0] != sizes[1]:
        return "copy"
    try:
        # The stride of a dimension of size 1 is meaningless.
        differ = any(size > 1 and into != out for size, into, out in zip(sizes[0], steps[0], steps[1]))
    except TypeError:
        return None
    return "layout" if differ else "copy"


def _parsed(text: str | None) -> list[Any] | None:
    """Return a recorded list of two or more operands; None for any other text."""
    parsed = parsed_list(text)
    return parsed if parsed and len(parsed) >= 2 else None


def _by_names(name: str, outer_op: str) -> str:
    ops = set(fused_ops(name))
    if ops:
        if "cat" in ops:
            return "concatenate"
        return "cast" if ops & {"_to_copy", "convert_element_type"} else "layout"
    named = next((what for what, pattern in _NAMED if pattern.search(name)), None)
    if named is None and outer_op in ("aten::contiguous", "aten::reshape"):
        return "layout"  # these copy only if the order changes
    return named or "copy"


def moved_bytes(cost: OpCost, kernel_name: str, shapes: str | None) -> int | None:
    """Return the bytes that an op reads and writes; for a concatenation, the kernel's name may have to tell."""
    if cost.read_bytes is None or cost.written_bytes is None:
        return concatenated_bytes(kernel_name, shapes)
    return cost.read_bytes + cost.written_bytes


def concatenated_bytes(kernel_name: str, shapes: str | None) -> int | None:
    """Return the bytes a concatenation reads and writes, from its shapes and the element type in the kernel's name.

    >>> concatenated_bytes("CatArrayBatchedCopy<float, unsigned int, 3>", "[[[8, 16], [8, 4]], []]")
    1280
    """
    found, operands = _ELEMENT.search(kernel_name), _parsed(shapes)
    if not found or not operands or not operands[0] or not isinstance(operands[0], list):
        return None
    item_bytes = int(found[1]) if found[1] else ITEM_BYTES.get(DTYPES.get(found[2], ""))
    sizes = [shape if isinstance(shape, list) else [None] for shape in operands[0]]
    if item_bytes is None or any(type(size) is not int or size < 0 for shape in sizes for size in shape):
        return None
    num_elements = sum(prod(shape) for shape in sizes)
    return 2 * num_elements * item_bytes if num_elements < 2**48 else None

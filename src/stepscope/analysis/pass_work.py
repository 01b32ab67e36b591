"""The work of each pass of a step by name: of the GPU where there is one, else of the host's ops."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from stepscope.analysis.links import Linked
from stepscope.analysis.sizes import PRODUCTS

GEMM, OTHER = "gemm", "other"
MATMUL, SOFTMAX, COPIES, REST = "matmul", "softmax", "layout copies", "scale and mask"
ATTENTION_PARTS = (MATMUL, SOFTMAX, REST, COPIES)
_SOFTMAX_BEGINS = ("aten::amax", "aten::max", "aten::_softmax", "aten::softmax")
_COPIES = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::reshape", "aten::as_strided",
           "aten::view", "aten::permute", "aten::unsqueeze", "aten::expand", "aten::select")  # fmt: skip


def pass_work(linked: Linked) -> pl.DataFrame:
    """One row a piece of work in order of time: `name`, `class`, `op`, `phase`, `module`, `duration_ns`.

    Of a trace with GPU work, its kernels and copies; else ops, each with the time that no op below accounts for, and
    of the class `gemm` or `other`.
    """
    if _has_gpu_work(linked):
        device = linked.device.sort("start_ns")
        named = device.select("name", "class", pl.col("op_name").alias("op"), "phase", "module", "duration_ns")
        return named.with_columns(pl.col("name", "class", "op", "phase", "module").cast(pl.String))
    host = linked.host.filter(pl.col("kind") == "op").sort("start_ns")
    named = host.select(
        pl.col("name").cast(pl.String),
        pl.col("name").cast(pl.String).alias("op"),
        pl.col("phase").cast(pl.String),
        pl.col("module").cast(pl.String),
        pl.col("self_ns").alias("duration_ns"),
    )
    product = pl.col("op").is_in(list(PRODUCTS))
    return named.with_columns(pl.when(product).then(pl.lit(GEMM)).otherwise(pl.lit(OTHER)).alias("class"))


def _has_gpu_work(linked: Linked) -> bool:
    """Whether the trace shows work of a GPU."""
    return not linked.device.is_empty()


def attention_parts(work: pl.DataFrame, module: str = "attention") -> dict[str, int]:
    """Nanoseconds of the forward that modules of this name spend on products, on softmax, and on the rest.

    A softmax written out has no name of its own: it is what runs from its maximum on to the next product. What comes
    before, after a product, scales and masks. Modules inside, such as projections, are not counted.
    """
    inside = work.filter(
        pl.col("phase") == "forward", pl.col("module").str.contains(rf"(^|\.){module}$").fill_null(False)
    )
    totals = dict.fromkeys(ATTENTION_PARTS, 0)
    for part, duration_ns in _parts(inside):
        totals[part] += duration_ns
    return totals


def _parts(inside: pl.DataFrame) -> Iterator[tuple[str, int]]:
    part, current = REST, None
    for op, owner, duration_ns in inside.select("op", "module", "duration_ns").iter_rows():
        if owner != current:
            part, current = REST, owner
        if op in PRODUCTS or op == "aten::einsum":  # einsum itself only arranges what it then multiplies
            part = REST
            yield MATMUL if op in PRODUCTS else COPIES, duration_ns
        elif op in _COPIES:
            yield COPIES, duration_ns
        else:
            part = SOFTMAX if op in _SOFTMAX_BEGINS else part
            yield part, duration_ns

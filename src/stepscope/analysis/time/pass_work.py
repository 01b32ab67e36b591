"""The work of each pass of a step by name: GPU work, or host ops without a GPU."""

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.work import PRODUCTS

GEMM, OTHER = "gemm", "other"
MATMUL, SOFTMAX, COPIES, REST = "matmul", "softmax", "copies", "scale and mask"
ATTENTION_PARTS = (MATMUL, SOFTMAX, REST, COPIES)
_SOFTMAX_BEGINS = ("aten::amax", "aten::max", "aten::_softmax", "aten::softmax")
_COPIES = ("aten::einsum", "aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::reshape",
           "aten::as_strided", "aten::view", "aten::permute", "aten::unsqueeze", "aten::expand",
           "aten::select")  # fmt: skip


def pass_work(linked: Linked) -> pl.DataFrame:
    """Return one row per event by time: `name`, `class`, `op`, `op_row`, `phase`, `duration_ns`.

    With GPU work: kernels and copies. Otherwise ops with their self time, of class `gemm` or `other`.
    """
    events = linked.device.rename({"op": "op_row", "op_name": "op"})
    if events.is_empty():
        is_product = pl.col("name").cast(pl.String).is_in(list(PRODUCTS))
        kernel_class = pl.when(is_product).then(pl.lit(GEMM)).otherwise(pl.lit(OTHER)).alias("class")
        op, row, own_ns = pl.col("name").alias("op"), pl.col("row").alias("op_row"), pl.col("self_ns")
        ops = linked.host.filter(pl.col("kind") == "op")
        events = ops.with_columns(kernel_class, op, row, own_ns.alias("duration_ns"))
    texts = pl.col("name", "class", "op", "phase").cast(pl.String)
    return events.sort("start_ns").select(texts, "op_row", "duration_ns")


def attention_parts(work: pl.DataFrame) -> dict[str, int]:
    """Return forward time in ns of each softmax, the products before and after it, and the work between.

    A handwritten softmax runs from its maximum to the next product; scaling and masking come before it. A softmax
    without a following product, such as a loss's, is not counted.
    """
    totals = dict.fromkeys(ATTENTION_PARTS, 0)
    products, gaps = _part_times(work.filter(pl.col("phase") == "forward"))
    for at in range(1, len(products)):
        if SOFTMAX not in gaps[at]:
            continue
        totals[MATMUL] += products[at - 1] + products[at]
        for part, duration_ns in gaps[at].items():
            totals[part] += duration_ns
        for around in (gaps[at - 1], gaps[at + 1]):
            totals[COPIES] += around.get(COPIES, 0)
    return totals


def _part_times(forward: pl.DataFrame) -> tuple[list[int], list[dict[str, int]]]:
    """Return the time of every product, and of the work before the first, between two, and after the last."""
    products: list[int] = []
    gaps: list[dict[str, int]] = [{}]
    current = None
    for op, row, duration_ns in forward.select("op", "op_row", "duration_ns").iter_rows():
        gap = gaps[-1]
        if op in PRODUCTS and row == current:  # one product of several kernels
            products[-1] += duration_ns
        elif op in PRODUCTS:
            products.append(duration_ns)
            gaps.append({})
        else:
            inside = SOFTMAX if SOFTMAX in gap or op in _SOFTMAX_BEGINS else REST
            part = COPIES if op in _COPIES else inside
            gap[part] = gap.get(part, 0) + duration_ns
        current = row
    return products, gaps

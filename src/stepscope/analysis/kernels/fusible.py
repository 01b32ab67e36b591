"""Work that one fused kernel could do: passes over full logits, and the work between two products."""

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import groupby
from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.attainable_rates import fused_ns
from stepscope.analysis.costs.op_calls import ITEM_BYTES, Tensor
from stepscope.analysis.costs.op_costs import COLUMNS, op_tensors, operands
from stepscope.analysis.structure.work import product
from stepscope.devices import Device

LEAST_VOCABULARY = 4096
_LEAST_USED = 0.75  # of the logits that a product makes, the share that a loss must use to be theirs
_LOSS = ("log_softmax", "prepare_softmax_online", "cross_entropy")
_LOGITS = {
    "num_tokens": pl.Int64(), "vocabulary": pl.Int64(), "item_bytes": pl.Int64(), "num_elements": pl.Int64(),
    "event": pl.Int64(),
    "op": pl.String(), "phase": pl.String(), "duration_ns": pl.Int64(), "is_product": pl.Boolean(),
    "is_loss": pl.Boolean(),
}  # fmt: skip


def logits(sized: pl.DataFrame) -> pl.DataFrame:
    """Return GPU work on logits, one row per event, from work with sizes (`with_sizes`).

    They are found where a product creates tokens × vocabulary and a log-softmax has as many elements. `item_bytes` is
    the product's dtype size, `is_product` marks products of the last layer, `is_loss` kernels of the log-softmax.
    """
    names = ("event", "op", "name", "phase", "duration_ns", "shape", "shapes", "dtypes")
    read = sized.filter(pl.col("kind") == "kernel").select(names).with_columns(pl.col(pl.Categorical).cast(pl.String))
    rows = [row for row in read.iter_rows(named=True) if row["shape"] and row["phase"] != "optimizer"]
    lossy = [row["shape"] for row in rows if _is_loss(row)]
    in_loss = {(prod(shape), shape[-1]) for shape in lossy if shape[-1] >= LEAST_VOCABULARY}
    made: dict[tuple[int, int], int] = {}
    for row in rows:
        given = operands(row["shapes"], row["dtypes"])
        sizes = product(row["op"], given)
        if sizes is not None and sizes[3] > sizes[2]:
            key = (sizes[0] * sizes[1] * sizes[3], sizes[3])
            tensors = [one for one in given if isinstance(one, Tensor)]
            made.setdefault(key, ITEM_BYTES.get(tensors[0].dtype or "", 4))
    found: list[dict[str, Any]] = []
    for (num_made, vocabulary), item_bytes in made.items():
        # A language model drops the last token of each text before the loss.
        used = {num for num, words in in_loss if words == vocabulary and num_made * _LEAST_USED <= num <= num_made}
        if not used:
            continue
        whole = {"num_tokens": num_made // vocabulary, "vocabulary": vocabulary, "item_bytes": item_bytes}
        for row in rows:
            num_elements = prod(row["shape"])
            if num_elements in {num_made, *used} and vocabulary in row["shape"][-2:]:
                is_product = product(row["op"], operands(row["shapes"], None)) is not None
                facts = {"num_elements": num_elements, "is_product": is_product, "is_loss": _is_loss(row)}
                found.append({**row, **whole, **facts})
    return pl.DataFrame(found, schema=_LOGITS)


def _is_loss(row: dict[str, Any]) -> bool:
    """Return whether the op's name, or that of the Inductor kernel that fuses it, is a loss's."""
    return any(word in f"{row['op']} {row['name']}" for word in _LOSS)


FUSIBLE = ("elementwise", "reduction", "copy_cast", "norm", "softmax", "memset_memcpy", "triton_fused")
"""Classes of kernels that a compiler merges with their neighbors."""
_SEGMENTS = {
    "phase": pl.String(), "step": pl.Int64(), "shape": pl.List(pl.Int64()), "dtype": pl.String(),
    "ops": pl.List(pl.String()), "num_kernels": pl.Int64(), "bytes": pl.Int64(), "fused_bytes": pl.Int64(),
    "norm_bytes": pl.Int64(), "unknown_ns": pl.Int64(), "longest_ns": pl.Int64(), "duration_ns": pl.Int64(),
    "is_compiled": pl.Boolean(), "events": pl.List(pl.Int64()), "last": pl.Int64(),
}  # fmt: skip


_READ = (
    "device", "stream", "phase", "step", "event", "kind", "name", "class", "op", "root_op", "call", "call_flops",
    "bytes", "duration_ns", "is_compiled", *COLUMNS[1:],
)  # fmt: skip


def segments(work: pl.DataFrame, others: Collection[int] = ()) -> pl.DataFrame:
    """Return GPU work between two products, attentions or transfers of a stream and phase, by time; `others` are
    events that end a segment.

    A fused program makes one pass over memory where a segment makes many. `fused_bytes` is what that pass moves: each
    tensor that it reads and did not write, once, and its last result of each size. A trace does not tell tensors
    apart, so those of as many elements stand for one another, except within an op. Norms take more than one pass
    even if compiled: `norm_bytes` are those of their ops. `unknown_ns` is the time of ops with unknown tensors,
    `longest_ns` that of the longest kernel.
    """
    order = work.sort("device", "stream", "start_ns", "event").select(_READ)
    order = order.with_columns(pl.col(pl.Categorical).cast(pl.String), pl.col("class").cast(pl.String))
    numbered = groupby(_numbered(order.iter_rows(named=True), set(others)), lambda row: row["segment"])
    found = [_segment(list(rows)) for number, rows in numbered if number is not None]
    return pl.DataFrame([row for row in found if row], schema=_SEGMENTS, orient="row")


def with_fused_ns(found: pl.DataFrame, device: Device | None, is_on_cpu: bool = False) -> pl.DataFrame:
    """Return segments with `fused_ns`, what one compiled kernel in their place takes; null for an unknown device.

    A CPU computes as slowly as it moves bytes: no segment becomes shorter than its longest op.
    """
    if device is None:
        return found.with_columns(pl.lit(None, pl.Float64).alias("fused_ns"))
    sizes = found.select("fused_bytes", "norm_bytes").iter_rows()
    times_ns = pl.Series("fused_ns", [fused_ns(device, *pair) for pair in sizes], pl.Float64)
    found = found.with_columns(times_ns + pl.col("unknown_ns"))
    return found.with_columns(pl.max_horizontal("fused_ns", "longest_ns")) if is_on_cpu else found


def _is_fusible(row: dict[str, Any]) -> bool:
    """Return whether a compiler could merge a piece of work with its neighbors."""
    # Helpers of a product are the product's; adding to a weight's gradient is the engine's own work.
    if row["class"] not in FUSIBLE or row["phase"] == "optimizer" or row["call_flops"]:
        return False
    is_accumulated = row["phase"] == "backward" and row["op"] == row["root_op"] == "aten::add_"
    return not is_accumulated and (row["kind"] != "memcpy" or "DtoD" in row["name"])


def _numbered(rows: Iterator[dict[str, Any]], ends: set[int]) -> Iterator[dict[str, Any]]:
    """Return each row with the number of its `segment`, None for work that ends one."""
    number, last = 0, None
    for row in rows:
        place = (row["device"], row["stream"], row["phase"], row["step"])
        is_part = row["event"] not in ends and _is_fusible(row)
        number += place != last or not is_part
        last = place
        row["segment"] = number if is_part else None
        yield row


def _segment(rows: list[dict[str, Any]]) -> tuple[Any, ...] | None:
    present: Counter[int] = Counter()  # tensors that the pass has at hand, by number of elements
    results: dict[int, int] = {}
    moved = fused = in_norms = unknown_ns = 0
    largest: tuple[int, list[int], str | None] = (0, [], None)
    ops = []
    for _, events in groupby(rows, lambda row: row["call"]):
        call = list(events)
        num_bytes = max((row["bytes"] or 0 for row in call), default=0)
        tensors = op_tensors(call[0]["op"] or "", *(call[0][text] for text in COLUMNS[1:]))
        if tensors is None:
            # A compiled kernel's arguments are all it touches.
            moved, fused = moved + num_bytes, fused + num_bytes
            unknown_ns += 0 if num_bytes else sum(row["duration_ns"] for row in call if row["kind"] == "kernel")
            continue
        reads, writes = tensors
        own_bytes = sum(tensor.num_bytes or 0 for tensor in (*reads, *writes))
        is_norm = any(row["class"] == "norm" for row in call)
        ops.append(call[0]["op"])
        moved, in_norms = moved + own_bytes, in_norms + own_bytes * is_norm
        num_read: Counter[int] = Counter()
        for tensor in reads:
            if tensor.num_elements > largest[0]:
                largest = (tensor.num_elements, list(tensor.shape), tensor.dtype)
            num_read[tensor.num_elements] += 1
            if num_read[tensor.num_elements] > present[tensor.num_elements]:
                present[tensor.num_elements] += 1
                fused += 0 if is_norm else tensor.num_bytes or 0
        for tensor in writes:
            present[tensor.num_elements] += 1
            if not is_norm:
                results[tensor.num_elements] = tensor.num_bytes or 0
    fused += sum(results.values())
    first, kernels = rows[0], [row for row in rows if row["kind"] != "memset"]
    if not kernels:
        return None
    total_ns = sum(row["duration_ns"] for row in rows)
    compiled_ns = sum(row["duration_ns"] for row in rows if row["is_compiled"])
    return (
        first["phase"], first["step"], largest[1], largest[2], ops, len(kernels), moved,
        min(fused, moved - in_norms), in_norms, unknown_ns,
        max(row["duration_ns"] for row in rows), total_ns, 2 * compiled_ns > total_ns,
        [row["event"] for row in rows], kernels[-1]["event"],
    )  # fmt: skip

"""Work that one fused kernel could do: passes over full logits, and chains of elementwise kernels on one tensor."""

from collections.abc import Collection
from dataclasses import dataclass, field
from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.op_calls import ITEM_BYTES, Operand, Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.work import product

LEAST_VOCABULARY = 4096
_LOSS = ("log_softmax", "prepare_softmax_online", "cross_entropy")
_LOGITS = {
    "num_tokens": pl.Int64(), "vocabulary": pl.Int64(), "item_bytes": pl.Int64(), "event": pl.Int64(),
    "op": pl.String(), "phase": pl.String(), "duration_ns": pl.Int64(), "is_product": pl.Boolean(),
    "is_loss": pl.Boolean(),
}  # fmt: skip


def logits(sized: pl.DataFrame) -> pl.DataFrame:
    """Return GPU work on logits, one row per event, from work with sizes (`with_sizes`).

    They are found where a product creates tokens × vocabulary and a log-softmax has as many elements. `item_bytes` is
    the product's dtype size, `is_product` marks products of the last layer, `is_loss` kernels of the log-softmax.
    """
    rows = [
        row
        for row in sized.with_columns(pl.col(pl.Categorical).cast(pl.String)).iter_rows(named=True)
        if row["shape"] and row["kind"] == "kernel" and row["phase"] != "optimizer"
    ]
    in_loss = {
        (prod(row["shape"]), row["shape"][-1])
        for row in rows
        if _is_loss(row) and row["shape"][-1] >= LEAST_VOCABULARY
    }
    made: dict[tuple[int, int], int] = {}
    for row in rows:
        given = operands(row["shapes"], row["dtypes"])
        sizes = product(row["op"], given)
        if sizes is not None and sizes[3] > sizes[2]:
            key = (sizes[0] * sizes[1] * sizes[3], sizes[3])
            tensors = [one for one in given if isinstance(one, Tensor)]
            made.setdefault(key, ITEM_BYTES.get(tensors[0].dtype or "", 4))
    found: list[dict[str, Any]] = []
    for num_elements, vocabulary in in_loss & made.keys():
        item_bytes = made[num_elements, vocabulary]
        whole = {"num_tokens": num_elements // vocabulary, "vocabulary": vocabulary, "item_bytes": item_bytes}
        for row in rows:
            if prod(row["shape"]) == num_elements and vocabulary in row["shape"][-2:]:
                is_product = product(row["op"], operands(row["shapes"], None)) is not None
                found.append({**row, **whole, "is_product": is_product, "is_loss": _is_loss(row)})
    return pl.DataFrame(found, schema=_LOGITS)


def _is_loss(row: dict[str, Any]) -> bool:
    """Return whether the op's name, or that of the Inductor kernel that fuses it, is a loss's."""
    return any(word in f"{row['op']} {row['name']}" for word in _LOSS)


LEAST_LENGTH = 3  # minimum number of kernels; two in a row occur in any model
_SMALL = 1 / 32  # smaller tensors, as a share of the chain's, are part of it: row means, scales
_ALONG = ("memset_memcpy",)
_WITH_WEIGHT = {f"aten::{name}" for name in ("linear", "matmul", "mm", "addmm", "conv1d", "conv2d", "conv3d")}
_CHAINS = {
    "phase": pl.String(), "step": pl.Int64(), "shape": pl.List(pl.Int64()), "dtype": pl.String(),
    "ops": pl.List(pl.String()), "num_kernels": pl.Int64(), "bytes": pl.Int64(), "fused_bytes": pl.Int64(),
    "duration_ns": pl.Int64(), "events": pl.List(pl.Int64()), "last": pl.Int64(),
}  # fmt: skip


@dataclass
class _Chain:
    first: dict[str, Any]
    num_elements: int
    members: list[dict[str, Any]] = field(default_factory=list)
    work: list[dict[str, Any]] = field(default_factory=list)
    length: int = 0


def chains(sized: pl.DataFrame, others: Collection[int] = ()) -> pl.DataFrame:
    """Return chains by time, from work with sizes (`with_sizes`); `others` are events that end a chain.

    A chain is work of one stream and phase on tensors of one size: elementwise ops and reductions of the last
    dimension, with only casts, fills and small tensors between. `fused_bytes` is what they read
    that none of them wrote, plus the last result; a tensor read twice counts twice, so it is never too low.
    """
    taken = set(others)
    rows: list[tuple[Any, ...]] = []
    ordered = sized.sort("device", "stream", "start_ns").with_columns(pl.col(pl.Categorical).cast(pl.String))
    chain: _Chain | None = None
    for row in ordered.iter_rows(named=True):
        role = "end" if row["event"] in taken or row["phase"] == "optimizer" else _role(row)
        num_elements = prod(row["shape"]) if row["shape"] else 0
        # A product casts its weight before its input: only the input's cast can end the chain.
        is_of_product = role == "cast" and row["root_op"] in _WITH_WEIGHT
        if chain is not None and is_of_product and num_elements != chain.num_elements:
            continue
        if chain is not None and (
            role == "end"
            or any(row[key] != chain.first[key] for key in ("device", "stream", "phase", "step"))
            or (role in ("link", "cast") and _SMALL * chain.num_elements < num_elements != chain.num_elements)
        ):
            rows += _chain_rows(chain)
            chain = None
        if role == "end" or (chain is None and role not in ("link", "cast")):
            continue
        if role == "cast" and (chain is None or not chain.length):
            chain = _Chain(row, num_elements)  # of consecutive casts, the last belongs to the chain
        chain = chain or _Chain(row, num_elements)
        chain.work.append(row)
        if num_elements == chain.num_elements and role in ("link", "cast"):
            chain.members.append(row)
            chain.length += role == "link"
    rows += _chain_rows(chain)
    return pl.DataFrame(rows, schema=_CHAINS, orient="row")


def _role(row: dict[str, Any]) -> str:
    """Return the role of an event in a chain: `link`, `cast`, `along` (small) or `end`."""
    if row["kind"] != "kernel" or row["class"] in _ALONG:
        return "along" if row["kind"] == "memset" or row["class"] in _ALONG else "end"
    if row["read_bytes"] is None or row["written_bytes"] is None or not row["shape"]:
        return "end"
    # Adding to a weight's gradient ends a chain: the next op is for another weight.
    if row["phase"] == "backward" and row["op"] == row["root_op"] == "aten::add_":
        return "end"
    if row["class"] == "elementwise":
        return "link"
    given: list[Operand] = [*operands(row["shapes"], row["dtypes"]), None, None]
    first, second = given[:2]
    if not isinstance(first, Tensor):
        return "end"
    if row["class"] == "reduction":
        # If it leaves one number per row, a fused kernel can include it.
        is_last = any(f'"[{place}]"' in (row["inputs"] or "") for place in (len(first.shape) - 1, -1))
        return "link" if is_last and len(first.shape) > 1 and row["written_bytes"] else "end"
    is_cast = row["op"] == "aten::copy_" and isinstance(second, Tensor) and first.dtype != second.dtype
    return "cast" if is_cast else "end"


def _chain_rows(chain: _Chain | None) -> list[tuple[Any, ...]]:
    if chain is None or chain.length < LEAST_LENGTH:
        return []
    reads = sum(row["read_bytes"] for row in chain.members)
    writes = sum(row["written_bytes"] for row in chain.members)
    last = chain.members[-1]
    # Small work after the last link is not part of the chain.
    work = chain.work[: chain.work.index(last) + 1]
    fused = max(reads - writes + 2 * last["written_bytes"], 2 * last["written_bytes"])
    if fused >= reads + writes:
        return []
    first = chain.first
    given = [one for one in operands(first["shapes"], first["dtypes"]) if isinstance(one, Tensor)]
    return [
        (
            first["phase"], first["step"], first["shape"], given[0].dtype if given else None,
            [row["op"] for row in chain.members], len(work), reads + writes, fused,
            sum(row["duration_ns"] for row in work), [row["event"] for row in work], last["event"],
        )
    ]  # fmt: skip

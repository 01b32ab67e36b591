"""Full logits (tokens × vocabulary): the product that computes them, and kernels that read or write them."""

from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.op_calls import ITEM_BYTES, Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.tensor_sizes import product

LEAST_VOCABULARY = 4096
_LOSS = ("log_softmax", "prepare_softmax_online", "cross_entropy")
_SCHEMA = {
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
    return pl.DataFrame(found, schema=_SCHEMA)


def _is_loss(row: dict[str, Any]) -> bool:
    """Return whether the op's name, or that of the Inductor kernel that fuses it, is a loss's."""
    return any(word in f"{row['op']} {row['name']}" for word in _LOSS)

"""Scores of every token for every word of a vocabulary, held whole: the product that makes them, the passes over
them."""

from __future__ import annotations

from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.op_calls import ITEM_BYTES, Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.tensor_sizes import product

LEAST_VOCABULARY = 4096
_LOSS = ("log_softmax", "prepare_softmax_online", "cross_entropy")
_SCHEMA = pl.Schema(
    {
        "num_tokens": pl.Int64(), "vocabulary": pl.Int64(), "item_bytes": pl.Int64(), "event": pl.Int64(),
        "op": pl.String(), "phase": pl.String(), "duration_ns": pl.Int64(), "is_product": pl.Boolean(),
        "is_loss": pl.Boolean(),
    }
)  # fmt: skip


def logits(sized: pl.DataFrame) -> pl.DataFrame:
    """GPU work over logits, one row a piece, from work with its sizes (`with_sizes`).

    Found where a product makes tokens × vocabulary and a log-softmax goes over as many elements. `num_tokens`,
    `vocabulary`, `item_bytes` of the product's dtype; `event`, `op`, `phase`, `duration_ns`; `is_product` for the
    products of the last layer, `is_loss` for kernels of the log-softmax.
    """
    rows = [
        row
        for row in sized.with_columns(pl.col(pl.Categorical).cast(pl.String)).iter_rows(named=True)
        if row["shape"] and row["kind"] == "kernel" and row["phase"] != "optimizer"
    ]
    # An op's own name says it, or that of the kernel which Inductor made of several.
    in_loss = {
        (prod(row["shape"]), row["shape"][-1]): None
        for row in rows
        if any(word in f"{row['op']} {row['name']}" for word in _LOSS) and row["shape"][-1] >= LEAST_VOCABULARY
    }
    made: dict[tuple[int, int], int] = {}
    for row in rows:
        given = operands(row["shapes"], row["dtypes"])
        sizes = product(row["op"], given)
        if sizes is not None and sizes[3] > sizes[2]:
            key = (sizes[0] * sizes[1] * sizes[3], sizes[3])
            tensors = [one for one in given if isinstance(one, Tensor)]
            made.setdefault(key, ITEM_BYTES.get(tensors[0].dtype or "", 4))
    found: list[tuple[Any, ...]] = []
    for key in in_loss.keys() & made.keys():
        num_elements, vocabulary = key
        for row in rows:
            if prod(row["shape"]) != num_elements or vocabulary not in row["shape"][-2:]:
                continue
            is_product = product(row["op"], operands(row["shapes"], None)) is not None
            is_loss = any(word in f"{row['op']} {row['name']}" for word in _LOSS)
            found.append(
                (
                    num_elements // vocabulary, vocabulary, made[key], row["event"], row["op"], row["phase"],
                    row["duration_ns"], is_product, is_loss,
                )
            )  # fmt: skip
    return pl.DataFrame(found, schema=_SCHEMA, orient="row")

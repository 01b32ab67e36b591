"""How many bytes attention holds when its backward begins, tensor by tensor, by the algorithm of each back end."""

from __future__ import annotations

from dataclasses import dataclass

FUSED = ("flash", "efficient", "cudnn")
_STATISTIC_BYTES = 4
"""Of a logarithm of a row's sum: float32 whatever the tensors are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What a call of attention was given."""

    implementation: str
    batch: int
    heads: int
    seq_len: int
    head_width: int
    item_bytes: int
    causal: bool

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.seq_len


def held_bytes(given: Given) -> dict[str, int] | None:
    """Bytes by tensor at the beginning of the backward; None where a compiler decides what is kept.

    The inputs, the output and its gradient are everybody's. Flash, memory-efficient and cuDNN attention add one
    number a query. What is written out keeps seq_len² tensors; the math back end of PyTorch computes half precision
    in float32 and keeps its own scaled or cast copies of query, key and value.

    >>> given = Given(implementation="flash", batch=8, heads=1, seq_len=16384, head_width=64, item_bytes=2,
    ...               causal=True)
    >>> held_bytes(given)["logsumexp"], sum(held_bytes(given).values())
    (524288, 84410368)
    """
    if given.implementation == "compiled":
        return None
    operand = given.rows * given.head_width * given.item_bytes
    held = dict.fromkeys(("query", "key", "value", "output", "output_gradient"), operand)
    scores, length = given.rows * given.seq_len, given.seq_len
    if given.implementation in FUSED:
        rows = given.rows
        if given.implementation == "efficient":  # every sequence's are padded to 32
            rows = given.batch * given.heads * -(-length // 32) * 32
        return {**held, "logsumexp": rows * _STATISTIC_BYTES}
    if given.implementation == "math":
        item = max(given.item_bytes, 4)
        is_cast = item != given.item_bytes
        copies = ("scaled_query", "scaled_key", *(("cast_value",) if is_cast else ()))
        held |= dict.fromkeys(copies, given.rows * given.head_width * item)
        return {**held, "probabilities": scores * item}
    held["probabilities"] = scores * given.item_bytes
    if given.causal and given.implementation != "custom":
        held["mask"] = length * length
    if given.implementation == "naive":
        held |= dict.fromkeys(("scores", "exponentials"), scores * given.item_bytes)
        held |= dict.fromkeys(("maxima", "sums"), given.rows * given.item_bytes)
    return held


def gradient_bytes(given: Given) -> int:
    """Bytes of the gradients of query, key and value, which the backward makes."""
    return 3 * given.rows * given.head_width * given.item_bytes

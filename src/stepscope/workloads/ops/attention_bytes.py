"""Computes the bytes that attention holds when its backward begins, by tensor, from each backend's algorithm."""

from __future__ import annotations

from dataclasses import dataclass

FUSED = ("flash", "efficient", "cudnn")
_STATISTIC_BYTES = 4
"""Size of a row's logsumexp, which is always float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The shape of an attention call."""

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
    """Return bytes by tensor at the beginning of the backward; None if a compiler decides what is kept.

    All hold the inputs, the output and its gradient. Flash, memory-efficient and cuDNN attention add one number per
    query. Handwritten attention keeps seq_len² tensors. PyTorch's math backend computes half precision in float32 and
    keeps its own scaled or cast copies of query, key and value.

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
        if given.implementation == "efficient":  # padded to a multiple of 32 per sequence
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
    """Return the bytes of the gradients of query, key and value."""
    return 3 * given.rows * given.head_width * given.item_bytes

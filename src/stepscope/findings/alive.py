"""Memory held at the peak by tensors of one size."""

from __future__ import annotations

from stepscope.errors import Unavailable
from stepscope.session.case import Case

_WORTH_SHARE = 0.05  # of the peak; smaller savings are not reported
LEAST_BYTES = 256 << 20
_BLOCK_BYTES = 512  # the allocator rounds up to this


def alive_bytes(case: Case, num_elements: int, item_bytes: tuple[int, ...] = (2, 4)) -> int | None:
    """Return the bytes held at the peak by tensors of `num_elements`; None if memory was not recorded."""
    try:
        memory = case.memory
    except Unavailable:
        return None
    exact = {num_elements * size for size in item_bytes}
    sizes = exact | {-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in exact}
    return sum(large.bytes * large.num_at_peak for large in memory.largest if large.bytes in sizes)


def is_worth_bytes(case: Case, saving_bytes: int | None) -> bool:
    """Return whether a memory saving is large enough to report."""
    return bool(saving_bytes) and (saving_bytes or 0) >= max(LEAST_BYTES, _WORTH_SHARE * case.memory.peak_bytes)

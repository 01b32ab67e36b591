"""What tensors of one size hold of the memory's peak: shared by the rules about tensors that need not be."""

from __future__ import annotations

from stepscope.errors import Unavailable
from stepscope.session.case import Case

_WORTH_SHARE = 0.05
"""Of the peak: what saves less memory is not worth a finding."""
LEAST_BYTES = 256 << 20
"""Nobody is short of less."""
_BLOCK_BYTES = 512
"""What the allocator rounds up to."""


def alive_bytes(case: Case, num_elements: int, item_bytes: tuple[int, ...] = (2, 4)) -> int | None:
    """Bytes at the peak in tensors of so many elements; None where nothing says what was in memory."""
    try:
        memory = case.memory
    except Unavailable:
        return None
    exact = {num_elements * size for size in item_bytes}
    sizes = exact | {-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in exact}
    return sum(large.bytes * large.num_at_peak for large in memory.largest if large.bytes in sizes)


def is_worth_bytes(case: Case, saving_bytes: int | None) -> bool:
    """Whether a saving of memory is large enough to be told."""
    return bool(saving_bytes) and (saving_bytes or 0) >= max(LEAST_BYTES, _WORTH_SHARE * case.memory.peak_bytes)

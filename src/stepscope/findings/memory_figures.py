"""Memory that several rules look at: what tensors of one size hold, and how often the allocator ran out."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.errors import if_available
from stepscope.session.case import Case

_WORTH_SHARE = 0.05  # of the peak; smaller savings are not reported
_LEAST_BYTES = 256 << 20
_BLOCK_BYTES = 512  # the allocator rounds up to this
_RETRIES_PER_STEP = 0.5  # an occasional retry while the cache fills is normal


def alive_bytes(case: Case, num_elements: int, item_bytes: tuple[int, ...] = (2, 4)) -> int | None:
    """Return the bytes held at the peak by tensors of `num_elements`; None if memory was not recorded."""
    memory = if_available(lambda: case.memory)
    if memory is None:
        return None
    exact = {num_elements * size for size in item_bytes}
    sizes = exact | {-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in exact}
    return sum(large.bytes * large.num_at_peak for large in memory.largest if large.bytes in sizes)


def is_worth_bytes(case: Case, saving_bytes: int | None) -> bool:
    return bool(saving_bytes) and (saving_bytes or 0) >= max(_LEAST_BYTES, _WORTH_SHARE * case.memory.peak_bytes)


@dataclass(frozen=True)
class Retries:
    """Allocator retries of a recording, and the number of steps they were counted in."""

    num: int
    num_steps: int

    @property
    def are_in_every_step(self) -> bool:
        """Whether they recur, which `allocator_churn` reports; fewer only show that memory is full."""
        return self.num_steps > 0 and self.num >= _RETRIES_PER_STEP * self.num_steps


def retries_of(case: Case) -> Retries | None:
    """Return the retries in a recording's warm-up and clean steps; None if they were not counted."""
    facts = case.recording.facts if case.has_recording else {}
    counted = (facts.get("memory") or {}).get("num_allocator_retries")
    if not isinstance(counted, int):
        return None
    return Retries(counted, sum(sample.window in ("warmup", "clean") for sample in case.recording.samples))

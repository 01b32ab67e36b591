"""How often the allocator ran out of memory and retried."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.errors import Unavailable
from stepscope.session.case import Case

_RETRIES_PER_STEP = 0.5  # an occasional retry while the cache fills is normal


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
    try:
        recording = case.recording
    except Unavailable:
        return None
    counted = (recording.facts.get("memory") or {}).get("num_allocator_retries")
    if not isinstance(counted, int):
        return None
    return Retries(counted, sum(sample.window in ("warmup", "clean") for sample in recording.samples))

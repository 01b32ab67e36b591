"""How often the allocator found no room and began again: shared by the rules that tell of it, so that one does."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.errors import Unavailable
from stepscope.session.case import Case

_RETRIES_A_STEP = 0.5
"""One when the cache first fills is nobody's fault."""


@dataclass(frozen=True)
class Retries:
    """What a recording's allocator counted."""

    num: int
    num_steps: int
    """In which they were."""

    @property
    def are_in_every_step(self) -> bool:
        """Whether they come again and again, as `allocator_churn` tells; fewer are a sign of full memory."""
        return self.num_steps > 0 and self.num >= _RETRIES_A_STEP * self.num_steps


def retries_of(case: Case) -> Retries | None:
    """The retries of a recording's warm-up and clean steps; None where nobody counted."""
    try:
        recording = case.recording
    except Unavailable:
        return None
    counted = (recording.facts.get("memory") or {}).get("num_allocator_retries")
    if not isinstance(counted, int):
        return None
    return Retries(counted, sum(sample.window in ("warmup", "clean") for sample in recording.samples))

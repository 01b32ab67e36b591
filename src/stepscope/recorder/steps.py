"""Finds where each step ends without edits to the script.

Sources, from the most to the least certain: `stepscope.step()`, an optimizer step, parameters that changed after a
backward, and the root module's forward for scripts that only infer. When a more certain source appears, it replaces
the current one and counting restarts. Once a backward has run, a forward ends no step.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any

EXPLICIT = "step()"
OPTIMIZER = "optimizer"
UPDATE = "update"
FORWARD = "forward"
_RANK = {None: 0, FORWARD: 1, UPDATE: 2, OPTIMIZER: 3, EXPLICIT: 4}

# A GAN's critic takes a few steps per generator step. After this many, drop the optimizer that stopped stepping.
MAX_STEPS_OF_ONE = 16
# Models that are trained in turns, epoch by epoch: after this many changes each optimizer step counts on its own.
MAX_TURNS = 3


class Boundary(Enum):
    """What an event means for the current step."""

    NONE = "goes on"
    END = "ends here"
    RESTART = "ends here, and all earlier steps are discarded"


class StepFinder:
    """Turns events into step boundaries. With several optimizers, a step ends when each has stepped at least once.

    >>> finder = StepFinder()
    >>> [finder.saw(OPTIMIZER, who).name for who in ("D", "G", "D", "G", "D", "D", "G")]
    ['END', 'RESTART', 'NONE', 'END', 'NONE', 'NONE', 'END']
    """

    def __init__(self) -> None:
        self.source: str | None = None
        self.trains = False
        """Whether a backward has run."""
        self.num_earlier = 0
        """Training steps of models that were trained before the present one."""
        self._known: set[Any] = set()
        self._stepped: Counter[Any] = Counter()
        self._num_ended = 0
        self._num_replaced = 0  # steps that were discarded when the last optimizer appeared
        self._num_turns = 0

    def saw(self, source: str, who: Any) -> Boundary:
        """Return what it means that `who` (an optimizer or a root module) has just finished."""
        if _RANK[source] < _RANK[self.source] or (source == FORWARD and self.trains):
            return Boundary.NONE
        self.trains |= source in (OPTIMIZER, UPDATE)
        if source != self.source:
            had_source = self.source is not None
            self.source = source
            self._num_replaced = 0
            return self._begin_again({who}, Boundary.RESTART if had_source else Boundary.END)
        if who not in self._known and self._num_ended > MAX_STEPS_OF_ONE:
            # A partner would have shown itself by now: another model is trained after the first.
            self._known = {who}
            self._stepped.clear()
            self._num_ended = 1
            return Boundary.END
        if who not in self._known:
            self._num_replaced = self._num_ended
            return self._begin_again(self._known | {who}, Boundary.RESTART)
        self._stepped[who] += 1
        if len(self._stepped) == len(self._known) or self._num_turns > MAX_TURNS:
            self._stepped.clear()
            self._num_ended += 1
            return Boundary.END
        if self._stepped[who] > MAX_STEPS_OF_ONE:
            # The others have stopped: their steps, and those of this one until now, were steps of their own.
            self.num_earlier += self._num_replaced + self._num_ended + self._stepped.total() - 1
            self._num_replaced = 0
            self._num_turns += 1
            known = set(self._stepped) if self._num_turns <= MAX_TURNS else self._known
            return self._begin_again(known, Boundary.RESTART)
        return Boundary.NONE

    def _begin_again(self, known: set[Any], boundary: Boundary) -> Boundary:
        self._known = known
        self._stepped.clear()
        self._num_ended = 1
        return boundary

    @property
    def num_sources(self) -> int:
        """The number of optimizers, or root modules, that make up one step."""
        return len(self._known)

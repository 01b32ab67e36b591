"""Finds where each step ends without edits to the script.

Sources, from the most to the least certain: `stepscope.step()`, an optimizer step, and the root module's forward for
inference loops. When a more certain source appears, it replaces the current one and counting restarts.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any

EXPLICIT = "step()"
OPTIMIZER = "optimizer"
FORWARD = "forward"
_RANK = {None: 0, FORWARD: 1, OPTIMIZER: 2, EXPLICIT: 3}

# A GAN's critic takes a few steps per generator step. After this many, drop the optimizer that stopped stepping.
MAX_STEPS_OF_ONE = 16


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
        self._known: set[Any] = set()
        self._stepped: Counter[Any] = Counter()

    def saw(self, source: str, who: Any) -> Boundary:
        """Return what it means that `who` (an optimizer or a root module) has just finished."""
        if _RANK[source] < _RANK[self.source]:
            return Boundary.NONE
        if source != self.source:
            had_source = self.source is not None
            self.source = source
            return self._begin_again({who}, Boundary.RESTART if had_source else Boundary.END)
        if who not in self._known:
            return self._begin_again(self._known | {who}, Boundary.RESTART)
        self._stepped[who] += 1
        if len(self._stepped) == len(self._known):
            self._stepped.clear()
            return Boundary.END
        if self._stepped[who] > MAX_STEPS_OF_ONE:
            return self._begin_again(set(self._stepped), Boundary.RESTART)
        return Boundary.NONE

    def _begin_again(self, known: set[Any], boundary: Boundary) -> Boundary:
        self._known = known
        self._stepped.clear()
        return boundary

    @property
    def num_sources(self) -> int:
        """The number of optimizers, or root modules, that make up one step."""
        return len(self._known)

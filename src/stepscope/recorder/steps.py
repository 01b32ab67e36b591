"""Where one step ends and the next begins, found without edits to the script.

In this order: `stepscope.step()` if the script calls it; the optimizer; the root module's
forward, for loops that only infer. A surer source that turns up later replaces the one in use
and the count starts again: what was seen before it is not a sample of the same thing.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any

EXPLICIT = "step()"
OPTIMIZER = "optimizer"
FORWARD = "forward"
_RANK = {None: 0, FORWARD: 1, OPTIMIZER: 2, EXPLICIT: 3}

# One optimizer may step this often before another that has gone quiet is given up: a GAN's
# critic steps a handful of times for each step of the generator, not more.
MAX_STEPS_OF_ONE = 16


class Boundary(Enum):
    """What an event means for the step that is running."""

    NONE = "goes on"
    END = "ends here"
    RESTART = "ends here, and what was counted before is void"


class StepFinder:
    """Turns events into step boundaries.

    Several optimizers make one step: it ends when each has stepped at least once.

    >>> finder = StepFinder()
    >>> [finder.saw(OPTIMIZER, who).name for who in ("D", "G", "D", "G", "D", "D", "G")]
    ['END', 'RESTART', 'NONE', 'END', 'NONE', 'NONE', 'END']
    """

    def __init__(self) -> None:
        self.source: str | None = None
        self._known: set[Any] = set()
        self._stepped: Counter[Any] = Counter()

    def saw(self, source: str, who: Any) -> Boundary:
        """What it means that `who` (an optimizer, a root module) of this source has just finished."""
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
        """How many optimizers, or root modules, make one step."""
        return len(self._known)

"""Finds where each step ends without edits to the script.

Sources, from the most to the least certain: `stepscope.step()`, an optimizer step, parameters that changed after a
backward, and the root module's forward for scripts that only infer. When a more certain source appears, it replaces
the current one and counting restarts. Once a backward has run, a forward ends no step.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from enum import Enum
from itertools import count, groupby
from typing import Any

EXPLICIT = "step()"
OPTIMIZER = "optimizer"
UPDATE = "update"
FORWARD = "forward"
_RANK = {None: 0, FORWARD: 1, UPDATE: 2, OPTIMIZER: 3, EXPLICIT: 4}

# A GAN's critic takes a few steps per generator step. An optimizer that steps again after more is another matter.
MAX_STEPS_OF_ONE = 16
# Models that are trained in turns, epoch by epoch: after this many changes each optimizer step counts on its own.
MAX_TURNS = 3


class Boundary(Enum):
    """What an event means for the current step."""

    NONE = "goes on"
    JOIN = "goes on, and the last `num_joined` steps were one"
    END = "ends here"
    RESTART = "ends here, and all earlier steps are discarded"


class StepFinder:
    """Turns events into step boundaries.

    An optimizer that has not stepped before trains another model, and its step is one of its own: folds, a grid of
    learning rates, fine-tuning. When an earlier one steps again soon, all that stepped since make up one step, unless
    each of them stepped several times in a row.

    >>> finder = StepFinder()
    >>> [finder.saw(OPTIMIZER, who).name for who in ("D", "G", "D", "G", "D", "D", "G")]
    ['END', 'END', 'JOIN', 'END', 'NONE', 'NONE', 'END']
    """

    def __init__(self) -> None:
        self.source: str | None = None
        self.trains = False
        """Whether a backward has run."""
        self.num_earlier = 0
        """Training steps that were discarded in a restart, or were found to be steps too late."""
        self.num_joined = 1
        """After JOIN, and after RESTART by `stepscope.step()`: how many of the last steps were parts of one."""
        self.most_sources = 0
        """The largest `num_sources` of the steps before a JOIN."""
        self._known: set[Any] = set()
        self._most_known = 0
        self._stepped: Counter[Any] = Counter()
        # The last that stepped, and whether a step ended there.
        self._events: deque[tuple[Any, bool]] = deque(maxlen=MAX_STEPS_OF_ONE + 1)
        self._num_turns = 0

    def saw(self, source: str, who: Any, has_backward: bool = True) -> Boundary:
        """Return what it means that `who` (an optimizer or a root module) has just finished.

        `has_backward` is false for an optimizer that steps without a backward since the last step of any.
        """
        if source is self.source and self.is_usual and who in self._known:
            self._events.append((who, True))
            return Boundary.END
        if not has_backward and source == self.source and self._moves_what_others_trained(who):
            return Boundary.NONE
        if _RANK[source] < _RANK[self.source] or (source == FORWARD and self.trains):
            return Boundary.NONE
        self.trains |= source in (OPTIMIZER, UPDATE)
        if source == self.source:
            boundary = self._next(who)
        else:
            boundary = Boundary.RESTART if self.source is not None else Boundary.END
            # Optimizers that step once each before the first `stepscope.step()` belong to its step.
            is_one = source == EXPLICIT and len({one for one, _ in self._events}) == len(self._events)
            self.num_joined = sum(has_ended for _, has_ended in self._events) if is_one else 1
            self.source = source
            self.num_earlier = 0
            self._know({who})
            self._events.clear()
        self._events.append((who, boundary in (Boundary.END, Boundary.RESTART)))
        return boundary

    def saw_again(self, who: Any, num_steps: int) -> None:
        """Remember usual steps of this optimizer."""
        self._events.extend([(who, True)] * min(num_steps, MAX_STEPS_OF_ONE + 1))

    def _next(self, who: Any) -> Boundary:
        if who not in self._known:
            since = self._runs_since(who)
            every_other = max(2, (len(since) - 1) / 2)
            leaders = {one for one in self._known if sum(one == other for other, _ in since) >= every_other}
            if leaders and leaders != self._known:  # a trunk, heads trained by turns: this one stands for the last
                self._known = leaders | {who}
            elif leaders or (since and min(length for _, length in since) == 1):
                self._join(who)
                return Boundary.JOIN
            else:
                self._know({who})
                return Boundary.END
        self._stepped[who] += 1
        if len(self._stepped) == len(self._known) or self._num_turns > MAX_TURNS:
            self._stepped.clear()
            return Boundary.END
        if self._stepped[who] > MAX_STEPS_OF_ONE:
            # The others have stopped: the steps of this one until now were steps of their own.
            self.num_earlier, self.num_joined = self.num_earlier + self._stepped.total() - 1, 1
            self._num_turns += 1
            self._know(set(self._stepped) if self._num_turns <= MAX_TURNS else self._known)
            return Boundary.RESTART
        return Boundary.NONE

    def _moves_what_others_trained(self, who: Any) -> bool:
        """Return whether this optimizer moves the parameters by the sum of another's steps, as in local SGD.

        It ends no step. One that shares the backward of another steps as often.
        """
        last = [one for one, _ in self._events][-2:]
        return who not in self._known and len(last) == 2 and last[0] == last[1] != who

    def _runs_since(self, who: Any) -> list[tuple[Any, int]]:
        """Return who stepped since the last steps of `who`, with those, and how many times in a row; or nothing.

        A generator steps once after its critic's steps. Models that all step several times in a row take turns.
        """
        runs = [(one, len(list(run))) for one, run in groupby(one for one, _ in self._events)]
        last = max((i for i, (one, _) in enumerate(runs) if one == who), default=None)
        if last is None:
            return []
        is_cut = last == 0 and len(self._events) == self._events.maxlen  # it may have stepped more often before
        return runs[last + is_cut :]

    def _join(self, who: Any) -> None:
        """Know all that have stepped since the last step of `who` as parts of one step."""
        events = list(self._events)
        begin = max(i for i, (earlier, _) in enumerate(events) if earlier == who)
        self.most_sources = self._most_known
        self._know({earlier for earlier, _ in events[begin:]})
        self._stepped[who] = 1
        # A critic may step several times before its partner first does; one that does so for long trains alone.
        before = begin
        while before and events[before - 1][0] in self._known:
            before -= 1
        if before or len(events) < MAX_STEPS_OF_ONE:
            begin = before
        self.num_joined = sum(has_ended for _, has_ended in events[begin:])
        self._events.clear()
        self._events.extend(events[:begin])
        self._events.extend((earlier, False) for earlier, _ in events[begin:-1])
        self._events.append((events[-1][0], True))

    def _know(self, known: set[Any]) -> None:
        self._known = known
        self._most_known = max(self._most_known, len(known))
        self._stepped.clear()

    @property
    def is_usual(self) -> bool:
        """Whether one optimizer, or `stepscope.step()`, ends each step."""
        return self.source in (OPTIMIZER, EXPLICIT) and len(self._known) == 1

    @property
    def repeats(self) -> bool:
        """Whether all that make up a step have shown themselves, as far as can be told."""
        return len(self._known) > 1 or len({who for who, _ in self._events}) == 1

    @property
    def num_sources(self) -> int:
        """The number of optimizers, or root modules, that make up one step."""
        return len(self._known)


class Owners:
    """Numbers optimizers by what they train: a script may make a new one for the same parameters.

    A third one, for the parameters of two others together, trains something else than the first.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[Any], int]] = {}
        self._next = count()

    def number(self, optimizer: Any) -> int:
        first, last = first_parameter(optimizer), _last_parameter(optimizer)
        key = id(first), id(last)
        known = self._numbers.get(key)
        # The id of a released parameter may be used again.
        if known is None or known[0]() is not first or known[1]() is not last:
            self._numbers = {key: each for key, each in self._numbers.items() if each[0]() is not None}
            known = self._numbers[key] = weakref.ref(first), weakref.ref(last), next(self._next)
        return known[2]


def first_parameter(optimizer: Any) -> Any:
    """Return the optimizer itself if it has none."""
    for group in optimizer.param_groups:
        if group["params"]:
            return group["params"][0]
    return optimizer


def _last_parameter(optimizer: Any) -> Any:
    for group in reversed(optimizer.param_groups):
        if group["params"]:
            return group["params"][-1]
    return optimizer

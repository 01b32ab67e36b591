"""How many calls of a step repeat: a program may let its optimizer step in every fourth only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

FEWEST_CALLS = 3
"""The first makes the optimizer's state; whether the third is like the second."""
MOST_CALLS = 16
"""In which every optimizer must step, and in which a repetition is looked for."""


class Call(NamedTuple):
    """One call of a step, as far as two can be alike."""

    sizes: Counter[int]
    """Of what it allocates."""
    stepped: frozenset[int]
    """The groups of parameters that an optimizer stepped, by identity."""


def are_enough(calls: Sequence[Call], optimizers: Collection[Collection[int]]) -> bool:
    """Whether no more calls are needed to tell what follows; each optimizer is the groups that it has.

    Where they do not repeat in `MOST_CALLS`, enough for all optimizers to have stepped twice.
    """
    if len(calls) < FEWEST_CALLS:
        return False
    if _repeating(calls, optimizers) is not None:
        return True
    first, *_ = (*_rounds(calls, optimizers), 0)
    return len(calls) >= max(MOST_CALLS, 2 * first)


def cycle(calls: Sequence[Call], optimizers: Collection[Collection[int]]) -> tuple[int, int]:
    """How many of the calls to look at, and how many at their end are one cycle; idle optimizers have no say.

    >>> one, four = Call(Counter(), frozenset()), Call(Counter(), frozenset({1}))
    >>> cycle([one, one, one, four, one, one, one, four], [{1}])
    (8, 4)
    """
    active = [groups for groups in optimizers if not is_idle(groups, calls)]
    length = _repeating(calls, active)
    if length is not None:
        return len(calls), length
    before, end = (0, 0, *_rounds(calls, active))[-2:]
    return (end, end - before) if before else (len(calls), 1)


def is_idle(groups: Collection[int], calls: Sequence[Call]) -> bool:
    """Whether none of an optimizer's groups was stepped in these calls."""
    return not any(call.stepped.intersection(groups) for call in calls)


def _repeating(calls: Sequence[Call], optimizers: Collection[Collection[int]]) -> int | None:
    """The least number of calls at the end that are as those before them, with a step of every optimizer."""
    for length in range(1, len(calls) // 2 + 1):
        last = calls[-length:]
        if last == calls[-2 * length : -length] and not any(is_idle(groups, last) for groups in optimizers):
            return length
    return None


def _rounds(calls: Sequence[Call], optimizers: Collection[Collection[int]]) -> list[int]:
    """After how many calls every optimizer has stepped, once, twice, …"""
    ends: list[int] = []
    begin = 0
    for end in range(1, len(calls) + 1):
        if not any(is_idle(groups, calls[begin:end]) for groups in optimizers):
            ends.append(end)
            begin = end
    return ends

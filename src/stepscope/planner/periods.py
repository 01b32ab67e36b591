"""Finds how many calls of a step form a cycle: a program may run its optimizer only every fourth call."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

FEWEST_CALLS = 3  # the first creates the optimizer's state, and the third shows whether the second repeats
MOST_CALLS = 16  # in which every optimizer must step, and in which a repetition is looked for


class Call(NamedTuple):
    """One call of a step, as far as it is compared with others."""

    sizes: Counter[int]  # of its allocations
    stepped: frozenset[int]  # the ids of the parameter groups that an optimizer stepped


def are_enough(calls: Sequence[Call], optimizers: Collection[Collection[int]]) -> bool:
    """Return whether the calls suffice to predict what follows. Each optimizer is given as its parameter groups.

    Without a repetition within `MOST_CALLS`, they suffice when all optimizers have stepped twice.
    """
    if len(calls) < FEWEST_CALLS:
        return False
    if _repeating(calls, optimizers) is not None:
        return True
    first, *_ = (*_rounds(calls, optimizers), 0)
    return len(calls) >= max(MOST_CALLS, 2 * first)


def cycle(calls: Sequence[Call], optimizers: Collection[Collection[int]]) -> tuple[int, int]:
    """Return how many calls to use, and how many at their end are one cycle. Idle optimizers are ignored.

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
    """Return whether none of an optimizer's groups was stepped in these calls."""
    return not any(call.stepped.intersection(groups) for call in calls)


def _repeating(calls: Sequence[Call], optimizers: Collection[Collection[int]]) -> int | None:
    """Return the smallest number of final calls that equal those before them and step every optimizer."""
    for length in range(1, len(calls) // 2 + 1):
        last = calls[-length:]
        if last == calls[-2 * length : -length] and not any(is_idle(groups, last) for groups in optimizers):
            return length
    return None


def _rounds(calls: Sequence[Call], optimizers: Collection[Collection[int]]) -> list[int]:
    """Return the numbers of calls after which every optimizer has stepped once, twice, …"""
    ends: list[int] = []
    begin = 0
    for end in range(1, len(calls) + 1):
        if not any(is_idle(groups, calls[begin:end]) for groups in optimizers):
            ends.append(end)
            begin = end
    return ends

"""Searches for the largest number that passes a test."""

from __future__ import annotations

from collections.abc import Callable

HIGHEST = 1 << 24


def largest(fits: Callable[[int], bool], start: int, stride: int | None = None) -> int:
    """Return the largest number that fits, 0 if not even 1 does; numbers above `HIGHEST` are not tried.

    Moves from `start` in doubling strides, up or down, until one number fits and one does not, then bisects. The
    first stride is `start` itself unless given.

    >>> largest(lambda batch: batch <= 37, start=4)
    37
    """
    low, high = 0, None
    number = max(1, start)
    stride = stride or number
    while high is None or high - low > 1:
        if fits(number):
            low = number
        else:
            high = number
        if low >= HIGHEST:
            break
        if high is None:
            number = low + stride
        elif low == 0:
            number = max(high - stride, high // 2)
        else:
            number = (low + high) // 2
        stride *= 2
    return low

"""The largest number that passes a test which larger ones fail."""

from __future__ import annotations

from collections.abc import Callable

HIGHEST = 1 << 24


def largest(fits: Callable[[int], bool], start: int, stride: int | None = None) -> int:
    """The largest number that fits, 0 where not even 1 does; beyond `HIGHEST` nothing is tried.

    From `start` in strides that double, up or down, until there are one that fits and one that does not; then
    bisected. The first stride is as long as `start`: it is doubled.

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

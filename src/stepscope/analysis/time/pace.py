"""Where the pace of a loop changes: a queue of prefetched batches drains, clocks fall, batches grow."""

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, pvariance

from stepscope.analysis.time.statistics import block_means

FEWEST = 8  # steps on either side
MEANS_DIFFER = 0.05  # of the mean
_OF_MANY_PLACES = 6.0  # standard errors: the place is chosen for its difference
_NUM_BLOCKS = 4


def num_unsettled(times: Sequence[float]) -> int:
    """Return the step after which times no longer change: a queue of prefetched batches drains, clocks fall.

    It is in the first half: a few slow steps at the end do not tell how long one takes.

    >>> num_unsettled([3] * 20 + [9] * 60), num_unsettled([9, 3] * 40), num_unsettled([3] * 80 + [9] * 20)
    (20, 0, 0)
    """
    begin, last = 0, len(times) // 2
    while begin <= last and (change := change_of_pace(times[begin:], last - begin)) is not None:
        begin += change
    return begin


def change_of_pace(times: Sequence[float], last: int | None = None) -> int | None:
    """Return the step, up to `last`, before which times differ most from those after it, if by more than matters and
    by more than they vary from block to block on either side: stretches that other processes slow down are no change
    of pace.
    """
    num = len(times)
    places = range(FEWEST, min(num - FEWEST, num if last is None else last) + 1)
    if not places:
        return None
    sums = [0.0, *accumulate(times)]

    def apart(place: int) -> float:
        first, second = sums[place] / place, (sums[num] - sums[place]) / (num - place)
        return float(abs(first - second) * (place * (num - place)) ** 0.5)

    place = max(places, key=apart)
    sides = times[:place], times[place:]
    difference = abs(fmean(sides[0]) - fmean(sides[1]))
    error = sum(_error(side) ** 2 for side in sides) ** 0.5
    return place if difference > MEANS_DIFFER * fmean(times) and difference > _OF_MANY_PLACES * error else None


def _error(times: Sequence[float]) -> float:
    """Return the standard error of a mean of times of which neighbors may be alike."""
    size = max(1, len(times) // _NUM_BLOCKS)
    blocks = block_means(times, size)
    return float(max(pvariance(blocks) / (len(blocks) - 1), pvariance(times) / len(times)) ** 0.5)

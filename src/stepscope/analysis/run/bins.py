"""A run's figures over equal spans of time, as many as a screen has room for."""

from collections.abc import Callable, Sequence

from stepscope.analysis.run.series import TimeBlock, Track


def over_time(
    blocks: Sequence[TimeBlock], num: int, value: Callable[[Sequence[TimeBlock]], float | None]
) -> list[float | None]:
    """Return a figure of the blocks in `num` equal spans, from the first block to the last; None where there is none.

    A block counts where its middle is. A span without one has the figure of the block that its own middle is in.

    >>> from types import SimpleNamespace as Block
    >>> blocks = [Block(start_ns=0, end_ns=10), Block(start_ns=10, end_ns=20), Block(start_ns=60, end_ns=80)]
    >>> over_time(blocks, 4, len), over_time(blocks[:1], 3, len)
    ([2, None, None, 1], [1, 1, 1])
    """
    if not blocks:
        return []
    # Damaged files have blocks that are not in order.
    begin_ns = min(block.start_ns for block in blocks)
    width_ns = max(1.0, (max(block.end_ns for block in blocks) - begin_ns) / num)
    groups: list[list[TimeBlock]] = [[] for _ in range(num)]
    around: list[TimeBlock | None] = [None] * num
    for block in blocks:
        first, last = ((ns - begin_ns) / width_ns for ns in (block.start_ns, block.end_ns))
        groups[min(num - 1, int((first + last) / 2))].append(block)
        for at in range(max(0, round(first)), min(num, round(last))):
            around[at] = block
    found = [group or ([inside] if inside is not None else []) for group, inside in zip(groups, around)]
    return [value(group) if group else None for group in found]


def levels(track: Track, begin_ns: int, end_ns: int, num: int) -> list[float | None]:
    """Return the mean of a track in `num` equal spans; where nothing was noted, the level before holds.

    >>> levels(Track([1, 2, 3], [5, 6, 30], [10.0, 20.0, 40.0]), 0, 40, 4)
    [15.0, 15.0, 15.0, 40.0]
    """
    width_ns = max(1.0, (end_ns - begin_ns) / num)
    groups: list[list[float]] = [[] for _ in range(num)]
    for ns, value in zip(track.ns, track.values):
        if ns >= begin_ns:
            groups[min(num - 1, int((ns - begin_ns) / width_ns))].append(value)
    found: list[float | None] = []
    for group in groups:
        found.append(sum(group) / len(group) if group else found[-1] if found else None)
    return found

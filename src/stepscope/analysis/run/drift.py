"""Steps that become slower in the course of a run, and what changed with them."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

from stepscope.analysis.run.change_points import DRIFT, MOST_POINTS, STEP, Change, changes
from stepscope.analysis.run.series import Run, TimeBlock, own_ns
from stepscope.analysis.time.loop_time import BETWEEN, DATA, GAPS

WORK = "work per step"
_LEAST_PART = 0.25  # of the change; smaller parts are not its reason
_WAITS = 0.05  # of the time: from then on, others are at work on the cores
_ALIKE, _LEAST_ALIKE = 0.05, 3  # of the machine's cores; points
_OF_A_CORE = 2.0  # two threads that share a core take at most twice as long each
_LEAST_SHOWN = 0.25  # of a part's change, by which the step must change
_NEAR = 0.02  # of the run's steps
_SIDES = (-3, -1), (-1, 1), (1, 3)  # cells before a change, around it, and after it
_CLOCK_DROP, _MORE_MEMORY, _MORE_COLLECTIONS = 0.03, 0.1, 0.5


@dataclass(frozen=True)
class Together:
    """A figure that changed with the step time."""

    name: str  # `data`, `other`, `passes` (ns per step), or the name of a track
    before: float
    after: float


@dataclass(frozen=True)
class Slowdown:
    """Steps that take longer from some step on."""

    kind: str  # `step` (at once) or `drift` (slowly)
    step: int  # the first slower step, or where it begins to grow
    earliest_step: int  # that may be the first one, with 95 %
    latest_step: int
    end_step: int  # the last step of it
    lasts: bool  # whether it lasts to the end of what is known
    before_ns: float
    after_ns: float  # of a drift: at its end
    lost_ns: float  # its extra time in total
    together: tuple[Together, ...]  # the part of the step that grew most first
    may_be_others: bool  # use the cores too, and could be the reason

    @property
    def share(self) -> float:
        return self.after_ns / self.before_ns - 1

    def growth_per(self, num_steps: int) -> float:
        """Return how much a step grows in so many steps, as a share of the level before."""
        return self.share / max(1, self.end_step - self.step) * num_steps


class _Point(NamedTuple):
    """The step time of consecutive steps, without what comes from other processes where that is known."""

    step: int
    num_steps: int
    ns: float
    on_core_ns: float = 0.0  # of `ns`
    others: float = 0.0  # share of the machine's cores that other processes used; 0 if unknown


def step_changes(run: Run) -> list[tuple[Change, int, int]]:
    """Return every change of the step time, faster ones too, each with its first step and the one after its last.

    What others do to the caches and cores makes the steps' time on a core wander. The rest, in which training sleeps
    or waits, does not: a change of it alone is known more exactly, and takes the place of the same one in the sum.
    """
    points = _points(run)
    steps, values = _cells(run, points)
    ends = [*steps, run.last_step + 1]
    found = list(changes(values, is_one_sided="core_wait_share" not in run.tracks))
    if any(point.on_core_ns for point in points):
        on_core_ns = median(point.on_core_ns for point in points)
        rest = [point._replace(ns=point.ns - point.on_core_ns + on_core_ns) for point in points]
        exact = [each for each in changes(_cells(run, rest)[1], is_one_sided=False) if _shows(each, values)]
        found = [each for each in found if not any(_is_same(each, other) for other in exact)]
        found = sorted([*found, *exact], key=lambda each: each.index)
    firsts = {each.index: _first_step(points, ends, each.index) for each in found if each.kind == STEP}
    return [
        (
            replace(each, low=ends[each.low], high=ends[each.high]),
            firsts.get(each.index, ends[each.index]),
            firsts.get(each.end, ends[each.end]),
        )
        for each in found
    ]


def _shows(part: Change, values: Sequence[float]) -> bool:
    """Return whether the whole step changes by at least a quarter as much as a part of it."""
    after = values[part.index : part.end]
    if part.kind == DRIFT:
        after = after[-max(1, len(after) // 5) :]
    before = values[: part.index] if part.index > 3 else values[: max(1, len(values) // 5)]
    change = median(after) - median(before)
    return change / (part.after - part.before) >= _LEAST_SHOWN


def _is_same(whole: Change, part: Change) -> bool:
    """Return whether a change of the whole step is at the place of a part's, in the same direction."""
    is_alike = (whole.after > whole.before) == (part.after > part.before)
    if DRIFT in (whole.kind, part.kind):
        return is_alike and whole.index < part.end and part.index < whole.end
    return is_alike and whole.low <= part.high and part.low <= whole.high


def _first_step(points: Sequence[_Point], ends: Sequence[int], index: int) -> int:
    """Return the first step of a new level that begins in a cell or next to it: the point that splits them best."""
    sides = [(ends[max(0, index + low)], ends[min(len(ends) - 1, index + high)]) for low, high in _SIDES]
    before, within, after = ([point for point in points if low <= point.step < high] for low, high in sides)
    if not (before and within and after):
        return ends[index]
    old, new = (median(point.ns for point in side) for side in (before, after))
    middle, sign = (old + new) / 2, 1 if new > old else -1
    # Each point on the wrong side of the split counts against it.
    costs = [sign if point.ns > middle else -sign for point in within]
    sums = [0, *accumulate(costs)]
    cut = min(range(len(sums)), key=sums.__getitem__)
    return within[cut].step if cut < len(within) else ends[index + 1]


def step_series(run: Run) -> tuple[list[int], list[float]]:
    """Return first steps of cells of equally many steps, and the typical step time of each."""
    return _cells(run, _points(run))


def _points(run: Run) -> list[_Point]:
    """Return the step time of each block; if the wait for a CPU core is known, without it, where that was read.

    The wait comes from other processes. It is spread unevenly over steps, so it is taken from the sum of all steps
    between two readings.
    """
    waits = run.tracks.get("core_wait_share")
    if waits is None:
        return [_Point(block.step, block.num_steps, block.median_ns) for block in run.free]
    shares, others = run.tracks.get("core_share"), run.tracks.get("others_share")
    on_core = dict(zip(shares.steps, shares.values)) if shares is not None else {}
    groups: dict[int, list[TimeBlock]] = {}
    for block in run.free:
        groups.setdefault(bisect_left(waits.steps, block.step + block.num_steps - 1), []).append(block)
    found = []
    for reading, blocks in groups.items():
        if reading < len(waits.steps):
            own = sum(own_ns(block.wall_ns, block.host_ns) for block in blocks)
            num_steps = sum(block.num_steps for block in blocks)
            rest = max(1.0, own * (1 - waits.values[reading]) / num_steps)
            on_core_ns = own * on_core.get(waits.steps[reading], 0.0) / num_steps
            at = bisect_left(others.steps, waits.steps[reading]) if others is not None else 0
            used = others.values[at] if others is not None and at < len(others.values) else 0.0
            found.append(_Point(blocks[0].step, num_steps, rest, min(rest, on_core_ns), used))
    return found


def _cells(run: Run, points: Sequence[_Point]) -> tuple[list[int], list[float]]:
    """Return points as cells of equally many steps: those of a history become longer as the run goes on."""
    length = max(1, max((point.num_steps for point in points), default=1), run.num_steps // MOST_POINTS)
    cells: dict[int, list[_Point]] = {}
    for point in points:
        cells.setdefault(point.step // length, []).append(point)
    return [cell[0].step for cell in cells.values()], [median(p.ns for p in cell) for cell in cells.values()]


def slowdowns(run: Run) -> tuple[Slowdown, ...]:
    """Return where steps become slower and their work does not grow, the most lost time first."""
    found = []
    earlier = run.first_step
    blocks = run.free
    steps, values = step_series(run)
    steps = [*steps, run.last_step + 1]
    for change, first, end in step_changes(run):
        before = [block for block in blocks if earlier <= block.step < first]
        after = [block for block in blocks if first <= block.step < end]
        earlier = first
        if change.after <= change.before or not after:
            continue
        arrived = after
        if change.kind == DRIFT:
            arrived = after[-max(1, len(after) // 5) :]
            before = before if len(before) > 3 else after[: max(1, len(after) // 5)]
        may_be_others = _may_be_others(run, before, arrived, change)
        together = tuple(_together(run, before, arrived, change))
        if any(each.name == WORK and each.after / each.before - 1 > change.share / 2 for each in together):
            continue  # larger batches take longer
        cells = list(zip(pairwise(steps), values))[change.index : change.end]
        lost_ns = sum(max(0.0, ns - change.before) * (later - step) for (step, later), ns in cells)
        levels = change.before, change.after
        within = min(first, change.low), max(first, change.high)
        lasts = end > run.last_step
        found.append(Slowdown(change.kind, first, *within, end - 1, lasts, *levels, lost_ns, together, may_be_others))
    return tuple(sorted(found, key=lambda each: -each.lost_ns))


def _may_be_others(run: Run, before: Sequence[TimeBlock], after: Sequence[TimeBlock], change: Change) -> bool:
    """Return whether a change may come from others that use the cores too.

    They run beside it on the same caches, and on the other thread of its core. The same work then takes up to
    `_OF_A_CORE` times as long, and the training is not at fault. They are there if training waits for cores, or if
    they use more of them than before; then steps during which they use no more than before show what is left.
    """
    waits = run.tracks.get("core_wait_share")
    if waits is None or "core_share" not in run.tracks or not before:
        return False
    ends = [(side[0].step, side[-1].step + side[-1].num_steps) for side in (before, after)]
    points = _points(run)
    sides = [[point for point in points if low <= point.step < high] for low, high in ends]
    if not all(sides):
        return False
    old, new = (median(point.on_core_ns for point in side) for side in sides)
    least = old + (change.after - change.before) / 2
    if not least < new < _OF_A_CORE * old:
        return False
    if max(waits.mean(*end) or 0.0 for end in ends) >= _WAITS:
        return True
    limit = median(point.others for point in sides[0]) + _ALIKE
    alike = [point.on_core_ns for point in sides[1] if point.others <= limit]
    return len(alike) < min(_LEAST_ALIKE, len(sides[1])) or median(alike) <= least


def _together(
    run: Run, before: Sequence[TimeBlock], after: Sequence[TimeBlock], change: Change
) -> Iterator[Together]:
    grown_ns = max(1.0, change.after - change.before)
    parts = {name: tuple(_per_step(side, name) for side in (before, after)) for name in (DATA, "other", "passes")}
    for name, (first, second) in sorted(parts.items(), key=lambda part: part[1][0] - part[1][1]):
        if second - first >= _LEAST_PART * grown_ns:
            yield Together(name, first, second)
    num_work = [_mean([block.num_tokens or block.num_samples for block in side], side) for side in (before, after)]
    if num_work[0] and abs(num_work[1] / num_work[0] - 1) > 0.02:
        yield Together(WORK, *num_work)
    ends = [(side[0].step, side[-1].step + side[-1].num_steps) for side in (before, after)]
    for name, (low, high) in _TRACKS.items():
        level, new = (_level(run, name, end) for end in ends)
        if level is None or new is None:
            continue
        if new < level * (1 + low) or new > level * (1 + high) + (0 if level else 0.5):
            yield Together(name, level, new)
    begin = ends[1][0] - round(_NEAR * run.num_steps)  # where it compiles may be just before the first slower block
    num_compiles = [
        sum(block.num_compiles for block in run.blocks if first <= block.step < last)
        for first, last in ((ends[0][0], begin), (begin, ends[1][1]))
    ]
    if num_compiles[1] and not num_compiles[0]:
        yield Together("num_compiles", *num_compiles)


_INFINITE = float("inf")
_TRACKS = {  # relative changes, down or up, from which a figure is named
    "sm_clock_mhz": (-_CLOCK_DROP, _INFINITE),
    "allocated_bytes": (-1.0, _MORE_MEMORY),
    "resident_bytes": (-1.0, _MORE_MEMORY),
    "num_collections": (-1.0, _MORE_COLLECTIONS),
    "num_gpu_processes": (-1.0, 0.0),
    "core_wait_share": (-1.0, 1.0),
}


def _per_step(blocks: Sequence[TimeBlock], name: str) -> float:
    """Return what a typical step spends on data, between its passes (`other`), or in its passes."""

    def part(block: TimeBlock) -> int:
        if name == "passes":
            rest = (DATA, *GAPS, *BETWEEN)
            return sum(ns for each, ns in block.host_ns.items() if each not in rest)
        return sum(block.host_ns.get(each, 0) for each in (GAPS if name == "other" else (name,)))

    return median(part(block) / block.num_steps for block in blocks)


def _mean(numbers: Sequence[int], blocks: Sequence[TimeBlock]) -> float:
    return sum(numbers) / max(1, sum(block.num_steps for block in blocks))


def _level(run: Run, name: str, ends: tuple[int, int]) -> float | None:
    """Return the mean of a figure from one step to before another; of a count, how often it happened per step."""
    if (track := run.tracks.get(name)) is None:
        return None
    if name != "num_collections":
        return track.mean(*ends)
    total = sum(value for step, value in zip(track.steps, track.values) if ends[0] <= step < ends[1])
    return total / max(1, ends[1] - ends[0])

"""Memory that grows from step to step for as long as the run goes on."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.analysis.run.change_points import hinge, tau
from stepscope.analysis.run.series import FREE, RESTART, Run

_MOST_POINTS, FEWEST = 40, 12
LEAST_STEPS = 100  # without a probe: what a run fills at its start, and Stepscope's own windows, is no growth
LEAST_BYTES = 16 << 20  # caches and pools grow by less
LEAST_SHARE = 0.02  # of the memory where the growth begins
_CONCORDANT = 0.8  # Kendall's tau of the lowest levels
_STEADY = 0.5  # of the mean growth; each third of the time has at least that
KINDS = {"allocated_bytes": "GPU memory", "resident_bytes": "host memory"}


@dataclass(frozen=True)
class Creep:
    """Memory that grows from step to step."""

    name: str  # the track: `allocated_bytes` or `resident_bytes`
    step: int  # where the growth begins
    last_step: int
    before_bytes: float
    after_bytes: float
    bytes_per_step: float
    free_bytes: float | None  # what is left now; None if the limit is unknown
    steps_left: float | None  # until nothing is left, at this rate

    @property
    def per_1000_steps(self) -> float:
        return 1000 * self.bytes_per_step


def creeps(run: Run) -> tuple[Creep, ...]:
    """Return the memory that grows steadily, on the GPU and on the host."""
    found = (_creep(run, name) for name in KINDS)
    return tuple(creep for creep in found if creep is not None)


def _creep(run: Run, name: str) -> Creep | None:
    track = run.tracks.get(name)
    if track is None:
        return None
    begin = next((block.step for block in run.blocks if block.window == FREE), run.last_step)
    first = max((each.step for each in run.happenings if each.kind == RESTART), default=begin)
    known = [(step, value) for step, value in zip(track.steps, track.values) if step >= max(first, begin)]
    if len(known) < FEWEST or known[-1][0] - known[0][0] < LEAST_STEPS:
        return None
    # Cells of equally many steps, and the lowest of each: an evaluation or a larger batch takes memory for a while.
    length = max(1, (known[-1][0] - known[0][0] + 1) // _MOST_POINTS)
    cells: dict[int, tuple[float, int]] = {}
    for step, value in known:
        cell = (step - known[0][0]) // length
        cells[cell] = min(cells.get(cell, (value, step)), (value, step))
    lows, steps = zip(*cells.values())
    if len(lows) < FEWEST:
        return None
    k = min(hinge(lows, at) for at in range(len(lows) - len(lows) // 3))[1]  # where the growth begins
    grown, level = lows[-1] - lows[k], lows[k]
    if grown < max(LEAST_BYTES, LEAST_SHARE * level) or tau(lows[k:]) < _CONCORDANT or not _is_steady(lows[k:]):
        return None
    pairs = sorted(
        (lows[j] - lows[i]) / (steps[j] - steps[i])
        for i in range(k, len(lows))
        for j in range(i + 1, len(lows))
        if steps[j] > steps[i]
    )
    per_step = pairs[len(pairs) // 2]
    free = _free_bytes(run, name)
    left = None if free is None else free / per_step
    return Creep(name, steps[k] if k else known[0][0], known[-1][0], level, lows[-1], per_step, free, left)


def _is_steady(lows: Sequence[float]) -> bool:
    """Return whether every third of the time has its part of the growth: a cache that fills up stops growing."""
    num = len(lows) - 1
    mean = (lows[-1] - lows[0]) / 3
    thirds = [lows[round((i + 1) * num / 3)] - lows[round(i * num / 3)] for i in range(3)]
    return all(third >= _STEADY * mean for third in thirds)


def _free_bytes(run: Run, name: str) -> float | None:
    def last(track: str) -> float | None:
        found = run.tracks.get(track)
        return found.values[-1] if found is not None and found.values else None

    if name == "resident_bytes":
        return last("available_bytes")
    total, used = last("total_bytes"), [last("allocated_bytes"), last("gpu_memory_bytes")]
    known = [num_bytes for num_bytes in used if num_bytes is not None]
    return None if total is None or not known else max(0.0, total - max(known))

"""What evaluations add to the peak of GPU memory: a run that fits its training can still run out of memory there."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stepscope.analysis.run.series import Run

LEAST_SHARE = 0.1  # of the peak
LEAST_BYTES = 256 << 20
EVALUATION = "evaluation"


@dataclass(frozen=True)
class EvaluationPeak:
    """The most that one evaluation raised the peak of GPU memory."""

    step: int  # the evaluation came before this step, or shortly before it
    before_bytes: float  # the peak until then
    bytes: float


def evaluation_peak(run: Run) -> EvaluationPeak | None:
    """Return the evaluation that raised the peak most; None if none did by a tenth."""
    peaks = run.tracks.get("peak_bytes")
    if peaks is None:
        return None
    rises = []
    highest = accumulate(peaks.values, max)  # the script, or a window, may reset the peak
    for (first, before), (last, after) in pairwise(zip(peaks.steps, highest)):
        if after - before >= max(LEAST_BYTES, LEAST_SHARE * after):
            step = _evaluated_in(run, first + 1, last)
            if step is not None:
                rises.append(EvaluationPeak(step, before, after))
    return max(rises, key=lambda rise: rise.bytes - rise.before_bytes, default=None)


def _evaluated_in(run: Run, first: int, last: int) -> int | None:
    """Return the first step of a block in which an evaluation ran, from one step to another; None if none did."""
    begin = max(0, bisect_left(run.blocks, first + 1, key=lambda block: block.step) - 1)
    for block in run.blocks[begin:]:
        if block.step > last:
            return None
        if block.host_ns.get(EVALUATION) and block.step + block.num_steps > first:
            return max(first, block.step)
    return None

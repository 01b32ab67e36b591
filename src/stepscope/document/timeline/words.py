"""What the timeline does not show, in words with figures."""

from __future__ import annotations

from stepscope.analysis.structure.links import Linked
from stepscope.document.timeline.lanes import Lanes
from stepscope.document.timeline.levels import Kept
from stepscope.document.timeline.memory import Curve
from stepscope.formatting import duration, plural


def note(
    linked: Linked, lanes: Lanes, kept: Kept, num_drawn: int, curves: list[Curve], tick_ns: float, num_far: int
) -> str:
    """A few sentences below the timeline."""
    num_all = lanes.events.height
    if num_all == 0:
        return "The trace has no events to draw."
    sentences = []
    if num_drawn + num_far == num_all:
        sentences.append(f"{'The event is' if num_drawn == 1 else f'All {num_drawn:,} events are'} drawn one by one.")
    else:
        which = [f"{_steps(kept.steps)} whole"] if kept.steps else []
        if kept.least_ns is not None:
            where = "elsewhere " if kept.steps else ""
            which.append(
                f"{where}the longest, from {duration(kept.least_ns, 3)} on, with the launches of such kernels"
            )
        shown = f"{num_drawn:,} of {num_all:,} events are drawn one by one"
        sentences.append(f"{shown}: {', '.join(which)}; the rest is in the shading.")
    if lanes.left_out:
        sentences.append(f"Not shown: {'; '.join(lanes.left_out)}.")
    if num_far:
        sentences.append(f"{plural(num_far, 'event')} so far from all others in time that they are not drawn.")
    thinned = [curve for curve in curves if curve.points.height < curve.num_all]
    if thinned:
        num_shown, num_every = (sum(getter(curve) for curve in thinned) for getter in (_shown, _every))
        sentences.append(
            f"Memory is drawn from {num_shown:,} of {num_every:,} changes: the lowest and highest of each stretch."
        )
    if tick_ns > 1:
        sentences.append(f"Times are rounded to {duration(tick_ns, 2)}.")
    if linked.trace.facts.is_cut_off:
        sentences.append("The file of the trace ends too early: what came later is missing.")
    return " ".join(sentences)


def _steps(numbers: list[int]) -> str:
    """
    >>> _steps([3]), _steps([3, 4]), _steps([3, 4, 5])
    ('step 3', 'steps 3 and 4', 'steps 3 to 5')
    """
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2:
        return f"steps {numbers[0]} to {numbers[-1]}"
    return f"steps {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _shown(curve: Curve) -> int:
    return curve.points.height


def _every(curve: Curve) -> int:
    return curve.num_all

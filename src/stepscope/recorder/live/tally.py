"""The steps of a running recording, added up: what `live_metrics` needs, in bounded memory.

The definitions are those of `analysis/time/loop_time.py`, so that the last live figures are the card's. That file
reads all steps again; this one keeps the last ones, and sums of those before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import median, quantiles

from stepscope.recorder import windows
from stepscope.recorder.clock import BEFORE_BACKWARD, BEFORE_FORWARD, BETWEEN_STEPS, DATA, OTHER

RECENT = 100
"""Steps behind the step time, so that a chart follows a run that becomes slower."""
MOST_KEPT = 1024
_GAPS = (BEFORE_FORWARD, BEFORE_BACKWARD, OTHER)
_NOT_PASSES = frozenset((*BETWEEN_STEPS, *_GAPS, DATA))
_FENCE, _LEAST_EXCESS, _LEAST_GAP = 7.0, 1.5, 0.05


@dataclass
class Step:
    """A finished step. Its sums are computed once, and only if someone asks for the figures."""

    window: str
    wall_ns: int
    host_ns: dict[str, int]
    batch: tuple[int, int, int]  # tokens, samples, micro-batches
    num_compiles: int

    @cached_property
    def is_undisturbed(self) -> bool:
        return self.window in (windows.CLEAN, windows.FREE) and not self.num_compiles

    @cached_property
    def own_ns(self) -> int:
        """The step without what the loop does between steps."""
        return self.wall_ns - sum(ns for name, ns in self.host_ns.items() if name in BETWEEN_STEPS)

    @cached_property
    def pass_ns(self) -> int:
        return sum(ns for name, ns in self.host_ns.items() if name not in _NOT_PASSES)

    @cached_property
    def gap_ns(self) -> int:
        return sum(self.host_ns.get(name, 0) for name in _GAPS)


class Between:
    """When the loop did one thing between its steps, and for how long."""

    def __init__(self, step: int, ns: int) -> None:
        self.first = self.last = step
        self.first_ns = self.ns = ns

    def per_step_ns(self, num_steps: int) -> float:
        """Return its time per step. What happens only before the first step is part of starting up."""
        if self.first == self.last:
            return self.ns / num_steps if self.first else 0.0
        return (self.ns - self.first_ns) / (self.last - self.first)  # the first time may take longer


class Tally:
    """The steps of one recording so far."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget every step."""
        self.num_steps = 0
        self._kept: list[Step] = []
        self._between: dict[str, Between] = {}
        self._training_ns = self._loop_ns = 0.0  # of the steps that are no longer kept

    def add(
        self,
        window: str,
        wall_ns: int,
        host_ns: dict[str, int],
        batch: tuple[int, int, int],
        num_compiles: int = 0,
    ) -> None:
        self._kept.append(Step(window, wall_ns, host_ns, batch, num_compiles))
        if not num_compiles:  # compiling collects garbage for seconds, and that happens once
            self._add_between(self.num_steps, host_ns)
        self.num_steps += 1
        if len(self._kept) >= MOST_KEPT:
            self._training_ns, self._loop_ns = self._added_up(MOST_KEPT // 2)
            del self._kept[: MOST_KEPT // 2]

    def add_aside(self, which: str, host_ns: dict[str, int]) -> None:
        """Add what the loop did before its first step (`lead`) or after its last one."""
        self._add_between(0 if which == "lead" else self.num_steps, host_ns)
        self._loop_ns += sum(host_ns.values())

    def join(self, num_joined: int) -> None:
        """Make one step of the last ones."""
        steps = self._kept[-num_joined:]
        host_ns: dict[str, int] = {}
        for step in steps:
            for name, ns in step.host_ns.items():
                host_ns[name] = host_ns.get(name, 0) + ns
        tokens, samples, _ = (max(numbers) for numbers in zip(*(step.batch for step in steps)))
        wall_ns, num_compiles = sum(step.wall_ns for step in steps), sum(step.num_compiles for step in steps)
        batch = tokens, samples, steps[0].batch[2]
        self._kept[-num_joined:] = [Step(steps[0].window, wall_ns, host_ns, batch, num_compiles)]
        self.num_steps -= num_joined - 1

    def recent(self) -> list[Step]:
        """Return the last undisturbed steps; in a run of a few steps, those after the first."""
        kept = list(self._kept)
        undisturbed = [step for step in kept if step.is_undisturbed]
        return (undisturbed or kept[1:] or kept)[-RECENT:]

    def between_ns(self) -> float:
        """Return the time per step of what the loop does between steps."""
        return sum(each.per_step_ns(self.num_steps) for each in list(self._between.values()))

    def goodput(self) -> float | None:
        """Return the share of training in the loop's wall-clock time, without Stepscope's own work."""
        training_ns, loop_ns = self._added_up(len(self._kept))
        return training_ns / loop_ns if loop_ns else None

    def _add_between(self, step: int, host_ns: dict[str, int]) -> None:
        for name in host_ns.keys() & BETWEEN_STEPS:
            if (ns := host_ns[name]) == 0:
                continue
            if (found := self._between.get(name)) is None:
                self._between[name] = Between(step, ns)
                continue
            if found.first == found.last == step:
                found.first_ns += ns
            found.ns, found.last = found.ns + ns, step

    def _added_up(self, num: int) -> tuple[float, float]:
        """Return the time of training and of the whole loop, up to and including the first kept steps."""
        training_ns, loop_ns, kept = self._training_ns, self._loop_ns, list(self._kept)
        undisturbed = [step for step in kept if step.is_undisturbed] or kept[1:] or kept
        usual = {is_free: _usual_of(undisturbed, is_free) for is_free in (False, True)} if kept else {}
        for step in kept[:num]:
            middle, limit, usual_gap, gap_limit = usual[step.window == windows.FREE]
            passes, gap = step.pass_ns, step.gap_ns
            regular = passes if step.is_undisturbed and passes <= limit else min(passes, middle)
            training_ns += regular + (min(gap, usual_gap) if gap > gap_limit else gap)
            is_probed = step.window not in (windows.WARMUP, windows.CLEAN, windows.FREE)
            loop_ns += step.wall_ns - (passes - regular if is_probed else 0)
        return training_ns, loop_ns


def _usual_of(undisturbed: list[Step], is_free: bool) -> tuple[float, float, float, float]:
    """Return the usual passes and gaps of such steps, each with the limit above which it is unusual."""
    # A step of free running is not split: its gaps are part of its passes.
    alike = [step for step in undisturbed if (step.window == windows.FREE) == is_free] or undisturbed
    middle, limit = _usual([step.pass_ns for step in alike])
    usual_gap, gap_limit = _usual([step.gap_ns for step in alike])
    return middle, limit, usual_gap, max(gap_limit, round(_LEAST_GAP * middle))


def _usual(times: list[int]) -> tuple[int, int]:
    middle = median(times)
    first_quartile = quantiles(times, method="inclusive")[0] if len(times) > 1 else middle
    return round(middle), round(max(middle + _FENCE * (middle - first_quartile), _LEAST_EXCESS * middle))

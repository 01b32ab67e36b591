"""The steps of a running recording, added up: what `live_metrics` needs, in bounded memory.

The definitions are those of `analysis/time/loop_time.py`, so that the last live figures are the card's. That file
reads all steps again; this one keeps the last ones, and sums of those before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from copy import copy

from stepscope.recorder import windows
from stepscope.recorder.clock import BEFORE_BACKWARD, BEFORE_FORWARD, BETWEEN_STEPS, DATA, LOADER_START, OTHER

RECENT = 100
"""Steps behind the step time, so that a chart follows a run that becomes slower."""
MOST_KEPT, REFRESH_AFTER = 128, 64  # steps; more memory would look like a leak
_GAPS = frozenset((BEFORE_FORWARD, BEFORE_BACKWARD, OTHER))
_BETWEEN = frozenset(BETWEEN_STEPS)
_FENCE, _LEAST_EXCESS, _LEAST_GAP = 7.0, 1.5, 0.05
_CLEAN, _FREE, _WARMUP, _PROBED = range(4)  # a step that compiles is a warm-up whenever it comes
_KINDS = {windows.WARMUP: _WARMUP, windows.CLEAN: _CLEAN, windows.FREE: _FREE}

Step = tuple[int, int, int, int, int, int, int]
"""Its kind, the ns of the step, of its passes, of gaps between them and of what lies before it, tokens, samples."""
Usual = tuple[float, float, float, float]


class Between:
    """When the loop did one thing between its steps, and for how long."""

    def __init__(self, step: int, ns: int) -> None:
        self.first = self.last = step
        self.first_ns = self.ns = ns
        self.num = 1

    def add(self, step: int, ns: int) -> None:
        if self.first == self.last == step:
            self.first_ns += ns
        self.num += self.last != step
        self.ns, self.last = self.ns + ns, step

    def per_step_ns(self, num_steps: int, is_whole: bool) -> float:
        """Return its time per step. What happens only before the first step is part of starting up."""
        if self.first == self.last:
            return self.ns / num_steps if self.first else 0.0
        later_ns = self.ns - self.first_ns  # the first time may take longer
        if is_whole:
            return later_ns / (self.num - 1) * self.num / num_steps
        return later_ns / (self.last - self.first)


class Tally:
    """The steps of one recording so far."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget every step."""
        self.num_steps = 0
        self._kept: deque[Step] = deque()
        self._between: dict[str, Between] = {}
        self._training_ns = self._loop_ns = 0.0  # of the steps that are no longer kept
        self._usual: dict[bool, Usual] = {}
        self._num_since = 0  # `_usual` was computed

    def add(
        self,
        window: str,
        wall_ns: int,
        host_ns: dict[str, int],
        batch: tuple[int, int, int],
        num_compiles: int = 0,
    ) -> None:
        # This runs at every step of the script.
        passes = gap = between = 0
        for name, ns in host_ns.items():
            if name in _GAPS:
                gap += ns
            elif name in _BETWEEN:
                between += ns
            elif name != DATA:
                passes += ns
        if between and not num_compiles:  # compiling collects garbage for seconds, and that happens once
            _add_between(self._between, self.num_steps, host_ns)
        kind = _KINDS.get(window, _PROBED)
        kind = _WARMUP if num_compiles and kind < _WARMUP else kind
        self._kept.append((kind, wall_ns, passes, gap, between, batch[0], batch[1]))
        self.num_steps += 1
        if len(self._kept) > MOST_KEPT:
            self._num_since += 1
            if not self._usual or self._num_since >= REFRESH_AFTER:
                self._usual, self._num_since = _usual_of(list(self._kept)), 0
            training_ns, loop_ns = _split([self._kept.popleft()], self._usual)
            self._training_ns += training_ns
            self._loop_ns += loop_ns

    def add_aside(self, which: str, host_ns: dict[str, int]) -> None:
        """Add what the loop did before its first step (`lead`) or after its last one."""
        _add_between(self._between, 0 if which == "lead" else self.num_steps, host_ns)
        self._loop_ns += sum(host_ns.values())

    def join(self, num_joined: int) -> None:
        """Join the last steps into one."""
        steps = [self._kept.pop() for _ in range(min(num_joined, len(self._kept)))]
        if steps:
            times = [sum(step[i] for step in steps) for i in range(1, 5)]
            tokens, samples = (max(step[i] for step in steps) for i in (5, 6))
            self._kept.append((steps[-1][0], times[0], times[1], times[2], times[3], tokens, samples))
            self.num_steps -= len(steps) - 1

    def recent(self) -> list[tuple[int, int, int]]:
        """Return own time, tokens and samples of the last undisturbed steps; else of all after the first."""
        return [(step[1] - step[4], step[5], step[6]) for step in _undisturbed(list(self._kept))[-RECENT:]]

    def between_ns(self, tail: Mapping[str, int] | None = None) -> float:
        """Return the time per step of what the loop does between steps.

        `tail` is what it has done since its last step. With it, this is the figure of a run that ends here.
        """
        found = self._between.copy()
        if tail:
            found = {name: copy(each) for name, each in found.items()}
            _add_between(found, self.num_steps, {name: ns for name, ns in tail.items() if name != LOADER_START})
        return sum(each.per_step_ns(self.num_steps, tail is not None) for each in found.values())

    def goodput(self, tail: Mapping[str, int] | None = None) -> float | None:
        """Return the share of training in the loop's wall-clock time, without Stepscope's own work."""
        kept = list(self._kept)
        training_ns, loop_ns = _split(kept, _usual_of(kept))
        loop_ns += self._loop_ns + sum((tail or {}).values())
        return (training_ns + self._training_ns) / loop_ns if loop_ns else None


def _add_between(between: dict[str, Between], step: int, host_ns: Mapping[str, int]) -> None:
    for name in host_ns.keys() & _BETWEEN:
        if (ns := host_ns[name]) == 0:
            continue
        if name in between:
            between[name].add(step, ns)
        else:
            between[name] = Between(step, ns)


def _undisturbed(steps: list[Step]) -> list[Step]:
    return [step for step in steps if step[0] < _WARMUP] or steps[1:] or steps


def _split(steps: list[Step], usual: dict[bool, Usual]) -> tuple[float, float]:
    """Return how much of some steps is training, and how much is part of the loop: not what a probe took longer."""
    training_ns = loop_ns = 0.0
    for kind, wall_ns, passes, gap, *_ in steps:
        middle, limit, usual_gap, gap_limit = usual[kind == _FREE]
        regular = passes if kind < _WARMUP and passes <= limit else min(passes, middle)
        training_ns += regular + (min(gap, usual_gap) if gap > gap_limit else gap)
        loop_ns += wall_ns - (passes - regular if kind == _PROBED else 0)
    return training_ns, loop_ns


def _usual_of(steps: list[Step]) -> dict[bool, Usual]:
    """Return the usual passes and gaps of free running and of steps before, each with the limit of what is usual."""
    found: dict[bool, Usual] = {}
    undisturbed = _undisturbed(steps)
    for is_free in (False, True):
        # A step of free running is not split: its gaps are part of its passes.
        alike = [step for step in undisturbed if (step[0] == _FREE) == is_free] or undisturbed
        if alike:
            middle, limit = _usual([step[2] for step in alike])
            usual_gap, gap_limit = _usual([step[3] for step in alike])
            found[is_free] = middle, limit, usual_gap, max(gap_limit, round(_LEAST_GAP * middle))
    return found


def _usual(times: list[int]) -> tuple[int, int]:
    ordered, last = sorted(times), len(times) - 1
    middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    below, above = ordered[last // 4], ordered[min(last // 4 + 1, last)]
    first_quartile = below + (above - below) * (last / 4 % 1)
    return round(middle), round(max(middle + _FENCE * (middle - first_quartile), _LEAST_EXCESS * middle))

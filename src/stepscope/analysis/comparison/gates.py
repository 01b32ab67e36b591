"""Gates: limits on how much a metric may get worse. A missing metric never passes."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stepscope.analysis.comparison.compare import SCHEMA_VERSION, Pair
from stepscope.analysis.comparison.metrics import FEWEST, METRICS, STEPS, TOO_FEW
from stepscope.display import Shown
from stepscope.errors import UsageError

PASSED, FAILED, UNDECIDED = "passed", "failed", "undecided"
EXIT_FINE, EXIT_FAILED, EXIT_NOT_COMPARABLE = 0, 3, 4
_ROUNDING = 1e-9
_GATE = re.compile(r"([a-z_]+):([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%")


@dataclass(frozen=True)
class Gate:
    """A limit given with `--fail-on`."""

    metric: str
    limit_share: float


@dataclass(frozen=True)
class GateResult:
    """The result of a gate for one pair."""

    metric: str
    limit_share: float
    pair: str | None  # the point's name; null if there is one pair
    status: str
    """`passed`, `failed`, or `undecided`: not comparable, missing, too few samples, or too noisy for the limit."""
    share: float | None  # the metric's change
    reason: str


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The result of `stepscope compare`; `to_json()` is what `--json` prints."""

    kind: str  # `recording`, `bench` or `trace`
    base: str
    new: str
    threshold_share: float  # smaller changes are treated as noise
    pairs: tuple[Pair, ...]  # one pair; for sweeps, one per common point
    only_in_base: tuple[str, ...]  # points without a counterpart
    only_in_new: tuple[str, ...]
    gates: tuple[GateResult, ...]

    @property
    def exit_code(self) -> int:
        """0 fine, 3 a gate failed, 4 not comparable or too few samples (for a gate, else for the step time)."""
        statuses = {gate.status for gate in self.gates}
        if FAILED in statuses:
            return EXIT_FAILED
        steps = [change for pair in self.pairs if (change := pair.change("step_time")) is not None]
        is_compared = bool(statuses) or any(change.verdict != TOO_FEW for change in steps)
        return EXIT_FINE if is_compared and UNDECIDED not in statuses else EXIT_NOT_COMPARABLE

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain values (docs/compare.md)."""
        return {"schema_version": SCHEMA_VERSION, "exit_code": self.exit_code, **asdict(self)}


def parse_gate(text: str) -> Gate:
    """Return a gate from its text; UsageError that lists the known metrics.

    >>> parse_gate("step_time:3%")
    Gate(metric='step_time', limit_share=0.03)
    """
    metric = text.partition(":")[0].strip()
    if metric not in METRICS:
        raise UsageError(f"--fail-on {text}: unknown metric {metric!r}. Choose from {', '.join(METRICS)}.")
    found = _GATE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--fail-on {text}: write METRIC:LIMIT%, for example {metric}:3%.")
    return Gate(metric, float(found.group(2)) / 100)


def decide(gates: Sequence[Gate], pairs: Sequence[Pair], only_in_base: Sequence[str]) -> tuple[GateResult, ...]:
    """Return every gate's result for every pair; a point missing in the new sweep leaves each gate undecided."""
    results = []
    for gate in gates:
        results += [_decide(gate, pair) for pair in pairs]
        results += [
            GateResult(gate.metric, gate.limit_share, name, UNDECIDED, None, "the point is only in the base")
            for name in only_in_base
        ]
    return tuple(results)


def _decide(gate: Gate, pair: Pair) -> GateResult:
    def result(status: str, reason: str, share: float | None = None) -> GateResult:
        return GateResult(gate.metric, gate.limit_share, pair.name, status, share, reason)

    if pair.refused:
        return result(UNDECIDED, f"not comparable: {', '.join(each.what for each in pair.refused)} differs")
    change = pair.change(gate.metric)
    if change is None:
        reason = next(
            (each.reason for each in pair.missing if each.what == gate.metric),
            "neither side has it; stepscope show lists what a run has",
        )
        return result(UNDECIDED, f"missing: {reason}")
    if change.verdict == TOO_FEW:
        counts = " and ".join(map(str, change.num_samples or ()))
        unit = change.samples_are or STEPS
        reason = f"too few samples: {counts} {unit}, but each side needs at least {FEWEST[unit]}"
        return result(UNDECIDED, reason, change.share)
    if change.share is None:
        worse = change.is_worse
        return result(FAILED if worse else PASSED, "it was 0 before" if worse else "no worse")
    detectable = change.detectable_share or 0.0
    if change.is_significant is False and detectable > gate.limit_share:
        reason = f"changes below {100 * detectable:.1f} % are not detectable, which exceeds the limit"
        return result(UNDECIDED, f"{reason}: record more {change.samples_are}", change.share)
    if not change.is_worse:
        return result(PASSED, "no worse", change.share)
    if abs(change.share) <= gate.limit_share + _ROUNDING:
        return result(PASSED, "worse, within the limit", change.share)
    if change.is_significant is False:
        return result(PASSED, "within the noise, which is below the limit", change.share)
    return result(FAILED, "worse by more than the limit", change.share)

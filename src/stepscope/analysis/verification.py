"""What a fix brought: runs of a script with and without it, in turns, as one answer for each fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from stepscope.analysis.losses import (
    DIFFER,
    LOW_DTYPES,
    NOT_COMPARABLE,
    REDUCED,
    REORDERED,
    TOLERANCE,
    LossCheck,
    check_losses,
)
from stepscope.analysis.metrics import METRICS, NO_DIFFERENCE, TOO_FEW, Change, Measure, change_of
from stepscope.analysis.summary import clean_step_ns
from stepscope.trace.recording import Recording

SCHEMA_VERSION = 1
FASTER, SLOWER = "faster", "slower"
FAILED, NOT_APPLIED, WRONG, INCOMPARABLE = "failed", "not applied", "wrong", "not comparable"
EXIT_WRONG, EXIT_UNDECIDED = 3, 4
_SAME_WORK = 0.01
"""Batches of real text vary: up to this share the units of a step are called equal."""


@dataclass(frozen=True)
class Attempt:
    """One run of the script."""

    round: int
    """0 is the rehearsal: it proves that the change takes, and its times count for nothing."""
    recording: Recording | None
    failure: str | None = None
    """What it ended with, in a line."""


@dataclass(frozen=True)
class Plan:
    """What is to be verified, and how strictly."""

    fix: str
    arithmetic: str
    lowers_to: Sequence[str] = ()
    tolerance_share: float | None = None
    threshold_share: float = 0.02


@dataclass(frozen=True)
class Expected:
    """What `stepscope diagnose` expects of the fix."""

    saving_ns: float | None
    share: float | None
    """Of the recording's step."""
    upper_bound: bool
    confidence: str | None
    reason: str | None
    """Why nothing is expected, or nobody can say."""


@dataclass(frozen=True)
class Round:
    """Median clean steps of one pair of runs, in nanoseconds."""

    before_ns: float
    after_ns: float


@dataclass(frozen=True)
class Verified:
    """What became of one fix."""

    fix: str
    """As it was typed."""
    status: str
    """`faster`, `slower`, `no difference shown`, `too few samples`; `wrong`: the losses differ; `failed`: the script
    does not run with it; `not applied`: it changed nothing; `not comparable`."""
    reason: str | None
    """Why, where the status is not a verdict on times."""
    change: Change | None = None
    """Of the step's time, or of tokens (samples) a second where the batch changed: all clean steps of all rounds."""
    saving_ns: float | None = None
    """Of a step's median; null where the batch changed."""
    rounds: tuple[Round, ...] = ()
    losses: LossCheck | None = None
    expected: Expected | None = None
    changed: Mapping[str, int] = field(default_factory=dict)
    """What the fix changed, and how often, in the rehearsal."""
    left: Mapping[str, int] = field(default_factory=dict)
    """What it left as it was, and why."""
    products: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Dtype → its share of the FLOPs of a step, without and with the fix."""
    warmup_extra_ns: float | None = None
    """How much longer the warm-up takes: compiling, starting workers."""
    pays_after_steps: int | None = None
    """Steps until that is won back; null where the fix saves nothing."""
    peak_bytes: tuple[int, int] | None = None
    """Peak allocated without and with it; null without a GPU."""


@dataclass(frozen=True)
class Verification:
    """Everything `stepscope verify` found; `to_json()` is what `--json` prints."""

    command: str
    folder: str
    """Where the recordings of all runs are."""
    device_name: str | None
    torch: str | None
    num_rounds: int
    step_ns: float
    """The median clean step without any fix, over all rounds."""
    apart_share: float
    """How far the medians of two runs without any fix are apart, at most."""
    fixes: tuple[Verified, ...]
    warnings: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 where every fix was measured and its losses agree, 3 where one failed or is wrong, else 4."""
        statuses = {each.status for each in self.fixes}
        if statuses & {FAILED, WRONG}:
            return EXIT_WRONG
        return EXIT_UNDECIDED if statuses & {NOT_APPLIED, INCOMPARABLE, TOO_FEW} else 0

    def to_json(self) -> dict[str, Any]:
        """One object of plain values (docs/verify.md)."""
        return {"schema_version": SCHEMA_VERSION, "exit_code": self.exit_code, **asdict(self)}


def verify(plan: Plan, before: Sequence[Attempt], after: Sequence[Attempt], expected: Expected | None) -> Verified:
    """What one fix brought. Every run of `before` must have a recording with clean steps."""
    refused = refusal(plan, before[0], after, expected)
    first = next((each.recording for each in after if each.recording is not None), None)
    if refused is not None or first is None:
        return refused or Verified(plan.fix, FAILED, "it left no recording", expected=expected)
    rehearsed = before[0].recording
    changed, left, _ = _applied(first)
    losses = check_losses(_losses(before), _losses(after), plan.arithmetic, _tolerance(plan, rehearsed))
    known: dict[str, Any] = {"changed": changed, "left": left, "expected": expected, "losses": losses}
    known["products"] = _products(rehearsed, first)
    unit, reason = _unit(plan, before, after)
    if unit is None:
        return Verified(plan.fix, INCOMPARABLE, reason, **known)
    change, rounds = _change(plan, unit, before, after)
    status, reason = change.verdict, None
    if status in (FASTER, SLOWER) and not _are_apart(rounds, status, unit, before, after):
        status, reason = NO_DIFFERENCE, "runs with and without it overlap: what the steps show does not repeat itself"
    if losses.verdict == DIFFER:
        status, reason = WRONG, "the losses are not what they were"
    extra = _warmup_ns(after) - _warmup_ns(before)
    saving = change.base - change.new if unit == "step" else None
    return Verified(
        plan.fix,
        status,
        reason,
        change=change,
        saving_ns=saving,
        rounds=rounds,
        warmup_extra_ns=extra,
        pays_after_steps=round(extra / saving) if status == FASTER and saving and extra > 0 else None,
        peak_bytes=_peaks(before, after),
        **known,
    )


def refusal(
    plan: Plan, before: Attempt, after: Sequence[Attempt], expected: Expected | None = None
) -> Verified | None:
    """Why there is nothing to time: it failed, or it changed nothing; None where there is."""
    failure = next((each.failure for each in after if each.failure is not None), None)
    first = next((each.recording for each in after if each.recording is not None), None)
    changed, left, _ = _applied(first)
    reasons = [_applied(each.recording)[2] for each in after]
    why_not = next((reason for reason in reasons if reason is not None), None)
    if failure is not None:
        return Verified(plan.fix, FAILED, failure, changed=changed, left=left, expected=expected)
    products = {} if first is None else _products(before.recording, first)
    for dtype in plan.lowers_to if products else ():
        shares = products.get(dtype, (0.0, 0.0))
        if shares[1] <= shares[0] and why_not is None:
            told = ", ".join(f"{name} {share:.0%}" for name, (_, share) in products.items() if share)
            why_not = f"no more products run in {dtype} than without it (with it: {told})"
    if why_not is None:
        return None
    return Verified(plan.fix, NOT_APPLIED, why_not, changed=changed, left=left, products=products, expected=expected)


def medians_ns(attempts: Sequence[Attempt]) -> list[float]:
    """The median clean step of each run that counts."""
    return [float(median(clean_step_ns(each))) for each in _timed(attempts)]


def step_ns(attempts: Sequence[Attempt]) -> float:
    """The median of all clean steps of the runs that count."""
    return float(median(ns for each in _timed(attempts) for ns in clean_step_ns(each)))


def _timed(attempts: Sequence[Attempt]) -> list[Recording]:
    return [each.recording for each in attempts if each.round and each.recording is not None]


def _applied(recording: Recording | None) -> tuple[dict[str, int], dict[str, int], str | None]:
    """What was changed, what was left, and why a fix changed nothing."""
    changed: dict[str, int] = {}
    left: dict[str, int] = {}
    why_not = None
    if recording is None:
        return changed, left, None
    fixes = recording.facts.get("fixes") or []
    if not fixes:
        why_not = "the script never imported torch"
    for fix in fixes:
        changed |= fix["changed"]
        left |= fix["left"]
        if not fix["changed"]:
            why_not = why_not or "; ".join(fix["left"]) or fix["nothing_seen"]
    return changed, left, why_not


def _products(before: Recording | None, after: Recording) -> dict[str, tuple[float, float]]:
    """Shares of a step's FLOPs by dtype; nothing where they were not counted in both."""
    counts = []
    for recording in (before, after):
        flops = (recording.facts.get("flops") if recording is not None else None) or {}
        counts.append(flops.get("model_flops_by_dtype") or {})
    if not all(sum(each.values()) for each in counts):
        return {}
    first, second = ({name: value / sum(each.values()) for name, value in each.items()} for each in counts)
    return {name: (first.get(name, 0.0), second.get(name, 0.0)) for name in dict.fromkeys([*first, *second])}


def _tolerance(plan: Plan, before: Recording | None) -> float | None:
    if plan.tolerance_share is not None or before is None or plan.arithmetic != REORDERED:
        return plan.tolerance_share
    # Sums of few digits in another order are as far apart as fewer digits are.
    flops = (before.facts.get("flops") or {}).get("model_flops_by_dtype") or {}
    return TOLERANCE[REDUCED] if any(flops.get(dtype) for dtype in LOW_DTYPES) else None


def _losses(attempts: Sequence[Attempt]) -> list[dict[int, float]]:
    recordings = [each.recording for each in attempts if each.recording is not None]
    return [{s.step: s.loss for s in recording.samples if s.loss is not None} for recording in recordings]


def _unit(plan: Plan, before: Sequence[Attempt], after: Sequence[Attempt]) -> tuple[str | None, str | None]:
    """What is compared: a `step`, or a second's `tokens` or `samples`; None, and why, where it cannot be."""
    if not all(map(clean_step_ns, _timed(after))):
        num = min(len(recording.samples) for recording in _timed(after))
        return None, f"the script ended after {num} steps with it, before one was timed: let it run longer"
    for unit in ("tokens", "samples"):
        counts = [_per_step(_timed(attempts), unit) for attempts in (before, after)]
        if counts[0] and counts[1]:
            if plan.arithmetic == NOT_COMPARABLE:
                return unit, None
            if abs(counts[1] / counts[0] - 1) > _SAME_WORK:
                return None, f"a step has {counts[1]:,.1f} {unit} with it and {counts[0]:,.1f} without"
            return "step", None
    if plan.arithmetic == NOT_COMPARABLE:
        return None, "nobody saw how much a step is given: --tokens-per-step cannot say it of two batch sizes"
    return "step", None


def _per_step(recordings: Sequence[Recording], unit: str) -> float | None:
    counts = [getattr(sample, f"num_{unit}") for each in recordings for sample in each.window("clean")]
    return sum(counts) / len(counts) if counts and all(counts) else None


def _change(
    plan: Plan, unit: str, before: Sequence[Attempt], after: Sequence[Attempt]
) -> tuple[Change, tuple[Round, ...]]:
    metric = METRICS["step_time" if unit == "step" else f"{unit}_per_second"]
    measures = []
    for attempts in (before, after):
        samples = tuple(float(ns) for recording in _timed(attempts) for ns in clean_step_ns(recording))
        value = median(samples)
        if unit != "step":
            value = (_per_step(_timed(attempts), unit) or 0.0) / (value / 1e9)
        measures.append(Measure(value, samples))
    rounds = tuple(Round(*pair) for pair in zip(medians_ns(before), medians_ns(after)))
    return change_of(metric, measures[0], measures[1], plan.threshold_share), rounds


def _are_apart(
    rounds: Sequence[Round], status: str, unit: str, before: Sequence[Attempt], after: Sequence[Attempt]
) -> bool:
    """Whether every run with the fix was faster (slower) than every run without: what is so repeats itself."""
    scale = 1.0
    if unit != "step":
        scale = (_per_step(_timed(before), unit) or 1.0) / (_per_step(_timed(after), unit) or 1.0)
    first, second = [each.before_ns for each in rounds], [each.after_ns * scale for each in rounds]
    return max(second) < min(first) if status == FASTER else min(second) > max(first)


def _warmup_ns(attempts: Sequence[Attempt]) -> float:
    return float(median(sum(sample.wall_ns for sample in each.window("warmup")) for each in _timed(attempts)))


def _peaks(before: Sequence[Attempt], after: Sequence[Attempt]) -> tuple[int, int] | None:
    peaks = []
    for attempts in (before, after):
        found = [(each.facts.get("memory") or {}).get("peak_allocated_bytes") for each in _timed(attempts)]
        peaks.append(max((int(peak) for peak in found if peak is not None), default=0))
    return (peaks[0], peaks[1]) if all(peaks) else None

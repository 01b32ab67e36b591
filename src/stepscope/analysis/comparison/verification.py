"""The effect of a fix, from interleaved runs of a script with and without it: times, and whether the losses agree."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import geometric_mean, median
from typing import Any

from stepscope.analysis.comparison.losses import (
    BY_HAND,
    DIFFER,
    NOT_COMPARABLE,
    REDUCED,
    REORDERED,
    RESAMPLED,
    SAME,
    LossCheck,
    check_losses,
    finite,
    noise_of,
)
from stepscope.analysis.comparison.metrics import METRICS, NO_DIFFERENCE, RUNS, TOO_FEW, Change, Measure, change_of
from stepscope.analysis.comparison.micro_batches import most_micro_batches, why_not_larger
from stepscope.analysis.time.summary import clean_step_ns, loop_of
from stepscope.display import Shown
from stepscope.formatting import plural, whole_percent
from stepscope.trace.recording import Recording

LOW_DTYPES = ("tf32", "bf16", "fp16", "fp8")

SCHEMA_VERSION = 1
FASTER, SLOWER = "faster", "slower"
FAILED, NOT_APPLIED, WRONG, INCOMPARABLE = "failed", "not applied", "wrong", "not comparable"
STATUSES = (FASTER, NO_DIFFERENCE, TOO_FEW, SLOWER, WRONG, FAILED, INCOMPARABLE, NOT_APPLIED)  # the best first
EXIT_WRONG, EXIT_UNDECIDED = 3, 4
MIN_ROUNDS = 4  # of fewer, one round decides how much they differ


@dataclass(frozen=True)
class Attempt:
    round: int  # 0 is the rehearsal, which checks that the change takes effect; it is not timed
    recording: Recording | None
    failure: str | None = None  # its error, in one line
    is_timeout: bool = False  # whether it was ended because it took too long
    others_share: float = 0.0  # of the time, in which training waited for CPU cores that other processes used


@dataclass(frozen=True)
class Plan:
    """What to verify, and how strictly."""

    fix: str
    arithmetic: str
    lowers_to: Sequence[str] = ()
    tolerance_share: float | None = None
    threshold_share: float = 0.02
    script: str | None = None  # the changed script, if the change was made by hand
    growth: int = 1  # how many times as large it makes micro-batches


@dataclass(frozen=True)
class Expected:
    """What `stepscope diagnose` predicts for the fix."""

    saving_ns: float | None
    share: float | None  # `saving_ns` as a share of the recording's step
    upper_bound: bool
    confidence: str | None
    reason: str | None  # why nothing is predicted


@dataclass(frozen=True)
class Round:
    before_ns: float
    after_ns: float


@dataclass(frozen=True)
class Verified:
    """The result for one fix."""

    fix: str  # as typed; of a change by hand, `NAME=FILE`
    status: str
    """`faster`, `slower`, `no difference shown`, `too few samples`; `wrong`: the losses differ; `failed`: the script
    does not run with it; `not applied`: it changed nothing; `not comparable`."""
    reason: str | None  # why, if the status is not a verdict on times
    change: Change | None = None
    """Change in step time, or in tokens (samples) per second if the batch changed; each sample is a whole run."""
    saving_ns: float | None = None  # per step; null if the batch changed
    rounds: tuple[Round, ...] = ()
    losses: LossCheck | None = None
    expected: Expected | None = None
    changed: Mapping[str, int] = field(default_factory=dict)  # what the fix changed, and how often, in the rehearsal
    left: Mapping[str, int] = field(default_factory=dict)  # what it did not change, and why
    products: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Dtype → its share of a step's FLOPs, without and with the fix."""
    warmup_extra_ns: float | None = None
    """How much longer the warm-up takes: compiling, starting workers; 0 if runs with and without it overlap."""
    pays_after_steps: int | None = None  # steps until the fix makes up for that; null if it saves nothing
    peak_bytes: tuple[int, int] | None = None  # peak allocated memory without and with it; null without a GPU
    script: str | None = None  # the changed script, if the change was made by hand
    others_share: float = 0.0
    """The largest share of a run in which training waited for CPU cores that other processes used: left out of all
    times."""


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """The result of `stepscope verify`; `to_json()` is what `--json` prints."""

    command: str
    folder: str  # folder with the recordings of all runs
    device_name: str | None
    torch: str | None
    num_rounds: int
    step_ns: float  # the time per step without any fix: the geometric mean of the runs
    apart_share: float  # slowest run without any fix ÷ fastest, minus 1
    fixes: tuple[Verified, ...]
    warnings: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 if every fix was measured and its losses agree, 3 if one failed or is wrong, else 4."""
        statuses = {each.status for each in self.fixes}
        if statuses & {FAILED, WRONG}:
            return EXIT_WRONG
        return EXIT_UNDECIDED if statuses & {NOT_APPLIED, INCOMPARABLE, TOO_FEW} else 0

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain values (docs/verify.md)."""
        return {"schema_version": SCHEMA_VERSION, "exit_code": self.exit_code, **asdict(self)}


_Runs = tuple[list[Recording], list[Recording]]  # the timed runs without and with the fix
_SAME_WORK = 0.01  # batches of real text vary: units per step within this share are equal


def verify(plan: Plan, before: Sequence[Attempt], after: Sequence[Attempt], expected: Expected | None) -> Verified:
    """Return the effect of one fix. Every run of `before` must have a recording with clean steps."""
    refused = refusal(plan, before[0], after, expected)
    first = next((each.recording for each in after if each.recording is not None), None)
    if refused is not None or first is None:
        return refused or Verified(plan.fix, FAILED, "it left no recording", expected=expected)
    changed, left, _ = applied(first)
    runs = (_timed(before), _timed(after))
    unit, reason = _unit(plan, runs)
    losses = gate(plan if unit in (None, "step") else replace(plan, arithmetic=NOT_COMPARABLE), before, after)
    known: dict[str, Any] = {"changed": changed, "left": left, "expected": expected, "losses": losses}
    known |= {"products": _products(before[0].recording, first), "script": plan.script}
    known["others_share"] = max((each.others_share for each in (*before, *after) if each.round), default=0.0)
    if unit is None:
        return Verified(plan.fix, INCOMPARABLE, reason, **known)
    times = (steps_ns(before), steps_ns(after))
    change = _change(plan, unit, runs, times)
    status, reason = change.verdict, None
    if len(times[1]) < MIN_ROUNDS:
        reason = f"{plural(len(times[1]), 'round')} cannot rule out chance: at least {MIN_ROUNDS} are needed"
        status = TOO_FEW
    if losses.verdict == DIFFER:
        status, reason = WRONG, "the losses differ"
    first_ns, second_ns = ([sum(s.wall_ns for s in each.window("warmup")) for each in side] for side in runs)
    is_apart = max(first_ns) < min(second_ns) or max(second_ns) < min(first_ns)
    extra = float(median(second_ns)) - float(median(first_ns)) if is_apart else 0.0
    saving = change.base - change.new if unit == "step" else None
    memory = [[each.facts.get("memory") or {} for each in side] for side in runs]
    peaks = [max((facts.get("peak_allocated_bytes") or 0 for facts in side), default=0) for side in memory]
    return Verified(
        plan.fix,
        status,
        reason,
        change=change,
        saving_ns=saving,
        rounds=tuple(Round(*pair) for pair in zip(*times)),
        warmup_extra_ns=extra,
        pays_after_steps=round(extra / saving) if status == FASTER and saving and extra > 0 else None,
        peak_bytes=(peaks[0], peaks[1]) if all(peaks) else None,
        **known,
    )


def gate(
    plan: Plan, before: Sequence[Attempt], after: Sequence[Attempt], rounded: Sequence[Attempt] = ()
) -> LossCheck:
    """Return whether losses with a change agree with those without; the first of `before` is the rehearsal.

    Of each step, the last micro-batch's loss is compared. If runs differ in their micro-batches, it is the sum of
    all, whose gradient the step is of.
    """
    runs = [each.recording for each in (*before, *after) if each.recording is not None]
    in_all = len({most_micro_batches(each) for each in runs}) > 1
    is_low = any(flops_by_dtype(before[0].recording).get(dtype) for dtype in LOW_DTYPES)
    # Small differences grow from step to step, so the timed runs are held to as many steps as the rehearsal has.
    last = max((step for each in _losses(before[:1]) for step in each), default=-1)
    sides = (_losses(before, last, in_all), _losses(after, last, in_all))
    arithmetic = plan.arithmetic
    resamples = any(fix.get("resamples") for each in after for fix in _fixes(each))
    if resamples and arithmetic in (SAME, REORDERED, REDUCED):
        arithmetic = RESAMPLED
    return check_losses(*sides, arithmetic, plan.tolerance_share, is_low, _losses(rounded, in_all=in_all))


def loss_noise(attempts: Sequence[Attempt]) -> float | None:
    """Return the largest difference of losses between runs of the same script; None if it is not finite."""
    return finite(noise_of(_losses(attempts)))


def refusal(
    plan: Plan, before: Attempt, after: Sequence[Attempt], expected: Expected | None = None
) -> Verified | None:
    """Return why there is nothing to time (it failed or changed nothing); None if there is."""
    failure = next((each.failure for each in after if each.failure is not None), None)
    first = next((each.recording for each in after if each.recording is not None), None)
    changed, left, _ = applied(first)
    reasons = [applied(each.recording)[2] for each in after if plan.script is None]
    why_not = next((reason for reason in reasons if reason is not None), None)
    if failure is not None:
        return Verified(plan.fix, FAILED, failure, changed=changed, left=left, expected=expected, script=plan.script)
    products = {} if first is None else _products(before.recording, first)
    for dtype in plan.lowers_to if products else ():
        without, with_it = products.get(dtype, (0.0, 0.0))
        if with_it <= without and why_not is None:
            found = ", ".join(f"{name} {whole_percent(share)}" for name, (_, share) in products.items() if share)
            why_not = f"no more products run in {dtype} than without it (with it: {found})"
    if plan.growth > 1 and first is not None and before.recording is not None:
        why_not = why_not_larger(before.recording, first, plan.growth) or why_not
    if why_not is None:
        return None
    return Verified(plan.fix, NOT_APPLIED, why_not, changed=changed, left=left, products=products, expected=expected)


def steps_ns(attempts: Sequence[Attempt], first: int = 1) -> list[float]:
    """Return the time per step of each run from round `first` on, with its part of what lies between steps, without
    the time that training waited for CPU cores that other processes used."""
    runs = [(each.recording, each.others_share) for each in attempts if each.round >= first and each.recording]
    loops = [(loop_of(recording), share) for recording, share in runs]
    return [(1 - share) * loop.step_ns for loop, share in loops if loop is not None]


def _timed(attempts: Sequence[Attempt]) -> list[Recording]:
    return [each.recording for each in attempts if each.round and each.recording is not None]


def applied(recording: Recording | None) -> tuple[dict[str, int], dict[str, int], str | None]:
    """Return what was changed, what was not, and why a fix changed nothing."""
    changed: dict[str, int] = {}
    left: dict[str, int] = {}
    if recording is None:
        return changed, left, None
    fixes = recording.facts.get("fixes", [])
    why_not = None if fixes else "the script never imported torch"
    for fix in fixes:
        changed |= fix["changed"]
        left |= fix["left"]
        if not fix["changed"]:
            why_not = why_not or "; ".join(fix["left"]) or fix["nothing_seen"]
    return changed, left, why_not


def _products(before: Recording | None, after: Recording) -> dict[str, tuple[float, float]]:
    """Return shares of a step's FLOPs by dtype; empty unless counted in both."""
    counts = (flops_by_dtype(before), flops_by_dtype(after))
    if not all(sum(each.values()) for each in counts):
        return {}
    first, second = ({name: value / sum(each.values()) for name, value in each.items()} for each in counts)
    return {name: (first.get(name, 0.0), second.get(name, 0.0)) for name in dict.fromkeys([*first, *second])}


def flops_by_dtype(recording: Recording | None) -> dict[str, float]:
    flops = {} if recording is None else recording.facts.get("flops", {})
    found: dict[str, float] = flops.get("model_flops_by_dtype", {})
    return found


def _losses(attempts: Sequence[Attempt], last: float = math.inf, in_all: bool = False) -> list[dict[int, float]]:
    """Return losses by step: of the last micro-batch, or the sum of all."""
    found = []
    for samples in (each.recording.samples for each in attempts if each.recording is not None):
        losses = {each.step: each.total_loss if in_all else each.loss for each in samples if each.step <= last}
        found.append({step: loss for step, loss in losses.items() if loss is not None})
    return found


def _fixes(attempt: Attempt) -> Sequence[Mapping[str, Any]]:
    return () if attempt.recording is None else attempt.recording.facts.get("fixes") or ()


def _unit(plan: Plan, runs: _Runs) -> tuple[str | None, str | None]:
    """Return what is compared: a `step`, or `tokens` or `samples` per second; None and why if impossible."""
    if not all(map(clean_step_ns, runs[1])):
        num = min(len(recording.samples) for recording in runs[1])
        return None, f"the script ended after {num} steps with it, before any was timed: let it run longer"
    pairs = {unit: (_per_step(runs[0], unit), _per_step(runs[1], unit)) for unit in ("tokens", "samples")}
    changes = {unit: after / before - 1 for unit, (before, after) in pairs.items() if before and after}
    if plan.arithmetic == BY_HAND:  # less padding has fewer tokens, and packing fewer samples
        is_same = not changes or any(abs(share) <= _SAME_WORK for share in changes.values())
        return "step" if is_same else next(iter(changes)), None
    for unit, share in changes.items():
        if plan.arithmetic == NOT_COMPARABLE:
            return unit, None
        if abs(share) > _SAME_WORK:
            before, after = pairs[unit]
            return None, f"a step has {after:,.1f} {unit} with it and {before:,.1f} without"
        return "step", None
    if plan.arithmetic == NOT_COMPARABLE:
        return None, "the tokens per step are unknown: --tokens-per-step cannot give them for two batch sizes"
    return "step", None


def _per_step(recordings: Sequence[Recording], unit: str) -> float | None:
    counts = [getattr(sample, f"num_{unit}") for each in recordings for sample in each.window("clean")]
    return sum(counts) / len(counts) if counts and all(counts) else None


def _change(plan: Plan, unit: str, runs: _Runs, times: tuple[list[float], list[float]]) -> Change:
    """Return the change from run to run: steps of one process do not show how much runs differ."""
    metric = METRICS["step_time" if unit == "step" else f"{unit}_per_second"]
    measures = []
    is_in_turns = len(times[0]) == len(times[1])
    for side, steps in zip(runs, times):
        # Nanoseconds per step, or seconds per token or sample.
        num_ns = 1.0 if unit == "step" else (_per_step(side, unit) or 0.0) * 1e9
        costs = tuple(ns / num_ns for ns in steps)
        middle = geometric_mean(costs)
        measures.append(Measure(1 / middle if metric.is_rate else middle, costs, RUNS, is_in_turns))
    return change_of(metric, measures[0], measures[1], plan.threshold_share)

"""The effect of a fix, from interleaved runs of a script with and without it."""

from collections.abc import Sequence
from statistics import geometric_mean, median
from typing import Any

from stepscope.analysis.comparison.losses import DIFFER, LOW_DTYPES, NOT_COMPARABLE, check_losses
from stepscope.analysis.comparison.metrics import METRICS, RUNS, TOO_FEW, Change, Measure, change_of
from stepscope.analysis.comparison.verified import (
    FAILED,
    FASTER,
    INCOMPARABLE,
    MIN_ROUNDS,
    NOT_APPLIED,
    WRONG,
    Attempt,
    Expected,
    Plan,
    Round,
    Verified,
)
from stepscope.analysis.time.summary import clean_step_ns, loop_of
from stepscope.formatting import plural, whole_percent
from stepscope.trace.recording import Recording

_Runs = tuple[list[Recording], list[Recording]]  # the timed runs without and with the fix
_SAME_WORK = 0.01  # batches of real text vary: units per step within this share are equal


def verify(plan: Plan, before: Sequence[Attempt], after: Sequence[Attempt], expected: Expected | None) -> Verified:
    """Return the effect of one fix. Every run of `before` must have a recording with clean steps."""
    refused = refusal(plan, before[0], after, expected)
    first = next((each.recording for each in after if each.recording is not None), None)
    if refused is not None or first is None:
        return refused or Verified(plan.fix, FAILED, "it left no recording", expected=expected)
    rehearsed = before[0].recording
    changed, left, _ = _applied(first)
    is_low = any(_flops(rehearsed).get(dtype) for dtype in LOW_DTYPES)
    losses = check_losses(_losses(before), _losses(after), plan.arithmetic, plan.tolerance_share, is_low)
    known: dict[str, Any] = {"changed": changed, "left": left, "expected": expected, "losses": losses}
    known["products"] = _products(rehearsed, first)
    runs = (_timed(before), _timed(after))
    unit, reason = _unit(plan, runs)
    if unit is None:
        return Verified(plan.fix, INCOMPARABLE, reason, **known)
    times = (_steps_ns(runs[0]), _steps_ns(runs[1]))
    change = _change(plan, unit, runs, times)
    status, reason = change.verdict, None
    if len(times[1]) < MIN_ROUNDS:
        reason = f"{plural(len(times[1]), 'round')} cannot rule out chance: at least {MIN_ROUNDS} are needed"
        status = TOO_FEW
    if losses.verdict == DIFFER:
        status, reason = WRONG, "the losses differ"
    first_ns, second_ns = ([sum(s.wall_ns for s in each.window("warmup")) for each in side] for side in runs)
    extra = float(median(second_ns)) - float(median(first_ns))
    saving = change.base - change.new if unit == "step" else None
    return Verified(
        plan.fix,
        status,
        reason,
        change=change,
        saving_ns=saving,
        rounds=tuple(Round(*pair) for pair in zip(*times)),
        warmup_extra_ns=extra,
        pays_after_steps=round(extra / saving) if status == FASTER and saving and extra > 0 else None,
        peak_bytes=_peaks(runs),
        **known,
    )


def refusal(
    plan: Plan, before: Attempt, after: Sequence[Attempt], expected: Expected | None = None
) -> Verified | None:
    """Return why there is nothing to time (it failed or changed nothing); None if there is."""
    failure = next((each.failure for each in after if each.failure is not None), None)
    first = next((each.recording for each in after if each.recording is not None), None)
    changed, left, _ = _applied(first)
    reasons = [_applied(each.recording)[2] for each in after]
    why_not = next((reason for reason in reasons if reason is not None), None)
    if failure is not None:
        return Verified(plan.fix, FAILED, failure, changed=changed, left=left, expected=expected)
    products = {} if first is None else _products(before.recording, first)
    for dtype in plan.lowers_to if products else ():
        without, with_it = products.get(dtype, (0.0, 0.0))
        if with_it <= without and why_not is None:
            found = ", ".join(f"{name} {whole_percent(share)}" for name, (_, share) in products.items() if share)
            why_not = f"no more products run in {dtype} than without it (with it: {found})"
    if why_not is None:
        return None
    return Verified(plan.fix, NOT_APPLIED, why_not, changed=changed, left=left, products=products, expected=expected)


def steps_ns(attempts: Sequence[Attempt]) -> list[float]:
    """Return the time per step of each run that counts, with its part of what lies between steps."""
    return _steps_ns(_timed(attempts))


def _steps_ns(recordings: Sequence[Recording]) -> list[float]:
    loops = map(loop_of, recordings)
    return [loop.step_ns for loop in loops if loop is not None]


def _timed(attempts: Sequence[Attempt]) -> list[Recording]:
    return [each.recording for each in attempts if each.round and each.recording is not None]


def _applied(recording: Recording | None) -> tuple[dict[str, int], dict[str, int], str | None]:
    """Return what was changed, what was not, and why a fix changed nothing."""
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
    """Return shares of a step's FLOPs by dtype; empty unless counted in both."""
    counts = (_flops(before), _flops(after))
    if not all(sum(each.values()) for each in counts):
        return {}
    first, second = ({name: value / sum(each.values()) for name, value in each.items()} for each in counts)
    return {name: (first.get(name, 0.0), second.get(name, 0.0)) for name in dict.fromkeys([*first, *second])}


def _flops(recording: Recording | None) -> dict[str, float]:
    flops = {} if recording is None else recording.facts.get("flops") or {}
    return flops.get("model_flops_by_dtype") or {}


def _losses(attempts: Sequence[Attempt]) -> list[dict[int, float]]:
    recordings = [each.recording for each in attempts if each.recording is not None]
    return [{s.step: s.loss for s in recording.samples if s.loss is not None} for recording in recordings]


def _unit(plan: Plan, runs: _Runs) -> tuple[str | None, str | None]:
    """Return what is compared: a `step`, or `tokens` or `samples` per second; None and why if impossible."""
    if not all(map(clean_step_ns, runs[1])):
        num = min(len(recording.samples) for recording in runs[1])
        return None, f"the script ended after {num} steps with it, before any was timed: let it run longer"
    for unit in ("tokens", "samples"):
        counts = [_per_step(side, unit) for side in runs]
        if counts[0] and counts[1]:
            if plan.arithmetic == NOT_COMPARABLE:
                return unit, None
            if abs(counts[1] / counts[0] - 1) > _SAME_WORK:
                return None, f"a step has {counts[1]:,.1f} {unit} with it and {counts[0]:,.1f} without"
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
    for side, steps in zip(runs, times):
        # Nanoseconds per step, or seconds per token or sample.
        num_ns = 1.0 if unit == "step" else (_per_step(side, unit) or 0.0) * 1e9
        costs = tuple(ns / num_ns for ns in steps)
        middle = geometric_mean(costs)
        measures.append(Measure(1 / middle if metric.is_rate else middle, costs, RUNS))
    return change_of(metric, measures[0], measures[1], plan.threshold_share)


def _peaks(runs: _Runs) -> tuple[int, int] | None:
    memory = [[each.facts.get("memory") or {} for each in side] for side in runs]
    first, second = (max((facts.get("peak_allocated_bytes") or 0 for facts in side), default=0) for side in memory)
    return (first, second) if first and second else None

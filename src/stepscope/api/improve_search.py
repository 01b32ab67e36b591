"""The search behind `stepscope improve`: one change at a time on top of those that paid, in alternating runs."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from stepscope.analysis.comparison import improvement as found
from stepscope.analysis.comparison.improvement import LEAST_GAIN, Trial, factor_of, trial_line, verdict
from stepscope.analysis.comparison.losses import DIFFER, NOT_COMPARED, SAME, LossCheck
from stepscope.analysis.comparison.verification import (
    Attempt,
    Plan,
    applied,
    flops_by_dtype,
    gate,
    refusal,
    steps_ns,
)
from stepscope.analysis.time.summary import clean_step_ns
from stepscope.api.verification import attempt, need_timed, read_attempt
from stepscope.errors import UsageError
from stepscope.findings.fixes import parse_fix
from stepscope.formatting import percent
from stepscope.recorder.fixes import LOOK

if TYPE_CHECKING:
    from stepscope.analysis.comparison.improvement import Factor
    from stepscope.sweep.record_runs import Command, Options
    from stepscope.sweep.run_log import RunLog
    from stepscope.trace.recording import Recording

TRIES = (
    "waiting_for_data",
    "memory_layout",
    "autocast",
    "sdpa",
    "cudnn_benchmark",
    "unfused_optimizer",
    "threads",
    "fp32_matmul",
    "pageable_copies",
    "attention_backend=cudnn",
    "expandable_segments",
    "compile",
    "launch_bound",
    "compile=max-autotune-no-cudagraphs",
)
"""The order without a ledger: what usually saves most first, what compiles last."""
COMPILERS = ("compile", "launch_bound")  # one replaces the other
NEED_GPU = ("launch_bound", "attention_backend", "compile=max-autotune-no-cudagraphs")
PHASE_OF = {"waiting_for_data": "data", "unfused_optimizer": "optimizer"}
"""Changes that can save at most one phase of a step."""
BASELINE = ""
UNCHANGED = "the unchanged script"
FINAL_PAIRS = 3
NUM_TRACED = 2
COMPILE_S = {"compile": 30.0, "launch_bound": 30.0, "compile=max-autotune-no-cudagraphs": 180.0}
"""What compiling may add to a run, before one was measured."""
_LONGEST_BETWEEN = 2  # runs between a reference and what is compared with it
Say = Callable[[str], None]


class OutOfTime(Exception):
    """The next run would not end in time."""


@dataclass(frozen=True)
class Survey:
    """What a run of the unchanged script says about every change."""

    rehearsal: Attempt
    refused: dict[str, str]  # change → why it cannot pay
    most_shares: dict[str, float]  # change → the share of a step in the phase that it is about


class Search:
    """`run()` tries every change; `trials`, `kept` and `gain` are what it found."""

    def __init__(
        self, command: Command, log: RunLog, options: Options, limit_s: float, tolerance: float | None, say: Say
    ) -> None:
        self._command, self._log, self._options, self.limit_s = command, log, options, limit_s
        self._tolerance, self._say = tolerance, say
        self._stored: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
        for row in log.rows:
            self._stored[row["fixes"]].append(row)
        self.attempts: dict[str, list[Attempt]] = defaultdict(list)
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._order: list[str] = []  # the changes of every run, in order
        self.spent_s = 0.0
        self.trials: dict[str, Trial] = {}  # the last one of each change
        self._promised: dict[str, float | None] = {}
        self._tried_on: dict[str, tuple[str, ...]] = {}
        self.kept: list[str] = []
        self.gain: Factor | None = None
        self._pairs: tuple[list[float], list[float]] = ([], [])
        """Times per step of the unchanged script and of the best, measured in alternation."""
        self.is_finished = False

    # -- runs -----------------------------------------------------------------------------------------------------

    def _run(
        self, fixes: str, *, num_traced: int = 0, look: str | None = None, limit_s: float | None = None
    ) -> Attempt:
        """Return the next run of some changes: one from before a kill, or a new one; OutOfTime after `limit_s`."""
        number = len(self._order)
        if self._stored[fixes]:
            row = self._stored[fixes].popleft()
            done = read_attempt(self._log.folder / str(row["name"]), number, row["failure"], False)
            seconds = row["seconds"]
        else:
            name = f"run-{number:03d}-{os.getpid()}"
            begun = time.monotonic()
            timeout_s = self._options.timeout_s if limit_s is None else min(self._options.timeout_s, limit_s)
            done = attempt(
                self._command,
                self._log.folder / name,
                number,
                look or fixes or LOOK,
                replace(self._options, timeout_s=max(1.0, timeout_s)),
                rehearses=look is not None,  # its windows disturb the steps after them
                num_traced=num_traced,
            )
            seconds = time.monotonic() - begun
            if done.is_timeout and timeout_s < self._options.timeout_s:
                self.spent_s += seconds
                raise OutOfTime
            self._log.append({"name": name, "fixes": fixes, "failure": done.failure, "seconds": seconds})
        self.spent_s += seconds
        self.attempts[fixes].append(done)
        self._seconds[fixes].append(seconds)
        self._order.append(fixes)
        return done

    def survey(self, num_traced: int) -> Survey:
        """Run the unchanged script once, looking at what each change would change."""
        ids = [text for text in TRIES if not text.startswith(("compile=", "launch_bound"))]
        try:
            done = self._run(BASELINE, num_traced=num_traced, look=LOOK + "+".join(ids), limit_s=self.limit_s)
        except OutOfTime:
            least = f"more than {self.limit_s / 60:g} --minutes"
            raise UsageError(f"one run of the unchanged script takes longer than that: set {least}") from None
        need_timed(done, self._options)
        recording = done.recording
        assert recording is not None
        is_gpu = (recording.facts.get("environment") or {}).get("device") == "cuda"
        refused: dict[str, str] = {}
        for facts in recording.facts.get("fixes") or []:
            if not facts["changed"]:
                refused[facts["id"]] = "; ".join(facts["left"]) or facts["nothing_seen"]
        for name in COMPILERS:
            if "compile" in refused:
                refused[name] = refused["compile"]
        if not is_gpu:
            refused |= dict.fromkeys(NEED_GPU, "no GPU was used")
        shares = {name: _phase_share(recording, phase) for name, phase in PHASE_OF.items()}
        most_shares = {name: share for name, share in shares.items() if share is not None}
        for name, share in most_shares.items():
            if share < LEAST_GAIN:
                refused.setdefault(name, f"it can save at most {percent(share)} of a step")
        return Survey(done, refused, most_shares)

    # -- the search -----------------------------------------------------------------------------------------------

    def run(self, survey: Survey, tries: Sequence[tuple[str, float | None]]) -> None:
        """Try changes with what the ledger promises of each, in this order, then measure the best again.

        What did not pay is tried again after another change was kept: bfloat16 may pay only channels last.
        """
        self._promised = dict(tries)
        for text in self._promised:
            if refused := survey.refused.get(text) or survey.refused.get(text.partition("=")[0]):
                self._note(Trial(text, (), found.NOT_APPLIED, refused))
        waiting = [text for text in self._promised if text not in self.trials]
        try:
            need_timed(self._run(BASELINE), self._options)
            while waiting:
                text = waiting.pop(0)
                self._tried_on[text] = tuple(self.kept)
                try:
                    refused = self._needless(text)
                    is_needless = Trial(text, tuple(self.kept), found.NOT_APPLIED, refused)
                    self._note(self._try(text, survey.rehearsal) if refused is None else is_needless)
                except OutOfTime:
                    self._leave(text, f"no time was left: set more than {self.limit_s / 60:g} --minutes")
                waiting = waiting or self._worth_another_try()
            self.is_finished = not any(each.status in found.OPEN for each in self.trials.values())
        except KeyboardInterrupt:
            if not steps_ns(self.attempts[BASELINE][1:]):
                raise  # nothing was measured yet
            for text in (text for text in self._promised if text not in self.trials):
                self._leave(text, found.INTERRUPTED)
        if self.kept:
            self._prove()

    def _leave(self, text: str, reason: str) -> None:
        """Note that a change was not tried to the end; what was measured of it stays."""
        if text in self.trials and self.trials[text].status not in found.OPEN:
            return  # it was tried before
        trial = self.trials.get(text) or Trial(text, tuple(self.kept), found.NOT_TRIED)
        self._note(replace(trial, reason=reason))

    def _worth_another_try(self) -> list[str]:
        """Return the changes that did not pay before the last one was kept."""
        return [
            text
            for text, before in self._tried_on.items()
            if self.trials[text].status in (found.NO_GAIN, found.SLOWER) and len(before) < len(self.kept)
        ]

    def _needless(self, text: str) -> str | None:
        """Return why a change cannot add anything to those kept."""
        is_compiled = any(map(is_compiler, self.kept))
        tried = self.trials.get("compile")
        if text.startswith("compile=") and tried and tried.status not in found.OPEN and not is_compiled:
            return "the default mode was not faster"
        if text == "fp32_matmul" and "autocast" in self.kept:
            return "with autocast, matrix products run in bfloat16"
        if text == "fp32_matmul":
            flops = flops_by_dtype(self.attempts[BASELINE][0].recording)
            if flops and not flops.get("fp32"):
                return "no matrix product runs in float32"
        return None

    def _try(self, text: str, rehearsal: Attempt) -> Trial:
        """Measure a change on top of those kept, in pairs of runs, until it is clear whether it pays."""
        before, replaced = "+".join(self.kept), None
        rest = list(self.kept)
        if is_compiler(text):
            replaced = next(filter(is_compiler, rest), None)
            rest = [one for one in rest if one != replaced]
        after = "+".join([*rest, text])
        chosen = parse_fix(after)
        lowers_to = [fix.lowers_to for fix in parse_fix(text).fixes if fix.lowers_to]
        plan = Plan(after, chosen.arithmetic, lowers_to, self._tolerance)
        times: tuple[list[float], list[float]] = ([], [])
        trial = Trial(text, tuple(self.kept), found.NO_GAIN)
        while True:
            before_s = fmean(self._seconds[before])
            after_s = fmean(self._seconds[after] or [before_s + COMPILE_S.get(text, 0.0)])
            if len(self._seconds[after]) == 1 and text in COMPILE_S:
                after_s = (before_s + after_s) / 2  # what was compiled before is in the compiler's cache
            self._say(f"trying {text} on top of {before or UNCHANGED}, pair {len(times[1]) + 1}")
            if before not in self._order[-_LONGEST_BETWEEN:] or times[0]:
                self._need(before_s + after_s)
                if (failure := self._run(before).failure) is not None:
                    return replace(trial, status=found.FAILED, reason=f"a run without it failed: {failure}")
            done = self._run(after, limit_s=self._need(after_s))
            refused = refusal(plan, rehearsal, [done])
            if refused is not None:
                status = found.FAILED if done.failure is not None else found.NOT_APPLIED
                return replace(trial, status=status, reason=refused.reason, changed=refused.changed)
            assert done.recording is not None
            losses = self._gate(plan)
            trial = replace(trial, losses=losses, changed=applied(done.recording)[0])
            if not done.recording.window("clean"):
                return replace(trial, status=found.FAILED, reason="the script ended before any step was timed")
            if reason := _wrong(losses):
                return replace(trial, status=found.WRONG, reason=reason)
            times[0].append(steps_ns(self.attempts[before])[-1])
            times[1].append(steps_ns([done])[0])
            decision = verdict(*times, self.noise_share())
            trial = replace(trial, gain=factor_of(*times))
            if decision is None:
                self.trials[text] = replace(trial, status=found.UNDECIDED)
                continue
            if decision == found.KEPT:
                self._keep(text, replaced, times)
            elif decision == found.NO_GAIN and len(times[1]) > 1:
                trial = replace(trial, reason="the runs with and without it overlap")
            return replace(trial, status=decision)

    def _gate(self, plan: Plan, is_last: bool = False) -> LossCheck:
        """Return whether the losses of some changes agree with those of the unchanged script.

        If they do not, the unchanged script runs once with weights disturbed by rounding: training may amplify it.
        """
        losses = gate(plan, self.attempts[BASELINE], self.attempts[plan.fix])
        if losses.verdict != DIFFER or plan.arithmetic == SAME or plan.tolerance_share is not None:
            return losses
        lowers = {fix.lowers_to for fix in parse_fix(plan.fix).fixes}
        flops = flops_by_dtype(self.attempts[BASELINE][0].recording)
        low = next((dtype for dtype in ("bf16", "fp16", "tf32") if dtype in lowers or flops.get(dtype)), "fp32")
        rounded = f"rounding={low}"
        if not self.attempts[rounded]:
            self._say(f"measuring how far rounding to {low} moves the losses")
            self._run(rounded, limit_s=None if is_last else self._need(fmean(self._seconds[BASELINE])))
        found_by = [each for each in self.attempts[rounded] if each.failure is None]
        return gate(plan, self.attempts[BASELINE], self.attempts[plan.fix], found_by)

    def _keep(self, text: str, replaced: str | None, times: tuple[list[float], list[float]]) -> None:
        self._pairs = ([], []) if self.kept else times
        self.kept = [one for one in self.kept if one != replaced] + [text]
        if replaced is not None:
            self.trials[replaced] = replace(self.trials[replaced], status=found.REPLACED, reason=f"{text} is faster")

    def _need(self, estimate_s: float) -> float:
        """Return the seconds that a run may take; OutOfTime if it is expected to take longer.

        What is left must be enough to measure the best in alternation with the unchanged script afterwards.
        """
        last = 0.0
        if self.kept:
            last = 2 * (fmean(self._seconds[BASELINE]) + fmean(self._seconds["+".join(self.kept)]))
        left_s = self.limit_s - self.spent_s - last
        if left_s < estimate_s:
            raise OutOfTime
        return left_s

    def _prove(self) -> None:
        """Measure the best in alternation with the unchanged script; drop all changes if it is not faster."""
        best = "+".join(self.kept)
        try:
            while not self._is_proven():
                pair_s = fmean(self._seconds[BASELINE]) + fmean(self._seconds[best])
                if self.limit_s - self.spent_s < pair_s and len(self._pairs[1]) >= 2:
                    break
                self._say(f"measuring {best} against {UNCHANGED}, pair {len(self._pairs[1]) + 1}")
                runs = [self._run(BASELINE), self._run(best)]
                if any(each.failure is not None for each in runs):
                    break
                for side, done in zip(self._pairs, runs):
                    side.append(steps_ns([done])[0])
        except KeyboardInterrupt:
            self.is_finished = False
        if len(self._pairs[1]) < 2:
            self._pairs = (steps_ns(self.attempts[BASELINE][1:]), steps_ns(self.attempts[best]))
        self.gain = factor_of(*self._pairs)

    def noise_share(self) -> float:
        """Return how far runs of the same program are apart, or typically the halves of a run if that is more."""
        runs = [[each for each in some if each.failure is None] for some in self.attempts.values()]
        between = [max(times) / min(times) - 1 for times in map(steps_ns, runs) if times]
        halves = sorted(apart for some in runs for each in some if (apart := _halves(each)) is not None)
        return max([0.0, *between, *halves[len(halves) // 2 :][:1]])

    def _is_proven(self) -> bool:
        num = len(self._pairs[1])
        return num >= 2 * FINAL_PAIRS or (num >= FINAL_PAIRS and factor_of(*self._pairs).is_significant)

    @property
    def times_ns(self) -> tuple[list[float], list[float]]:
        """Return the times per step behind `gain`: of the unchanged script, and of the best."""
        return self._pairs if self.kept else (steps_ns(self.attempts[BASELINE][1:]), [])

    def losses(self) -> LossCheck | None:
        """Return whether the losses of the best agree with those of the unchanged script; None if nothing is kept."""
        if not self.kept:
            return None
        best = "+".join(self.kept)
        return self._gate(Plan(best, parse_fix(best).arithmetic, (), self._tolerance), is_last=True)

    def _note(self, trial: Trial) -> None:
        trial = replace(trial, promise_share=self._promised.get(trial.fix))
        self.trials[trial.fix] = trial
        self._say(trial_line(trial))


def is_compiler(text: str) -> bool:
    return text.partition("=")[0] in COMPILERS


def _wrong(losses: LossCheck) -> str | None:
    """Return why a change must be rejected for its losses; None if they agree."""
    if losses.verdict == DIFFER:
        return "the losses differ"
    if losses.verdict == NOT_COMPARED and losses.arithmetic != SAME:
        return f"the losses could not be compared: {losses.reason}"
    return None


def _halves(done: Attempt) -> float | None:
    """Return how far the mean step of a run's first half is from that of its second half."""
    steps = () if done.recording is None else clean_step_ns(done.recording)
    if len(steps) < 2:
        return None
    means = [fmean(steps[: len(steps) // 2]), fmean(steps[len(steps) // 2 :])]
    return max(means) / min(means) - 1


def _phase_share(recording: Recording, phase: str) -> float | None:
    """Return the share of a phase in the timed steps, on the GPU's clock if there is one, or the host's if longer."""
    shares = []
    for name in ("host_ns", "device_ns"):
        parts = [getattr(sample, name) for sample in recording.window("clean")]
        if parts and all(parts) and sum(sum(each.values()) for each in parts):
            names = (phase, "before_forward") if phase == "data" else (phase,)
            named = sum(each.get(one, 0) for each in parts for one in names)
            shares.append(named / sum(sum(each.values()) for each in parts))
    return max(shares, default=None)

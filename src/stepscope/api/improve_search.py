"""The search behind `stepscope improve`: one change at a time on top of those that paid, in alternating runs."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from stepscope.analysis.comparison import improvement as found
from stepscope.analysis.comparison.improvement import LEAST_GAIN, Trial, factor_of, trial_line, verdict
from stepscope.analysis.comparison.losses import DIFFER, NOT_COMPARED, RESAMPLED, SAME, LossCheck
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
from stepscope.api.improve_order import (
    BY_PROMISE,
    COMPILE_S,
    FIXED_ORDER,
    PHASE_OF,
    TRIES,
    Promises,
    following,
    is_compiler,
    is_gpu,
    phase_share,
    refusals,
    replaces,
)
from stepscope.api.verification import attempt, need_timed, read_attempt
from stepscope.errors import UsageError
from stepscope.findings.fixes import parse_fix
from stepscope.formatting import percent, plural, span
from stepscope.recorder.fixes import LOOK

if TYPE_CHECKING:
    from stepscope.analysis.comparison.improvement import Factor
    from stepscope.sweep.record_runs import Command, Options
    from stepscope.sweep.run_log import RunLog
    from stepscope.trace.recording import Recording

BASELINE = ""
UNCHANGED = "the unchanged script"
FINAL_PAIRS = 3
_LONGEST_BETWEEN = 2  # runs between a reference and what is compared with it
Say = Callable[[str], None]


class OutOfTime(Exception):
    """The next run would not end in time."""


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
        self.promises: Promises
        self.order = FIXED_ORDER
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
            name = f"run-{len(self._log.rows):03d}-{os.getpid()}"
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
                raise OutOfTime("no time was left for the end of its run")
            self._log.append({"name": name, "fixes": fixes, "failure": done.failure, "seconds": seconds})
        self.spent_s += seconds
        if num_traced and look is None and done.recording is not None and is_gpu(done.recording):
            # After a trace, the driver's library stays attached and slows launches down.
            timed = tuple(one for one in done.recording.samples if one.window in ("warmup", "clean"))
            done = replace(done, recording=replace(done.recording, samples=timed))
        self.attempts[fixes].append(done)
        self._seconds[fixes].append(seconds)
        self._order.append(fixes)
        return done

    def survey(self, num_traced: int) -> Attempt:
        """Run the unchanged script once, looking at what each change would change."""
        ids = [text for text in TRIES if not text.startswith(("compile=", "launch_bound"))]
        try:
            done = self._run(BASELINE, num_traced=num_traced, look=LOOK + "+".join(ids), limit_s=self.limit_s)
        except OutOfTime:
            least = f"more than {self.limit_s / 60:g} --minutes"
            raise UsageError(f"one run of the unchanged script takes longer than that: set {least}") from None
        need_timed(done, self._options)
        return done

    # -- the search -----------------------------------------------------------------------------------------------

    def run(self, survey: Attempt, wanted: Sequence[str], problem: str | None) -> None:
        """Try changes, those that promise most per second first, then measure the best again.

        A change that is kept moves the bottleneck, so the order is taken again from a new ledger. What did not pay is
        tried again after another change was kept: bfloat16 may pay only channels last.
        """
        assert survey.recording is not None
        self._survey, self.promises = survey, Promises(survey.recording, problem is None)
        problem = self._look(wanted, survey.recording) or problem
        self.order = BY_PROMISE if self.promises.shares else FIXED_ORDER
        self.order += f"; the ledger could not be computed: {problem}" if problem else ""
        self._say(f"trying in {self.order}")
        no_use = refusals(survey.recording)
        for text in wanted:
            if refused := no_use.get(text) or no_use.get(text.partition("=")[0]):
                self._note(Trial(text, (), found.NOT_APPLIED, refused))
        waiting = self._ordered(text for text in wanted if text not in self.trials)
        try:
            need_timed(self._run(BASELINE), self._options)
            num_left = int((self.limit_s - self.spent_s) / (run_s := self._expected_s(BASELINE)))
            self._say(f"a run takes {span(run_s * 1e9)}: time is left for about {plural(num_left, 'run')}")
            while waiting:
                text, best = waiting.pop(0), list(self.kept)
                self._tried_on[text] = tuple(best)
                try:
                    refused = self._needless(text)
                    is_needless = Trial(text, tuple(best), found.NOT_APPLIED, refused)
                    self._note(self._try(text, len(waiting) > 1) if refused is None else is_needless)
                except OutOfTime as needed:
                    self._leave(text, f"{needed}: set more than {self.limit_s / 60:g} --minutes")
                if text in self.kept and (more := following(text, survey.recording)):
                    waiting.append(more)
                waiting = waiting or self._worth_another_try()
                if self.kept != best and len(waiting) > 1:
                    self._look_again(waiting)
                waiting = self._ordered(waiting)
            self.is_finished = not any(each.status in found.OPEN for each in self.trials.values())
        except KeyboardInterrupt:
            if not steps_ns(self.attempts[BASELINE][1:]):
                raise  # nothing was measured yet
            for text in (text for text in wanted if text not in self.trials):
                self._leave(text, found.INTERRUPTED)
        if self.kept:
            self._prove()

    def _look(self, changes: Sequence[str], best: Recording) -> str | None:
        """Take what changes promise from the ledger of the best; return why it could not be computed."""
        begun = time.monotonic()
        problem = self.promises.look(changes, best)
        self.spent_s += time.monotonic() - begun
        return problem

    def _look_again(self, waiting: Sequence[str]) -> None:
        """Take a new ledger from the first run of the best, or from another one if that could not be traced."""
        best = "+".join(self.kept)
        done = self.attempts[best][0]
        if self.promises.num_traced and not self.promises.num_traced_with(best):
            with suppress(OutOfTime):
                limit_s, num_traced = self._need(self._expected_s(best)), self.promises.num_traced
                done = self._run(f"ledger of {best}", num_traced=num_traced, look=best, limit_s=limit_s)
        if done.recording is not None and self._look(waiting, done.recording) is None:
            self._say(f"with {best}, the order is now {', '.join(self._ordered(waiting))}")

    def _ordered(self, changes: Iterable[str]) -> list[str]:
        return self.promises.ordered(changes, fmean(self._seconds[BASELINE]))

    def _leave(self, text: str, reason: str) -> None:
        """Note that a change was not tried to the end; what was measured of it stays."""
        if text in self.trials and self.trials[text].status not in found.OPEN:
            return  # it was tried before
        trial = self.trials.get(text) or Trial(text, tuple(self.kept), found.NOT_TRIED)
        self._note(replace(trial, reason=reason))

    def _worth_another_try(self) -> list[str]:
        """Return the changes that did not pay before another one was kept."""
        return [
            text
            for text, before in self._tried_on.items()
            if self.trials[text].status in (found.NO_GAIN, found.SLOWER) and len(before) < len(self.kept)
        ]

    def _needless(self, text: str) -> str | None:
        """Return why a change cannot add anything to those kept."""
        now = self.attempts["+".join(self.kept)][-1].recording
        share = phase_share(now, PHASE_OF[text]) if text in PHASE_OF and now is not None else None
        if share is not None and share < LEAST_GAIN:
            return f"it can save at most {percent(share)} of a step"
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

    def _try(self, text: str, is_traced: bool) -> Trial:
        """Measure a change on top of those kept, in pairs of runs, until it is clear whether it pays.

        Its first run is traced after the timed steps: if it is kept, others are tried in the order of its ledger.
        """
        before, replaced = "+".join(self.kept), None
        rest = list(self.kept)
        replaced = next((one for one in rest if replaces(text, one)), None)
        rest = [one for one in rest if one != replaced]
        plan = self._plan_of(after := "+".join([*rest, text]), text)
        times: tuple[list[float], list[float]] = ([], [])
        trial = Trial(text, tuple(self.kept), found.NO_GAIN)
        while True:
            self._say(f"trying {text} on top of {before or UNCHANGED}, pair {len(times[1]) + 1}")
            timed = steps_ns(self.attempts[before])
            if before not in self._order[-_LONGEST_BETWEEN:] or len(timed) <= len(times[1]):
                self._need(self._expected_s(before) + self._expected_s(after, text, before))
                if (failure := self._run(before).failure) is not None:
                    return replace(trial, status=found.FAILED, reason=f"a run without it failed: {failure}")
            num_traced = self.promises.num_traced_with(after) if is_traced and not times[1] else 0
            limit_s = self._need(self._expected_s(after, text, before))
            done = self._run(after, num_traced=num_traced, limit_s=limit_s)
            refused = refusal(plan, self._survey, [done])
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
            times[1].append(steps_ns([done])[0])
            times = steps_ns(self.attempts[before])[-len(times[1]) :], times[1]
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

    def _plan_of(self, fixes: str, text: str = "") -> Plan:
        chosen = parse_fix(fixes)
        lowers_to = parse_fix(text).lowers_to if text else ()
        return Plan(fixes, chosen.arithmetic, lowers_to, self._tolerance, growth=chosen.growth)

    def _gate(self, plan: Plan, is_last: bool = False) -> LossCheck:
        """Return whether the losses of some changes agree with those of the unchanged script.

        If they do not, the unchanged script runs once with weights disturbed by rounding: training may amplify it.
        """
        losses = gate(plan, self.attempts[BASELINE], self.attempts[plan.fix])
        if losses.verdict != DIFFER or losses.arithmetic in (SAME, RESAMPLED) or plan.tolerance_share is not None:
            return losses
        lowers = parse_fix(plan.fix).lowers_to
        flops = flops_by_dtype(self.attempts[BASELINE][0].recording)
        low = next((dtype for dtype in ("bf16", "fp16", "tf32") if dtype in lowers or flops.get(dtype)), "fp32")
        rounded = f"rounding={low}"
        if not self.attempts[rounded]:
            self._say(f"measuring how far rounding to {low} moves the losses")
            self._run(rounded, limit_s=None if is_last else self._need(self._expected_s(BASELINE)))
        found_by = [each for each in self.attempts[rounded] if each.failure is None]
        return gate(plan, self.attempts[BASELINE], self.attempts[plan.fix], found_by)

    def _keep(self, text: str, replaced: str | None, times: tuple[list[float], list[float]]) -> None:
        self._pairs = ([], []) if self.kept else times
        self.kept = [one for one in self.kept if one != replaced] + [text]
        if replaced is not None:
            self.trials[replaced] = replace(self.trials[replaced], status=found.REPLACED, reason=f"{text} is faster")

    def _expected_s(self, fixes: str, text: str = "", before: str = BASELINE) -> float:
        """Return how long a run is expected to take; if it is the first one, with `text` on top of `before`."""
        seconds = self._seconds[fixes]
        is_compiled = any(map(is_compiler, fixes.split("+")))
        if not seconds:  # what was compiled without the change may be compiled again
            return (self._seconds[before][0] if is_compiled else self._expected_s(before)) + COMPILE_S.get(text, 0.0)
        if len(seconds) == 1 and is_compiled:  # the next one finds the compiler's cache
            return (fmean(self._seconds[BASELINE]) + seconds[0]) / 2
        return fmean(seconds[1:] or seconds)

    def _need(self, estimate_s: float) -> float:
        """Return the seconds that a run may take; OutOfTime if it is expected to take longer.

        What is left must be enough to measure the best in alternation with the unchanged script afterwards.
        """
        last = 2 * (self._expected_s(BASELINE) + self._expected_s("+".join(self.kept))) if self.kept else 0.0
        left_s = self.limit_s - self.spent_s - last
        if left_s < estimate_s:
            check = f", and the check of what is kept {span(last * 1e9)}" if last else ""
            every, needs = self.limit_s - self.spent_s, f"a run of it needs about {span(estimate_s * 1e9)}{check}"
            raise OutOfTime(f"no time was left: {needs}, and {span(every * 1e9)} were left")
        return left_s

    def _prove(self) -> None:
        """Measure the best in alternation with the unchanged script; drop all changes if it is not faster."""
        best = "+".join(self.kept)
        try:
            while (num := len(self._pairs[1])) < 2 * FINAL_PAIRS:
                if num >= FINAL_PAIRS and factor_of(*self._pairs).is_significant:
                    break
                if num >= 2 and self.limit_s - self.spent_s < self._expected_s(BASELINE) + self._expected_s(best):
                    break
                self._say(f"measuring {best} against {UNCHANGED}, pair {num + 1}")
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

    @property
    def times_ns(self) -> tuple[list[float], list[float]]:
        """Return the times per step behind `gain`: of the unchanged script, and of the best."""
        return self._pairs if self.kept else (steps_ns(self.attempts[BASELINE][1:]), [])

    def losses(self) -> LossCheck | None:
        """Return whether the losses of the best agree with those of the unchanged script; None if nothing is kept."""
        if not self.kept:
            return None
        best = "+".join(self.kept)
        return self._gate(self._plan_of(best), is_last=True)

    def _note(self, trial: Trial) -> None:
        trial = replace(trial, promise_share=self.promises.shares.get(trial.fix))
        self.trials[trial.fix] = trial
        self._say(trial_line(trial))


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

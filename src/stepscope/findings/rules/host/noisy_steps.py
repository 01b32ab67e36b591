"""Is there a slow step at regular intervals, for reasons other than training?"""

from __future__ import annotations

from stepscope.analysis.time.step_times import slow_steps
from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, duration, plural

_FIXES = {
    "data": "give the DataLoader more num_workers or a larger prefetch_factor: every few batches it has none ready",
    "other": "do it less often or in the background: torch.distributed.checkpoint.async_save, evaluation in "
    "another process, metrics kept on the GPU until they are written",
}  # by phase; within a pass or the optimizer the time belongs to training, as with gradient accumulation


def check(case: Case) -> list[Finding]:
    if not case.recording.window("clean"):
        raise Unavailable("The recording has no clean steps: it ended during warm-up.")
    found = slow_steps(case.recording)
    if found is None or found.phase not in _FIXES or not case.is_worth(found.excess_ns):
        return []
    # Without a DataLoader, the time before a forward may be anything.
    is_data = found.phase == "data" and case.summary.data_is_named
    slowest = max(ns for _, ns in found.slow)
    where = "waiting for data" if is_data else "outside of forward, backward and optimizer"
    rows = [{"step": step, "duration_ns": ns, "phase": found.phase} for step, ns in found.slow]
    finding = Finding(
        sentence=f"Every {found.period} steps, one takes up to {duration(slowest, 3)} (median: "
        f"{duration(found.median_ns, 3)}), mostly {where}. On average, this adds {duration(found.excess_ns, 3)} to "
        f"each of {plural(found.num_steps, 'step')}.",
        fix=_FIXES["data" if is_data else "other"],
        saving_ns=found.excess_ns,
        upper_bound=True,
        derived="the time of these steps above the median, averaged over all steps; the median does not show it",
        confidence="high" if len(found.slow) > 3 else "medium",
        falsified_by="record again; the finding is wrong if other steps are slow, or none",
        evidence=(Evidence("slow steps", rows[:8]),),
    )
    return [finding]

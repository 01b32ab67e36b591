"""Does a slow step come back every so many, with something that is not the training?"""

from __future__ import annotations

from stepscope.analysis.time.step_times import slow_steps
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import Case

_FIXES = {
    "data": "DataLoader(dataset, num_workers=8, persistent_workers=True, prefetch_factor=4)  # more batches ahead",
    "other": "do it less often, or beside the training: torch.distributed.checkpoint.async_save, evaluation in a "
    "process of its own, metrics kept on the GPU until they are written",
}
"""By where the time is; within a pass or the optimizer it is the training's own, as when gradients accumulate."""


def check(case: Case) -> list[Finding]:
    if not case.recording.window("clean"):
        raise Unavailable("the recording has no clean steps: it ended in its warm-up")
    found = slow_steps(case.recording)
    if found is None or found.phase not in _FIXES or not case.is_worth(found.excess_ns):
        return []
    slowest = max(ns for _, ns in found.slow)
    where = "waiting for its batch" if found.phase == "data" else "outside forward, backward and optimizer"
    return [
        Finding(
            sentence=f"Every {found.period} steps one takes up to {duration(slowest, 3)} where the median is "
            f"{duration(found.median_ns, 3)}, most of it {where}: {duration(found.excess_ns, 3)} on each of "
            f"{plural(found.num_steps, 'step')}.",
            fix=_FIXES[found.phase],
            saving_ns=found.excess_ns,
            upper_bound=True,
            derived="what these steps take above the median, spread over all steps; the median does not show it",
            confidence="high" if len(found.slow) > 3 else "medium",
            falsified_by="other steps that are slow in the next recording, or none",
            evidence=(
                Evidence(
                    "slow steps",
                    [{"step": step, "duration_ns": ns, "phase": found.phase} for step, ns in found.slow][:8],
                ),
            ),
        )
    ]

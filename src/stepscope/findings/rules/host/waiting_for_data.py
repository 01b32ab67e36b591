"""Does the step wait for its data?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.time.stalls import MANY_OPS
from stepscope.findings.rule import LENGTH, Case, Evidence, Finding, Unavailable, duration, one_finding, plural
from stepscope.session.case import WORTH_SHARE

_FIX = "DataLoader(dataset, num_workers=8, pin_memory=True, persistent_workers=True, prefetch_factor=4)"
_CHECK = "train on one batch over and over; the finding is wrong if the step is not faster"
_WORTH_WITHOUT_GPU = 0.2  # of a step; on a CPU, workers compete with training for the same cores


def check(case: Case) -> list[Finding]:
    return _in_trace(case) if case.has_gpu_work else _in_samples(case)


def _in_trace(case: Case) -> list[Finding]:
    waits = case.stalls.filter(pl.col("kind") == "data")
    saving_ns = case.host_saving_ns(waits)
    if not case.is_worth(saving_ns):
        return []
    wait_ns = float(waits.select(LENGTH).sum().item())
    is_loader = waits["phase"].eq_missing("data").any()
    preparing = waits.filter(pl.col("num_ops") >= MANY_OPS, pl.col("phase").ne_missing("data"))
    is_preparing = 2 * preparing.select(LENGTH).sum().item() > wait_ns
    what, fix = "before the forward with no op running, most likely for data", _FIX
    if is_preparing:
        num_ops = float(preparing["num_ops"].sum()) / case.num_steps
        what = (
            f"while the host prepares the batch on the CPU, in {plural(num_ops, 'op')}, mostly "
            f"{preparing.sort(LENGTH, descending=True)['most_op'][0]}"
        )
        fix = f"do it in workers, in the dataset or the collate_fn: {_FIX}"
    elif is_loader:
        what = "for the DataLoader"
    rows = waits.select("step", "phase", "num_ops", "most_op", LENGTH).head(8).to_dicts()
    return one_finding(
        sentence=f"The GPU waits {case.cost_text(wait_ns / case.num_steps)} {what}. It has only "
        f"{duration(case.step.device_ns, 3)} of work.",
        fix=fix,
        saving_ns=saving_ns,
        derived="the step replayed without these waits, as if the batch were ready",
        confidence="high" if is_loader and not is_preparing else "medium",
        falsified_by=_CHECK,
        places=case.host_places(waits),
        evidence=(Evidence("waits", rows),),
    )


def _in_samples(case: Case) -> list[Finding]:
    """Return the finding from the phases of the clean steps, if there is no trace of GPU work."""
    summary = case.summary
    phase = next((phase for phase in summary.phases if phase.name == "data"), None)
    if phase is None:
        raise Unavailable("The recording has no clean steps: it ended during warm-up.")
    # On a GPU, only the time between its events counts: data that arrives while it works costs nothing.
    waited_ns = phase.host_ns if phase.device_ns is None else phase.device_ns
    if waited_ns < (_WORTH_WITHOUT_GPU if phase.device_ns is None else WORTH_SHARE) * case.step_ns:
        return []
    what = "for the DataLoader" if summary.data_is_named else "before the forward, most likely for data"
    rows = [{"phase": row.name, "duration_ns": row.ns, "share": row.share} for row in summary.rows]
    return one_finding(
        sentence=f"Training waits {case.cost_text(waited_ns)} {what}, on average over the typical steps "
        f"among {summary.num_clean} clean ones.",
        fix=_FIX,
        saving_ns=waited_ns,
        upper_bound=True,
        derived="the mean of the data phase; workers that share the CPU with training hide less of it",
        confidence="high" if summary.data_is_named else "medium",
        falsified_by=_CHECK,
        evidence=(Evidence("time by phase", rows),),
    )

"""Does the step wait for its batch?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.stalls import MANY_OPS
from stepscope.analysis.time.whatif import stretches
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import WORTH_SHARE, Case

_FIX = "DataLoader(dataset, num_workers=8, pin_memory=True, persistent_workers=True, prefetch_factor=4)"
_WORTH_WITHOUT_GPU = 0.2
"""Of a step: workers take their time from the same processor."""


def check(case: Case) -> list[Finding]:
    return _in_trace(case) if case.has_gpu_work else _in_samples(case)


def _in_trace(case: Case) -> list[Finding]:
    waits = case.stalls.filter(pl.col("kind") == "data")
    saving_ns = case.saving_ns(Change(host=stretches(waits))) if waits.height else 0.0
    if not case.is_worth(saving_ns):
        return []
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
    per_step = float(waits.select(length).sum().item()) / case.num_steps
    named = waits["phase"].eq_missing("data").any()
    preparing = waits.filter(pl.col("num_ops") >= MANY_OPS, pl.col("phase").ne_missing("data"))
    is_preparing = 2 * preparing.select(length).sum().item() > waits.select(length).sum().item()
    who, fix = "before its forward, with no op running: for data, most likely", _FIX
    if is_preparing:
        num_ops = float(preparing["num_ops"].sum()) / case.num_steps
        who = (
            f"while the host prepares its batch before the forward, in {plural(num_ops, 'op')} on the CPU, most of "
            f"it in {preparing.sort(length, descending=True)['most_op'][0]}"
        )
        fix = f"do it in workers, in the dataset or the collate_fn: {_FIX}"
    elif named:
        who = "for its DataLoader"
    return [
        Finding(
            sentence=f"Each step stands {duration(per_step, 3)} {who}; the whole step takes "
            f"{duration(case.step_ns, 3)}, and the GPU has work for {duration(case.step.device_ns, 3)} of it.",
            fix=fix,
            saving_ns=saving_ns,
            derived="the step replayed with these waits gone, as when the batch is ready",
            confidence="high" if named and not is_preparing else "medium",
            falsified_by="a step that takes as long with the same batch used again and again",
            places=case.host_places(waits),
            evidence=(
                Evidence("waits", waits.select("step", "phase", "num_ops", "most_op", length).head(8).to_dicts()),
            ),
        )
    ]


def _in_samples(case: Case) -> list[Finding]:
    """Without a trace of GPU work: the phases of the clean steps say it."""
    summary = case.summary
    phase = next((phase for phase in summary.phases if phase.name == "data"), None)
    if phase is None:
        raise Unavailable("the recording has no clean steps: it ended in its warm-up")
    # On a GPU the time between its events counts: data that comes while it still works costs nothing.
    waited_ns = phase.host_ns if phase.device_ns is None else phase.device_ns
    if waited_ns < (_WORTH_WITHOUT_GPU if phase.device_ns is None else WORTH_SHARE) * case.step_ns:
        return []
    named = summary.data_is_named
    who = "for its DataLoader" if named else "before its forward: for data, most likely"
    rows = [{"phase": row.name, "duration_ns": row.ns, "share": row.share} for row in summary.rows]
    return [
        Finding(
            sentence=f"Each step stands {duration(waited_ns, 3)} of {duration(case.step_ns, 3)} {who}, in the mean "
            f"of the typical ones of {summary.num_clean} clean steps.",
            fix=_FIX,
            saving_ns=waited_ns,
            upper_bound=True,
            derived="the data phase's mean; workers that share the processor with the training hide less of it",
            confidence="high" if named else "medium",
            falsified_by="a step that takes as long with the same batch used again and again",
            evidence=(Evidence("where a step goes", rows),),
        )
    ]

"""Does the step wait for its batch?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.replay import Change
from stepscope.analysis.whatif import stretches
from stepscope.findings.case import Case
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.wording import milliseconds


def check(case: Case) -> list[Finding]:
    waits = case.stalls.filter(pl.col("kind") == "data")
    saving_ns = case.saving_ns(Change(host=stretches(waits))) if waits.height else 0.0
    if not case.is_worth(saving_ns):
        return []
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
    per_step = float(waits.select(length).sum().item()) / case.num_steps
    named = waits["phase"].eq_missing("data").any()
    who = "for its DataLoader" if named else "before its forward, with no op running: for data, most likely"
    return [
        Finding(
            sentence=f"Each step stands {milliseconds(per_step)} {who}; the whole step takes "
            f"{milliseconds(case.step_ns)}, and the GPU has work for {milliseconds(case.step.device_ns)} of it.",
            fix="DataLoader(dataset, num_workers=8, pin_memory=True, persistent_workers=True, prefetch_factor=4)",
            saving_ns=saving_ns,
            derived="the step replayed with these waits gone, as when the batch is ready",
            confidence="high" if named else "medium",
            falsified_by="a step that takes as long with the same batch used again and again",
            evidence=(Evidence("waits", waits.select("step", "phase", length).head(8).to_dicts()),),
        )
    ]

"""Is the batch too small for the device: kernels so short that more data would take no longer?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.time.replay import Change
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural, size
from stepscope.session.case import Case

_SHORT_NS = 10_000
"""Kernels shorter than this are launched, started and ended more than they work."""
_SHORT_SHARE = 0.5
_BUSY_SHARE = 0.9
_FREE_SHARE = 0.5


def check(case: Case) -> list[Finding]:
    kernels = case.work.filter(pl.col("kind") == "kernel", pl.col("activity").cast(pl.String) != "communication")
    step = case.step
    # A host that cannot keep up is what `launch_bound` tells of.
    if kernels.is_empty() or step.device_ns < _BUSY_SHARE * step.done_ns:
        return []
    # The optimizer's kernels do not grow with the batch.
    short = kernels.filter(pl.col("duration_ns") < _SHORT_NS, pl.col("phase").ne_missing("optimizer"))
    short_ns = float(short["duration_ns"].sum())
    if short_ns < _SHORT_SHARE * float(kernels["duration_ns"].sum()):
        return []
    peak_bytes = case.memory.peak_bytes
    memory_bytes = case.device.visible_bytes or case.device.memory_bytes
    if peak_bytes > _FREE_SHARE * memory_bytes:
        return []
    halved = {event: ns / 2 for event, ns in short.select("event", "duration_ns").iter_rows()}
    saving_ns = case.saving_ns(Change(duration_ns=halved))
    if not case.is_worth(saving_ns):
        return []
    median_ns = float(kernels["duration_ns"].median() or 0.0)  # type: ignore[arg-type]
    return [
        Finding(
            sentence=f"The batch is too small for {case.device.name}: half of "
            f"{plural(kernels.height / case.num_steps, 'kernel')} a step is shorter than {duration(median_ns, 3)}; "
            f"{duration(short_ns / case.num_steps, 3)} of {duration(case.step_ns, 3)} are in kernels shorter than "
            f"{duration(_SHORT_NS, 3)}, which more data would hardly lengthen, and "
            f"{size(memory_bytes - peak_bytes)} of {size(memory_bytes)} are free.",
            fix="batch_size × 2, again as long as tokens a second grow; the learning rate may have to follow",
            saving_ns=saving_ns,
            derived="a step's worth of data at twice the batch: the step replayed with these kernels half as long, "
            "as twice the data takes such kernels no longer",
            confidence="medium",
            falsified_by="a step twice as long with twice the batch",
            places=case.places(short["event"]),
            evidence=(Evidence("kernels of a step by size", case.kernel_sizes.to_dicts()),),
        )
    ]

"""Is the batch so small that kernels would take no longer with more data?"""

from __future__ import annotations

import polars as pl

from stepscope.findings.rule import Case, Change, Evidence, Finding, duration, one_finding, size

_SHORT_NS = 10_000  # shorter kernels spend most of their time starting and ending
_SHORT_SHARE = 0.5
_BUSY_SHARE = 0.9
_FREE_SHARE = 0.5


def check(case: Case) -> list[Finding]:
    kernels = case.work.filter(pl.col("kind") == "kernel", pl.col("activity").cast(pl.String) != "communication")
    step = case.step
    # If the host cannot keep up, `launch_bound` reports that.
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
    return one_finding(
        sentence=f"The batch is too small for {case.device.name}: kernels shorter than {duration(_SHORT_NS, 3)} take "
        f"{duration(short_ns / case.num_steps, 3)} of the {duration(case.step_ns, 3)} step, and would take hardly "
        f"longer with more data. Half of {case.number_text(kernels, 'kernel')} per step are shorter than "
        f"{duration(median_ns, 3)}, and {size(memory_bytes - peak_bytes)} of {size(memory_bytes)} of memory is free.",
        fix="double batch_size as long as tokens per second increase; the learning rate may need to change too",
        saving_ns=saving_ns,
        derived="time per batch at twice the batch size: the step replayed with these kernels half as long, since "
        "such kernels take no longer with twice the data",
        confidence="medium",
        falsified_by="double the batch; the finding is wrong if the step takes twice as long",
        places=case.places(short["event"]),
        evidence=(Evidence("kernels per step by size", case.kernel_sizes.to_dicts()),),
    )

"""Is the forward computed again in the backward though there is memory to keep it?"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.analysis.time.whatif import stretches
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural, size
from stepscope.session.case import Case

_USABLE_SHARE = 0.85
"""Of the device's memory: what a program can fill before the allocator runs into fragments."""


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    again = case.recomputed
    if again.is_empty():
        return []
    events = again["events"].explode().drop_nulls()
    saving_ns = case.saving_ns(replace(case.without(events), host=stretches(again)))
    if not case.is_worth(saving_ns):
        return []
    peak_bytes = case.memory.peak_bytes
    more_bytes = int(again["allocated_bytes"].sum()) // case.num_steps
    if not more_bytes:
        raise Unavailable("what the recomputed tensors take in memory is not told: it takes profile_memory=True")
    usable = int((case.device.visible_bytes or case.device.memory_bytes) * _USABLE_SHARE)
    if peak_bytes >= usable:
        return []
    # With room for a part of it, that part of the layers need not be checkpointed.
    share = min(1.0, (usable - peak_bytes) / more_bytes)
    if not case.is_worth(saving_ns * share):
        return []
    total_ns = float(again["duration_ns"].sum()) / case.num_steps
    table = (
        again.group_by("name")
        .agg(
            (pl.len() / case.num_steps).alias("num_calls"),
            pl.col("duration_ns", "allocated_bytes").sum() / case.num_steps,
        )
        .sort("duration_ns", descending=True)
    )
    part = "" if share == 1 else f" for about {share:.0%} of the layers"
    return [
        Finding(
            sentence=f"{plural(again.height / case.num_steps, 'op')} of the forward run again in the backward, "
            f"{duration(total_ns, 3)} of the GPU in a step of {duration(case.step_ns, 3)}, while the peak of "
            f"{size(peak_bytes)} leaves {size(usable - peak_bytes)} of {case.device.name} free: keeping "
            f"what is computed again takes {size(more_bytes)} at the most.",
            fix=f"no torch.utils.checkpoint / model.gradient_checkpointing_disable(){part}",
            saving_ns=saving_ns * share,
            derived="the step replayed without what runs again and the host's time for it"
            + ("" if share == 1 else f", {share:.0%} of it: as much as fits into {_USABLE_SHARE:.0%} of the memory"),
            falsified_by="a run without checkpointing that is out of memory, or as slow",
            places=case.places(events),
            evidence=(Evidence("ops that run again", table.head(8).to_dicts()),),
        )
    ]

"""Is the forward recomputed in the backward although its results would fit in memory?"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, one_finding, stretches
from stepscope.formatting import size, whole_percent

_USABLE_SHARE = 0.85  # of the device's memory; beyond it, fragmentation causes failures


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    again = case.recomputed
    events = again["events"].explode().drop_nulls()
    saving_ns = case.saving_ns(replace(case.without(events), host=stretches(again)))
    if not case.is_worth(saving_ns):
        return []
    peak_bytes = case.memory.peak_bytes
    more_bytes = int(again["allocated_bytes"].sum()) // case.num_steps
    if not more_bytes:
        raise Unavailable("The size of the recomputed tensors is unknown. Profile with profile_memory=True.")
    usable = int((case.device.visible_bytes or case.device.memory_bytes) * _USABLE_SHARE)
    if peak_bytes >= usable:
        return []
    # If only part of it fits, that part of the layers needs no checkpointing.
    share = min(1.0, (usable - peak_bytes) / more_bytes)
    if not case.is_worth(saving_ns * share):
        return []
    allocated = pl.col("allocated_bytes").sum() / case.num_steps
    table = case.grouped(again, "num_calls", "name", more=[allocated])
    table = table.select("name", "num_calls", "duration_ns", "allocated_bytes")
    part = of_it = ""
    if share < 1:
        part = f" for about {whole_percent(share)} of the layers"
        fits = f"as much as fits into {whole_percent(_USABLE_SHARE)} of the memory"
        of_it = f"; {whole_percent(share)} of it, {fits}"
    return one_finding(
        sentence=f"Recomputing {case.number_text(again, 'forward op')} in the backward takes "
        f"{case.cost_text(again)}, although the results would fit in memory: they need at most {size(more_bytes)}, "
        f"and the peak of {size(peak_bytes)} leaves {size(usable - peak_bytes)} of {case.device.name} free.",
        fix=f"remove torch.utils.checkpoint / model.gradient_checkpointing_disable(){part}",
        saving_ns=saving_ns * share,
        derived=f"the step replayed without the recomputed ops and the host's time for them{of_it}",
        falsified_by="turn checkpointing off; the finding is wrong if the run then runs out of memory or is not "
        "faster",
        places=case.places(events),
        evidence=(Evidence("recomputed ops", table.head(8).to_dicts()),),
    )

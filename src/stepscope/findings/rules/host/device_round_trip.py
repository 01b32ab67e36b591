"""Are tensors copied to the CPU and back within a step?"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.findings.rule import LENGTH, Case, Evidence, Finding, one_finding, size, stretches
from stepscope.findings.waiting import place, waits_of


def check(case: Case) -> list[Finding]:
    if case.work.is_empty():
        return []
    # CPU offloading sends gradients to the host and gets weights back on purpose.
    trips = case.round_trips.filter(pl.col("phase").ne_missing("optimizer"))
    if trips.is_empty():
        return []
    copies = pl.concat([trips["out"], trips["back"]])
    waits = waits_of(case, "device_round_trip")
    change = case.without(copies)
    # If the GPU got no work in between, all of the host's time in between belongs to the round trip.
    alone = trips.filter(pl.col("num_kernels") == 0).select("start_ns", "end_ns")
    parts = [alone] if change.host is None else [alone, change.host.select("start_ns", "end_ns")]
    change = replace(change, host=stretches(pl.concat(parts)), unwaited=frozenset(waits["event"].to_list()))
    saving_ns = case.saving_ns(change)
    if not case.is_worth(saving_ns):
        return []
    table = case.grouped(trips, "num_trips", "op", "bytes", "phase", "module", "caller", time=LENGTH.alias("host_ns"))
    return one_finding(
        sentence=f"Copying {case.number_text(trips, 'tensor')} of up to "
        f"{size(int(trips['bytes'].max()))} to the CPU and back to the GPU takes "  # type: ignore[arg-type]
        f"{case.cost_text(float(table['host_ns'].sum()))}, including the time between the two copies. "
        f"Most of it is in {place(table.row(0, named=True))}.",
        fix="stay on the GPU: remove .cpu(), .numpy() and .cuda(), and call the torch op on the CUDA tensor",
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step replayed without both copies, the waits for them and, if the GPU got no work in between, "
        "the host's time between them; the time that the GPU then needs for the same work is not counted",
        confidence="high" if trips["num_kernels"].max() == 0 else "medium",
        falsified_by="look at both copies; the finding is wrong if they copy different tensors of the same size, or "
        "if only the CPU can do the work between them",
        places=case.host_places(trips),
        evidence=(Evidence("tensors that go to the CPU and back", table.head(8).to_dicts()),),
    )

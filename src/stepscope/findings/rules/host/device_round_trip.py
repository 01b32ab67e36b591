"""Do tensors go to the host and come back within a step?"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.analysis.time.whatif import stretches
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.waiting import place, waits_of
from stepscope.formatting import duration, plural, size
from stepscope.session.case import Case


def check(case: Case) -> list[Finding]:
    if case.work.is_empty():
        return []
    # An optimizer whose state lies with the host sends gradients there and gets weights back: on purpose.
    trips = case.round_trips.filter(pl.col("phase").ne_missing("optimizer"))
    if trips.is_empty():
        return []
    copies = pl.concat([trips["out"], trips["back"]])
    waits = waits_of(case, "device_round_trip")
    change = case.without(copies)
    # Where the GPU was given nothing in between, all of the host's time in between was the trip's.
    alone = trips.filter(pl.col("num_kernels") == 0).select("start_ns", "end_ns")
    parts = [alone] if change.host is None else [alone, change.host.select("start_ns", "end_ns")]
    change = replace(change, host=stretches(pl.concat(parts)), unwaited=frozenset(waits["event"].to_list()))
    saving_ns = case.saving_ns(change)
    if not case.is_worth(saving_ns):
        return []
    length = pl.col("end_ns") - pl.col("start_ns")
    keys = ("op", "bytes", "phase", "module", "caller")
    table = (
        trips.group_by(keys)
        .agg((pl.len() / case.num_steps).alias("num_trips"), (length.sum() / case.num_steps).alias("host_ns"))
        .sort("host_ns", descending=True)
    )
    top = table.row(0, named=True)
    host_ns = float(table["host_ns"].sum())
    return [
        Finding(
            sentence=f"{plural(trips.height / case.num_steps, 'tensor')} a step, the largest of "
            f"{size(int(trips['bytes'].max()))}, go to the host and come back, mostly in {place(top)}: "  # type: ignore[arg-type]
            f"{duration(host_ns, 3)} from one copy to the other, of {duration(case.step_ns, 3)}.",
            fix="do it on the GPU: leave out .cpu(), .numpy() and .cuda(), and use torch's op on the CUDA tensor",
            saving_ns=saving_ns,
            upper_bound=True,
            derived="the step replayed without both copies, the waits for them and, where the GPU was given nothing "
            "in between, the host's time from one to the other; what the GPU then does itself is not counted",
            confidence="high" if trips["num_kernels"].max() == 0 else "medium",
            falsified_by="two copies of one size that are not of one tensor, or work that only the host can do",
            places=case.host_places(trips),
            evidence=(Evidence("tensors that went to the host and back", table.head(8).to_dicts()),),
        )
    ]

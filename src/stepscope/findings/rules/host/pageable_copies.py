"""Is the batch copied to the GPU from memory that is not pinned, while the host waits?"""

from __future__ import annotations

import polars as pl

from stepscope.errors import if_available
from stepscope.findings.rule import Case, Change, Evidence, Finding, duration, one_finding, size
from stepscope.findings.waiting import STAGED_BYTES, waits_of

# Attainable bytes per second from pinned memory, by compute capability: PCIe 5, 4 and 3 (peaks: 64, 32, 16 GB/s).
_RATES = ((9, 50e9), (8, 24e9), (0, 12e9))


def check(case: Case) -> list[Finding]:
    if case.work.is_empty():
        return []
    trips = pl.concat([case.round_trips["out"], case.round_trips["back"]])
    copies = case.all_copies.filter(
        pl.col("event").is_in(case.replay.events), ~pl.col("event").is_in(trips.implode()),
        pl.col("what") == "host_to_device", pl.col("pageable"), pl.col("bytes") >= STAGED_BYTES,
    )  # fmt: skip
    if copies.is_empty():
        return []
    device = if_available(lambda: case.device)
    major = device.compute_capability[0] if device is not None and device.compute_capability else 0
    rate = next(rate for least, rate in _RATES if major >= least)
    durations = {
        event: min(float(ns), num_bytes / rate * 1e9)
        for event, ns, num_bytes in copies.select("event", "duration_ns", "bytes").iter_rows()
    }
    waits = waits_of(case, "pageable_copies")
    saving_ns = case.saving_ns(Change(duration_ns=durations, unwaited=frozenset(waits["event"].to_list())))
    if not case.is_worth(saving_ns):
        return []
    num_bytes, copied_ns = int(copies["bytes"].sum()), int(copies["duration_ns"].sum())
    table = case.grouped(copies.with_columns(pl.col("outer_op", "module", "phase").cast(pl.String)),
        "num_copies", "outer_op", "module", "phase", "bytes",
    )  # fmt: skip
    return one_finding(
        sentence=f"Copying {size(num_bytes / case.num_steps)} from pageable (not pinned) memory to the GPU takes "
        f"{case.cost_text(copied_ns / case.num_steps)}, in {case.number_text(copies, 'transfer')} at "
        f"{num_bytes / copied_ns:.1f} GB/s. The host waits {duration(case.total_ns(waits, pl.col('wait_ns')), 3)} "
        "of that.",
        fix="DataLoader(dataset, pin_memory=True, num_workers=4); then batch.to(device, non_blocking=True)",
        saving_ns=saving_ns,
        derived=f"the step replayed with these copies at {rate / 1e9:.0f} GB/s, as from pinned memory, and without "
        "the host's wait for them",
        confidence="high" if waits.height else "medium",
        falsified_by='pin the memory; the finding is wrong if the copies named "Pinned -> Device" take as long',
        places=case.places(copies["event"]),
        evidence=(Evidence("copies from pageable memory", table.head(8).to_dicts()),),
    )

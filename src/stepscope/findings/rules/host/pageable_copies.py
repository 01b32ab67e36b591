"""Is the batch copied to the GPU from memory that is not pinned, while the host waits?"""

from __future__ import annotations

import polars as pl

from stepscope.findings.rule import Case, Change, Evidence, Finding, Unavailable, cost_text, grouped, total_ns
from stepscope.findings.waiting import STAGED_BYTES, waits_of
from stepscope.formatting import duration, plural, size

# Attainable bytes per second from pinned memory, by compute capability: PCIe 5, 4 and 3 (peaks: 64, 32, 16 GB/s).
_RATES = ((9, 50e9), (8, 24e9))
_OLDEST_RATE = 12e9


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
    rate = _pinned_rate(case)
    durations = {
        event: min(float(ns), num_bytes / rate * 1e9)
        for event, ns, num_bytes in copies.select("event", "duration_ns", "bytes").iter_rows()
    }
    waits = waits_of(case, "pageable_copies")
    saving_ns = case.saving_ns(Change(duration_ns=durations, unwaited=frozenset(waits["event"].to_list())))
    if not case.is_worth(saving_ns):
        return []
    num_bytes, copied_ns = int(copies["bytes"].sum()), int(copies["duration_ns"].sum())
    table = grouped(
        case, copies.with_columns(pl.col("outer_op", "module", "phase").cast(pl.String)),
        "num_copies", "outer_op", "module", "phase", "bytes",
    )  # fmt: skip
    finding = Finding(
        sentence=f"Copying {size(num_bytes / case.num_steps)} from pageable (not pinned) memory to the GPU takes "
        f"{cost_text(case, copied_ns / case.num_steps)}, in {plural(copies.height / case.num_steps, 'transfer')} at "
        f"{num_bytes / copied_ns:.1f} GB/s. The host waits {duration(total_ns(case, waits, pl.col('wait_ns')), 3)} "
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
    return [finding]


def _pinned_rate(case: Case) -> float:
    try:
        capability = case.device.compute_capability
    except Unavailable:
        return _OLDEST_RATE
    major = capability[0] if capability else 0
    return next((rate for least, rate in _RATES if major >= least), _OLDEST_RATE)

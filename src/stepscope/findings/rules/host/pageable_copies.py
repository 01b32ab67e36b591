"""Is the batch copied to the GPU from memory that is not pinned, with the host waiting?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.time.replay import Change
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.waiting import STAGED_BYTES, waits_of
from stepscope.formatting import duration, plural, size
from stepscope.session.case import Case

_RATES = ((9, 50e9), (8, 24e9))
"""Bytes a second from pinned memory, by compute capability: PCIe 5 and 4, of 64 and 32 GB/s; before them 12 of 16."""
_OLDEST_RATE = 12e9


def check(case: Case) -> list[Finding]:
    if case.work.is_empty():
        return []
    trips = pl.concat([case.round_trips["out"], case.round_trips["back"]])
    copies = case.copies.filter(
        pl.col("what") == "host_to_device", pl.col("pageable"), pl.col("bytes") >= STAGED_BYTES,
        ~pl.col("event").is_in(trips.implode()),
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
    waited_ns = float(waits["wait_ns"].sum() or 0) / case.num_steps
    table = (
        copies.with_columns(pl.col("outer_op", "module", "phase").cast(pl.String))
        .group_by("outer_op", "module", "phase", "bytes")
        .agg((pl.len() / case.num_steps).alias("num_copies"), pl.col("duration_ns").sum() / case.num_steps)
        .sort("duration_ns", descending=True)
    )
    return [
        Finding(
            sentence=f"{size(num_bytes / case.num_steps)} a step go to the GPU from pageable memory, in "
            f"{plural(copies.height / case.num_steps, 'copy').replace('copys', 'copies')} at "
            f"{num_bytes / copied_ns:.1f} GB/s: {duration(copied_ns / case.num_steps, 3)} of the GPU's "
            f"{duration(case.step_ns, 3)}, for which the host stands {duration(waited_ns, 3)}.",
            fix="DataLoader(dataset, pin_memory=True, num_workers=4); then batch.to(device, non_blocking=True)",
            saving_ns=saving_ns,
            derived=f"the step replayed with these copies at {rate / 1e9:.0f} GB/s, as from pinned memory, and the "
            "host not waiting for them",
            confidence="high" if waits.height else "medium",
            falsified_by='copies named "Pinned -> Device" that take as long',
            places=case.places(copies["event"]),
            evidence=(Evidence("copies from pageable memory", table.head(8).to_dicts()),),
        )
    ]


def _pinned_rate(case: Case) -> float:
    try:
        capability = case.device.compute_capability
    except Unavailable:
        return _OLDEST_RATE
    major = capability[0] if capability else 0
    return next((rate for least, rate in _RATES if major >= least), _OLDEST_RATE)

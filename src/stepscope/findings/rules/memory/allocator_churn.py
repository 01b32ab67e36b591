"""Is memory taken from the driver and given back in every step?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.whatif import stretches
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.retries import Retries, retries_of
from stepscope.formatting import duration, plural, size
from stepscope.session.case import Case


def check(case: Case) -> list[Finding]:
    retries = retries_of(case)
    try:
        found = _calls(case, retries)
    except Unavailable:
        if retries is None:
            raise
        found = []
    return found or _retrying(case, retries)


def _calls(case: Case, retries: Retries | None) -> list[Finding]:
    """What the trace shows."""
    if case.work.is_empty():
        return []
    calls = case.allocator_calls
    saving_ns = case.saving_ns(Change(host=stretches(calls))) if calls.height else 0.0
    if not case.is_worth(saving_ns):
        return []
    given_back = calls.filter("gives_back")
    is_everywhere = calls["step"].n_unique() >= case.num_steps > 1
    if given_back.is_empty() and not is_everywhere:
        return []  # a cache that still fills: first-call cost
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
    per_step = float(calls.select(length).sum().item()) / case.num_steps
    table = (
        calls.group_by("name", "op", "phase", "module", "caller")
        .agg((pl.len() / case.num_steps).alias("num_calls"), length.sum() / case.num_steps)
        .sort("duration_ns", descending=True)
    )
    is_host = bool(calls["name"].str.contains("(?i)Host").all())
    if is_host:
        fix = "DataLoader(dataset, pin_memory=True), or keep one pinned buffer: pinning takes memory from the driver"
    elif given_back.height:
        fix = "remove torch.cuda.empty_cache() from the loop; where memory is short, " + _EXPANDABLE
    else:
        fix = "keep the sizes of a step: pad to a few lengths; or " + _EXPANDABLE
    told = ""
    if retries and retries.are_in_every_step:
        told = f", and its allocator gave up and began again {plural(retries.num, 'time')}"
    return [
        Finding(
            sentence=f"Each step takes memory from the driver "
            f"{plural((calls.height - given_back.height) / case.num_steps, 'time')} and gives it back "
            f"{plural(given_back.height / case.num_steps, 'time')}, longest in {table['name'][0]}: "
            f"{duration(per_step, 3)} of {duration(case.step_ns, 3)}{told}.",
            fix=fix,
            saving_ns=saving_ns,
            derived="the step replayed without these calls, as when the cache keeps what it has",
            confidence="high" if is_everywhere else "medium",
            falsified_by="calls that come in the first steps alone",
            places=case.host_places(calls),
            evidence=(Evidence("calls of the driver's allocator", table.head(8).to_dicts()),),
        )
    ]


_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py"


def _retrying(case: Case, retries: Retries | None) -> list[Finding]:
    """What the recording counted, where the traced steps show nothing of it."""
    if retries is None or not retries.are_in_every_step:
        return []
    memory = case.recording.facts["memory"]
    reserved, total = (memory.get(name) for name in ("peak_reserved_bytes", "driver_total_bytes"))
    held = f", with {size(reserved)} of {size(total)} reserved" if reserved and total else ""
    return [
        Finding(
            sentence=f"The allocator found no room {plural(retries.num, 'time')} in {retries.num_steps:,} "
            f"steps{held}: each "
            "time it gave its cache back to the driver and took memory again.",
            fix=_EXPANDABLE + "  # or a smaller batch",
            derived="counted by the allocator; no traced step shows what one costs",
            confidence="medium",
            falsified_by="num_alloc_retries of torch.cuda.memory_stats() that stands still after the first steps",
            evidence=(Evidence("allocator", [{"num_retries": retries.num, "num_steps": retries.num_steps}]),),
        )
    ]

"""Is memory allocated from the driver and returned to it in every step?"""

from __future__ import annotations

from stepscope.analysis.memory.allocator_events import allocator_calls
from stepscope.findings.memory_figures import Retries, retries_of
from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, one_finding, plural, size

_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py"


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
    if case.work.is_empty():
        return []
    calls = case.within(allocator_calls(case.linked))
    saving_ns = case.host_saving_ns(calls)
    if not case.is_worth(saving_ns):
        return []
    given_back = calls.filter("gives_back")
    is_everywhere = calls["step"].n_unique() >= case.num_steps > 1
    if given_back.is_empty() and not is_everywhere:
        return []  # the cache is still filling: a one-time cost
    table = case.grouped(calls, "num_calls", "name", "op", "phase", "module", "caller")
    is_host = bool(calls["name"].str.contains("(?i)Host").all())
    if is_host:
        fix = "DataLoader(dataset, pin_memory=True), or keep one pinned buffer: pinning allocates from the driver"
    elif given_back.height:
        fix = "remove torch.cuda.empty_cache() from the loop; if memory is short, " + _EXPANDABLE
    else:
        fix = "keep tensor sizes the same in every step: pad to a few lengths; or " + _EXPANDABLE
    told = ""
    if retries and retries.are_in_every_step:
        told = f" The allocator ran out of memory and retried {plural(retries.num, 'time')}."
    return one_finding(
        sentence=f"Each step allocates memory from the driver "
        f"{plural((calls.height - given_back.height) / case.num_steps, 'time')} and returns it "
        f"{case.number_text(given_back, 'time')}. This takes "
        f"{case.cost_text(float(table['duration_ns'].sum()))}, mostly in {table['name'][0]}.{told}",
        fix=fix,
        saving_ns=saving_ns,
        derived="the step replayed without these calls, as if the allocator kept its cache",
        confidence="high" if is_everywhere else "medium",
        falsified_by="trace later steps; the finding is wrong if only the first steps make these calls",
        places=case.host_places(calls),
        evidence=(Evidence("calls of the driver's allocator", table.head(8).to_dicts()),),
    )


def _retrying(case: Case, retries: Retries | None) -> list[Finding]:
    """Return the finding from the recording's counters, if the traced steps do not show it."""
    if retries is None or not retries.are_in_every_step:
        return []
    memory = case.recording.facts["memory"]
    reserved, total = (memory.get(name) for name in ("peak_reserved_bytes", "driver_total_bytes"))
    held = f" with {size(reserved)} of {size(total)} reserved" if reserved and total else ""
    return one_finding(
        sentence=f"The allocator ran out of memory {plural(retries.num, 'time')} in {retries.num_steps:,} "
        f"steps{held}. Each time, it returned its cache to the driver and allocated again.",
        fix=_EXPANDABLE + "  # or a smaller batch",
        derived="counted by the allocator; no traced step shows the cost",
        confidence="medium",
        falsified_by="watch num_alloc_retries in torch.cuda.memory_stats(); the finding is wrong if it stops growing "
        "after the first steps",
        evidence=(Evidence("allocator", [{"num_retries": retries.num, "num_steps": retries.num_steps}]),),
    )

"""Rules about the host waiting for the GPU, and which of them reports a wait, so that none is reported twice."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from stepscope.analysis.kernels.extra_work import stack_writing_ops
from stepscope.analysis.time.stalls import STALL_NS, with_threads
from stepscope.analysis.time.waits import mask_indexing
from stepscope.analysis.time.what_if import Saving
from stepscope.errors import if_available
from stepscope.findings.op_lines import logged_of
from stepscope.findings.rule import LENGTH, Case, Change, Evidence, Finding, on_gpu, one_finding, rule, stretches
from stepscope.formatting import duration, plural, size

STAGED_BYTES = 64 * 1024  # the driver copies less than this from pageable memory without waiting
_FEW_CHECKS = 2  # NaN checks per step; checking the loss is normal


def waits_of(case: Case, owner: str) -> pl.DataFrame:
    """Return the rows of `case.waits` that one rule reports.

    `anomaly_detection`: repeated NaN checks. `device_round_trip`: both ends of a trip. `pageable_copies`: large
    copies from pageable memory. `synchronization`: all others, except explicit ones that wait for nothing,
    end a step (timing code) or precede all launches (a starting profiler).
    """
    if case.work.is_empty():
        return case.waits
    ends = pl.concat([case.round_trips["out"], case.round_trips["back"]])
    in_trip = pl.col("copy").is_in(ends.implode()).fill_null(False)
    from_pageable = (
        (pl.col("what").cast(pl.String) == "host_to_device") & pl.col("pageable") & (pl.col("bytes") >= STAGED_BYTES)
    ).fill_null(False)
    is_timing = pl.col("outer_op").is_null() & pl.col("copy").is_null()
    is_timing = is_timing & (pl.col("is_closing") | pl.col("is_opening") | (pl.col("wait_ns").fill_null(0) == 0))
    whose = (
        pl.when(starts_within(case.waits, repeated_checks(case)))
        .then(pl.lit("anomaly_detection"))
        .when(in_trip)
        .then(pl.lit("device_round_trip"))
        .when(from_pageable)
        .then(pl.lit("pageable_copies"))
        .when(is_timing)
        .then(pl.lit("nobody"))
        .otherwise(pl.lit("synchronization"))
    )
    return _with_lines(case, case.waits.filter(whose == owner))


def _with_lines(case: Case, waits: pl.DataFrame) -> pl.DataFrame:
    """Return waits with the script's line as `caller`, where the log of a step has it and the trace no stacks."""
    lines = if_available(lambda: logged_of(case).select(pl.col("row").alias("stop"), "place"))
    if lines is None:
        return waits
    found = waits.join(lines, on="stop", how="left", maintain_order="left")
    line = pl.col("place").str.replace(" ", " in ", literal=True)
    return found.with_columns(pl.coalesce("caller", line).alias("caller")).drop("place")


def repeated_checks(case: Case) -> pl.DataFrame:
    """Return `case.nan_checks` if there are more than a check of the loss, else no rows."""
    checks = case.nan_checks
    return checks if checks.height > _FEW_CHECKS * case.num_steps else checks.clear()


def place(row: Mapping[str, Any]) -> str:
    """Return the `caller`, `module` or `phase` of a row, the most exact that is known."""
    for name in ("caller", "module"):
        if row.get(name) is not None:
            return str(row[name])
    phase = row.get("phase")
    return (
        f"the {phase}" if phase not in (None, "other") else "Python code outside of forward, backward and optimizer"
    )


def starts_within(table: pl.DataFrame, stretches: pl.DataFrame) -> pl.Series:
    """Return whether each row (sorted by `start_ns`) starts within one of the non-overlapping stretches."""
    borders = stretches.select("start_ns", pl.col("end_ns").alias("until_ns")).sort("start_ns")
    found = table.select("start_ns").join_asof(borders, on="start_ns", check_sortedness=False)
    return (found["start_ns"] < found["until_ns"]).fill_null(False)


def host_work(case: Case) -> pl.DataFrame:
    """Return what the host does with tensors that it copied from the GPU: its time from a `copy` to the next launch.

    Threads of a CPU op go on spinning for a while: they delay the thread that the backward runs in. A pause of a
    millisecond or more where another thread takes over is theirs too.
    """
    copied = waits_of(case, "synchronization").filter(
        pl.col("what").cast(pl.String) == "device_to_host", pl.col("bytes") > _FEW_BYTES
    )
    ends = copied.select((pl.col("start_ns") + pl.col("duration_ns")).alias("start_ns"), "copy").sort("start_ns")
    every = with_threads(case.linked, case.replay.host_stretches())
    span = every.select("start_ns", "end_ns", pl.col("start_ns").alias("from_ns"))
    after = ends.join_asof(span.sort("start_ns"), on="start_ns", check_sortedness=False)
    after = after.filter(pl.col("start_ns") < pl.col("end_ns"))
    handed = span.filter((every["thread"] != every["thread"].shift(1)).fill_null(False))
    paused = after.select("start_ns", "copy").join_asof(
        handed.sort("start_ns"), on="start_ns", strategy="forward", check_sortedness=False
    )
    paused = paused.filter(pl.col("end_ns") - pl.col("from_ns") >= STALL_NS).select(
        pl.col("from_ns").alias("start_ns"), "end_ns", "copy"
    )
    found = pl.concat([after.select("start_ns", "end_ns", "copy"), paused])
    return found.unique("end_ns", keep="last").sort("start_ns")


_FEW_BYTES = 64  # a value or a few of them: what follows need not have to do with them
_VALUES = ["aten::item", "aten::is_nonzero", "aten::_local_scalar_dense"]
_ONE_LOOK_SHARE = 0.1  # reading the loss once per step is normal, unless it costs this share of the step
_LOOP = 4  # from this many values per step, each computed and read alone, it is a loop that could be one op
_FIXES = (
    (
        "item|is_nonzero|_local_scalar_dense|equal",
        "keep the value on the GPU: total += loss.detach(), and total.item() every 100 steps; torch.where instead of "
        "`if tensor`; for gradient norms torch.nn.utils.get_total_norm(grads), which returns one tensor",
    ),
    (
        "bincount",  # reads the largest value, also with minlength
        "torch.zeros(n, dtype=x.dtype, device=x.device).scatter_add_(0, x, torch.ones_like(x))  # n: known on host",
    ),
    (
        "nonzero|masked_select|index|unique|where",
        "keep the shape fixed: torch.where(mask, x, 0) or x * mask instead of x[mask]; torch.nonzero_static(mask, "
        "size=n)",
    ),
    ("repeat_interleave", "torch.repeat_interleave(x, repeats, output_size=n)  # n known on the host"),
)
_TO_DEVICE = (
    'create it on the GPU, torch.zeros(n, device="cuda"), or copy it without waiting: x.pin_memory().to("cuda", '
    "non_blocking=True)"
)
_TO_HOST = (
    'compute on the GPU and copy only the result: x.softmax(-1).amax(-1).mean(), not x.cpu(); or x.to("cpu", '
    "non_blocking=True) into pinned memory, and read it one step later"
)
_BY_HAND = "remove torch.cuda.synchronize(); measure time with torch.cuda.Event(enable_timing=True)"


@on_gpu
def synchronization(case: Case) -> list[Finding]:
    """Does the host stop within a step to wait for the GPU: `.item()`, `.cpu()`, `nonzero`, a print?"""
    waits = waits_of(case, "synchronization")
    if waits.is_empty():
        return []
    of_values = waits.filter(pl.col("outer_op").cast(pl.String).is_in(_VALUES))
    gone = of_values["copy"].drop_nulls()
    one_by_one = of_values.filter(pl.col("fed_by").is_not_null())
    if one_by_one.height >= _LOOP * case.num_steps:
        gone = pl.concat([gone, one_by_one["fed_by"].explode()])
    masks = case.within(mask_indexing(case.linked))
    on_host = host_work(case)
    gone = pl.concat([gone, on_host["copy"].cast(gone.dtype)]).unique()
    change = case.without(gone)
    if on_host.height:
        parts = [on_host] if change.host is None else [on_host, change.host]
        change = replace(change, host=stretches(pl.concat([part.select("start_ns", "end_ns") for part in parts])))
    change = replace(_of_fixed_shape(change, masks), unwaited=frozenset(waits["event"].to_list()))
    copied_ns = case.total_ns(case.work.filter(pl.col("event").is_in(on_host["copy"].implode())))
    most_ns = case.starved_ns + copied_ns
    saving_ns = case.saving_ns(change).at_most(most_ns)
    wait_ns, idle_ns = (case.total_ns(waits, pl.col(name)) for name in ("wait_ns", "idle_after_ns"))
    if on_host.height:
        # A host that works on tensors loses its lead over the GPU. How much of it the rest of the step needs depends
        # on the host's speed, which a trace knows least: from nothing to all of it, so half.
        lost_ns = min(most_ns, wait_ns + max(idle_ns, case.total_ns(on_host, LENGTH)))
        saving_ns = Saving((saving_ns + max(saving_ns, lost_ns)) / 2, change)
    count = waits["stop"].n_unique() / case.num_steps
    is_one_look = count <= 1 and bool(waits["is_closing"].all())
    if not case.is_worth(saving_ns) or (is_one_look and saving_ns < _ONE_LOOK_SHARE * case.step_ns):
        return []
    table = _by_caller(waits, case.num_steps)
    top = table.row(0, named=True)
    fix = next((text for pattern, text in _FIXES if re.search(pattern, str(top["op"]))), _TO_HOST)
    if not str(top["op"]).startswith("aten::"):
        fix = _BY_HAND
    elif top["what"] == "host_to_device":
        fix = _TO_DEVICE
    most = "" if table.height == 1 else f"{top['num_calls']:,.0f} of them "
    until = pl.max_horizontal("duration_ns", pl.col("wait_ns").fill_null(0) + pl.col("idle_after_ns"))
    stood = waits.select("start_ns", (pl.col("start_ns") + until).alias("end_ns"))
    by_mask = ""
    if masks.height:
        by_mask = (
            f" Indexing with a mask, {case.number_text(masks, 'time')} per step, keeps the host busy "
            f"for {duration(case.total_ns(masks, LENGTH), 3)} under the profiler."
        )
    with_tensors = ""
    if on_host.height:
        with_tensors = (
            f" It then works on {plural(on_host['copy'].n_unique() / case.num_steps, 'copied tensor')} for "
            f"{duration(case.total_ns(on_host, LENGTH), 3)} before it launches anything."
        )
    return one_finding(
        sentence=f"The host stops {plural(count, 'time')} per step to wait for the GPU, {most}in {top['op']} in "
        f"{place(top)}. It waits {duration(wait_ns, 3)}, and then the GPU is idle for {duration(idle_ns, 3)} of the "
        f"{duration(case.step_ns, 3)} step.{with_tensors}{by_mask}",
        fix=fix,
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step replayed without these waits, the copies of single values, the ops that compute such "
        "values one by one in a loop, and copied tensors with the host's time until its next launch; the host then "
        "runs ahead as far as the GPU's own work allows"
        + ("; each op that indexes with a mask becomes one kernel and takes as much host time as a typical op"
           if by_mask else ""),
        confidence="high" if count >= 2 else "medium",
        falsified_by="remove the calls; the finding is wrong if the step is not faster, or if the host needs a value "
        "before it can continue",
        places=case.host_places(stood),
        evidence=(Evidence("waits of the host, by op and caller", table.head(8).to_dicts()),),
    )  # fmt: skip


def _of_fixed_shape(change: Change, masks: pl.DataFrame) -> Change:
    """Return the change with the ops that count a mask's elements removed too."""
    if masks.is_empty():
        return change
    host = [masks.select("start_ns", "end_ns", "factor")]
    if change.host is not None:
        host.append(change.host.filter(~starts_within(change.host, masks)))
    gone = masks["events"].explode().drop_nulls().to_list()
    return replace(change, gone=change.gone | frozenset(gone), host=pl.concat(host).sort("start_ns"))


def _by_caller(waits: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    keys = ("op", "what", "phase", "module", "caller")
    return (
        waits.with_columns(pl.coalesce(pl.col("outer_op", "call").cast(pl.String)).alias("op"))
        .with_columns(pl.col("what", "phase", "module").cast(pl.String))
        .group_by(keys, maintain_order=True)
        .agg(
            (pl.col("stop").n_unique() / num_steps).alias("num_calls"),
            *(pl.col(name).sum() / num_steps for name in ("wait_ns", "idle_after_ns")),
            pl.col("waited_for").cast(pl.String).drop_nulls().mode(maintain_order=True).first(),
        )
        .sort(pl.col("wait_ns") + pl.col("idle_after_ns"), "num_calls", descending=True)
    )


@on_gpu
def device_round_trip(case: Case) -> list[Finding]:
    """Are tensors copied to the CPU and back within a step?"""
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
        f"{size(int(trips['bytes'].max()))} to the CPU and back to the GPU takes "  # type: ignore[arg-type]  # numbers
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


# Attainable bytes per second from pinned memory, by compute capability: PCIe 5, 4 and 3 (peaks: 64, 32, 16 GB/s).
_RATES = ((9, 50e9), (8, 24e9), (0, 12e9))


@on_gpu
def pageable_copies(case: Case) -> list[Finding]:
    """Is the batch copied to the GPU from memory that is not pinned, while the host waits?"""
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
        fix="DataLoader(..., pin_memory=True); then batch.to(device, non_blocking=True)",
        saving_ns=saving_ns,
        derived=f"the step replayed with these copies at {rate / 1e9:.0f} GB/s, as from pinned memory, and without "
        "the host's wait for them",
        confidence="high" if waits.height else "medium",
        falsified_by='pin the memory; the finding is wrong if the copies named "Pinned -> Device" take as long',
        places=case.places(copies["event"]),
        evidence=(Evidence("copies from pageable memory", table.head(8).to_dicts()),),
    )


@rule
def anomaly_detection(case: Case) -> list[Finding]:
    """Does anomaly detection, or a NaN check of your own, run at every op?"""
    checks = repeated_checks(case)
    if checks.is_empty():
        return []
    events = checks["events"].drop_nulls().explode().drop_nulls()
    waits = case.waits.filter(starts_within(case.waits, checks))
    is_autograd = checks["is_autograd"].sum() > checks.height / 2
    spent = checks.select("start_ns", "end_ns")
    traced = case.within(stack_writing_ops(case.linked))
    traced = traced if is_autograd else traced.clear()
    host = pl.concat([stretches(spent), traced]).sort("start_ns")
    host = host.filter((pl.col("start_ns") >= pl.col("end_ns").cum_max().shift(1)).fill_null(True))
    change = replace(case.without(events), host=host, unwaited=frozenset(waits["event"].to_list()))
    saving_ns = case.saving_ns(change)
    if not case.is_worth(saving_ns):
        return []
    who = "torch.autograd.detect_anomaly" if is_autograd else "The program"
    table = case.grouped(checks, "num_checks", "phase", "module", "is_autograd", time=LENGTH.alias("host_ns"))
    stacks_ns = case.total_ns(traced, LENGTH * (1 - pl.col("factor")))
    stacks = f", plus {duration(stacks_ns, 3)} to record a stack trace at {case.number_text(traced, 'forward op')}"
    stacks = stacks if traced.height else ""
    return one_finding(
        sentence=f"{who} runs {case.number_text(checks, 'NaN check')} per step and waits for each result: "
        f"{duration(case.total_ns(spent, LENGTH), 3)} of host time in a {duration(case.step_ns, 3)} step{stacks}.",
        fix="torch.autograd.set_detect_anomaly(False)  # in Lightning: Trainer(detect_anomaly=False)"
        if is_autograd
        else "check only the loss, every 100 steps",
        saving_ns=saving_ns,
        derived="the step replayed without the checks, their kernels and the waits for them"
        + (", and with the usual time for ops that record a stack trace" if stacks else ""),
        falsified_by="turn the checks off; the finding is wrong if the step is not faster",
        places=case.host_places(spent),
        evidence=(Evidence("NaN checks", table.head(8).to_dicts()),),
    )

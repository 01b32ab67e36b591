"""Rules about memory: logits, checkpointing, fragmentation, leaks and the driver's allocator."""

from dataclasses import replace

import polars as pl

from stepscope.analysis.costs.attainable_rates import loss_ns
from stepscope.analysis.memory.account import Account
from stepscope.analysis.memory.allocator_events import allocator_calls
from stepscope.errors import if_available
from stepscope.findings.rule import Case, Change, Evidence, Finding, Unavailable, on_gpu, one_finding, rule, stretches
from stepscope.findings.rules.cpu import recomputed_on_cpu
from stepscope.formatting import plural, size, whole_percent

_WORTH_SHARE = 0.05  # of the peak; smaller savings are not reported
_LEAST_BYTES = 256 << 20
_BLOCK_BYTES = 512  # the allocator rounds up to this
_RETRIES_PER_STEP = 0.5  # an occasional retry while the cache fills is normal


def alive_bytes(case: Case, *num_elements: int, item_bytes: tuple[int, ...] = (2, 4)) -> int | None:
    """Return the bytes held at the peak by tensors of some sizes; None if memory was not recorded."""
    memory = if_available(lambda: case.memory)
    if memory is None:
        return None
    exact = {num * size for num in num_elements for size in item_bytes}
    sizes = exact | {-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in exact}
    return sum(large.bytes * large.num_at_peak for large in memory.largest if large.bytes in sizes)


def is_worth_bytes(case: Case, saving_bytes: int | None) -> bool:
    return bool(saving_bytes) and (saving_bytes or 0) >= max(_LEAST_BYTES, _WORTH_SHARE * case.memory.peak_bytes)


def retries_of(case: Case) -> tuple[int, int, bool] | None:
    """Return the retries in a recording's warm-up and clean steps, those steps, and whether they recur in every step,
    which `allocator_churn` reports: fewer only show that memory is full. None if they were not counted."""
    facts = case.recording.facts if case.has_recording else {}
    counted = (facts.get("memory") or {}).get("num_allocator_retries")
    if not isinstance(counted, int):
        return None
    num_steps = sum(sample.window in ("warmup", "clean") for sample in case.recording.samples)
    return counted, num_steps, 0 < _RETRIES_PER_STEP * num_steps <= counted


_ONE_PASS = 1.5  # a loss faster than this many times a fused one is fused
_NUM_CHUNKS = 8
_SHORT_SHARE = 0.5  # of the device's memory; chunks trade time for memory, which is pointless below this
_COMPILED = (
    "loss = torch.compile(head_and_loss)(hidden, targets)  # compile once; def head_and_loss(hidden, targets): "
    "return F.cross_entropy(head(hidden).float(), targets)"
)
_IN_CHUNKS = f"compute head and loss for {_NUM_CHUNKS} chunks of the tokens, each under torch.utils.checkpoint"
# The matrix product that computes logits: one per loss.
_MAKES = pl.col("is_product") & pl.col("phase").ne_missing("backward")


@rule
def full_logits(case: Case) -> list[Finding]:
    """Are logits for the whole vocabulary held in memory for all tokens at once?"""
    case.with_shapes(and_dtypes=True)
    work = case.logits.filter(~_is_in_chunks(case.logits))
    if not work["is_loss"].any():
        return []
    durations: dict[int, float] = {}
    gone: list[int] = []
    held: int | None = 0
    kept_bytes = total_fused_ns = 0.0
    for (num_tokens, vocabulary, item_bytes), part in work.group_by("num_tokens", "vocabulary", "item_bytes"):
        num_elements = int(num_tokens) * int(vocabulary)
        passes = part.filter(~pl.col("is_product"))
        num_losses = max(1, part.filter(_MAKES).height)
        kept = passes.filter("is_loss").sort("duration_ns", descending=True)["event"].head(num_losses)
        fused_ns = loss_ns(case.device, num_elements * int(item_bytes))
        now_ns = float(passes["duration_ns"].sum()) / num_losses
        durations |= dict.fromkeys(kept.to_list(), min(fused_ns, now_ns))
        gone += passes.filter(~pl.col("event").is_in(kept.implode()))["event"].to_list()
        total_fused_ns += fused_ns * num_losses
        alive = alive_bytes(case, *part["num_elements"].unique())
        held = None if held is None or alive is None else held + alive
        kept_bytes += num_elements * int(item_bytes)
    total_ns = float(work.filter(~pl.col("is_product"))["duration_ns"].sum())
    is_fused = total_ns < _ONE_PASS * total_fused_ns
    saving_ns: float | None = None
    if not is_fused:
        saving_ns = case.saving_ns(case.without(gone, durations))
    elif not held or case.memory.peak_bytes < _SHORT_SHARE * (case.device.visible_bytes or case.device.memory_bytes):
        return []
    saving_bytes = freed_bytes(case, held, held // _NUM_CHUNKS if held and is_fused else int(kept_bytes))
    if not (case.is_worth(saving_ns or 0.0) or is_worth_bytes(case, saving_bytes)):
        return []
    one = work.sort(pl.col("num_tokens") * pl.col("vocabulary")).row(-1, named=True)
    passes = work.filter(~pl.col("is_product"))
    logits_bytes = one["num_tokens"] * one["vocabulary"] * one["item_bytes"]
    holding = f", or {size(held)} of the {size(case.memory.peak_bytes)} peak with all copies" if held else ""
    table = case.grouped(work, "num_kernels", "op", "phase", "is_product")
    in_chunks = (
        f"bytes: tensors of that size alive at the peak, minus one of {_NUM_CHUNKS} chunks; the product that "
        "computes the logits runs twice, which costs time"
    )
    compiled = (
        "the step replayed with one pass over the logits in the forward and one in the backward, at half of the "
        "device's bandwidth; bytes: tensors of that size alive at the peak, minus one copy of the logits"
    )
    return one_finding(
        sentence=f"The full logits ({one['num_tokens']:,} tokens × {one['vocabulary']:,} vocabulary) take "
        f"{size(logits_bytes)}{holding}. Besides the matrix products, reading and writing "
        f"them in {case.number_text(passes, 'kernel')} takes {case.cost_text(total_ns / case.num_steps)}.",
        fix=_IN_CHUNKS if is_fused else _COMPILED,
        saving_ns=saving_ns if saving_ns is not None and case.is_worth(saving_ns) else None,
        saving_bytes=saving_bytes,
        upper_bound=True,
        group=None if is_fused else "compile",
        derived=in_chunks if is_fused else compiled,
        confidence="medium",
        falsified_by="look at the memory timeline; the finding is wrong if the peak is elsewhere in the step, or if "
        "the program needs all logits at once",
        places=case.places(passes["event"]),
        evidence=(Evidence("kernels that read or write the logits", table.head(10).to_dicts()),),
    )


def _is_in_chunks(work: pl.DataFrame) -> pl.Series:
    """Return for each row whether its logits are already computed in chunks: several times before a backward."""
    backwards = (pl.col("phase") == "backward").cum_sum()
    sizes = ("num_tokens", "vocabulary")
    made = work.select(*sizes, backwards.over(sizes).alias("backward"), _MAKES.cast(pl.Int64).alias("made"))
    most = made.group_by(*sizes, "backward").agg(pl.col("made").sum()).group_by(sizes).agg(pl.col("made").max())
    return work.select(sizes).join(most, on=sizes, how="left", maintain_order="left")["made"] > 1


def freed_bytes(case: Case, held: int | None, kept: int) -> int | None:
    """Return the bytes that need not be held, at most the difference to the peak in other stages of the step."""
    if not held:
        return None
    elsewhere = [
        stage.peak_bytes for stage in case.memory.stages if stage.name not in ("forward", "loss", "backward")
    ]
    return max(0, min(held - kept, case.memory.peak_bytes - max(elsewhere, default=0))) or None


_USABLE_SHARE = 0.85  # of the device's memory; beyond it, fragmentation causes failures


@rule
def checkpointing_with_free_memory(case: Case) -> list[Finding]:
    """Is the forward recomputed in the backward although its results would fit in memory?"""
    if case.is_on_cpu:
        return recomputed_on_cpu(case)
    case.with_shapes()
    again = case.recomputed
    events = again["events"].explode().drop_nulls()
    change = case.without(events, is_loop=True)  # what the host does between two recomputed ops is theirs too
    host = again.select(pl.col("from_ns").alias("start_ns"), pl.col("until_ns").alias("end_ns"))
    host = host if change.host is None else pl.concat([host, change.host.select("start_ns", "end_ns")])
    saving_ns = case.saving_ns(replace(change, host=stretches(host)))
    if not case.is_worth(saving_ns):
        return []
    peak_bytes = case.memory.peak_bytes
    more_bytes = int(again["allocated_bytes"].sum()) // case.num_steps or _not_kept(case)
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
    table = case.grouped(again, "num_calls", "name", more=[allocated] if again["allocated_bytes"].sum() else [])
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
        saving_ns=saving_ns.at_most(saving_ns * share),
        derived=f"the step replayed without the recomputed ops and the host's time for them{of_it}",
        falsified_by="turn checkpointing off; the finding is wrong if the run then runs out of memory or is not "
        "faster",
        places=case.places(events),
        evidence=(Evidence("recomputed ops", table.head(8).to_dicts()),),
    )


def _not_kept(case: Case) -> int:
    """Return the bytes that the forward makes and does not keep, as what is recomputed is; 0 if unknown."""
    window = case.allocations
    if window.get("num_dropped"):
        return 0
    wanted = {"device": window["device"], "owner": "temporary", "phase": "forward"}
    return sum(each["bytes"] for each in window["allocations"] if wanted.items() <= each.items())


_FRAGMENTED_SHARE = 0.2  # of reserved memory unused at the peak; less is normal for the allocator
_FULL_SHARE = 0.7  # of the device's memory; below this, unused memory costs nothing
_EXPANDABLE = "expandable_segments:True"
_WITH_EXPANDABLE = f"PYTORCH_CUDA_ALLOC_CONF={_EXPANDABLE} python train.py"
_FIGURES = ("allocated_bytes", "reserved_bytes", "device_bytes", "used_bytes", "num_retries", "settings")


@rule
def memory_pressure(case: Case) -> list[Finding]:
    """Is memory nearly full while much of it is lost to fragmentation?"""
    figures = _figures(case)
    allocated, reserved, total, used, retries, settings = figures
    idle = max(0, reserved - allocated)
    is_full = bool(retries) or (total > 0 and max(used, reserved) >= _FULL_SHARE * total)
    if not reserved or idle < _FRAGMENTED_SHARE * reserved or not is_full:
        return []
    if _EXPANDABLE in settings:
        fix = "use fewer different shapes (pad to a few lengths): expandable segments are already on"
    else:
        fix = _WITH_EXPANDABLE
    counted = retries_of(case)
    again = ""
    if retries and not (counted and counted[2]):  # else `allocator_churn` reports it
        again = f" The allocator returned its cache {plural(retries, 'time')} to make room."
    of = f" (of {size(total)} on the device)" if total else ""
    return one_finding(
        sentence=f"{size(idle)} ({whole_percent(idle / reserved)}) of {size(reserved)} reserved memory{of} is not "
        f"used by any tensor, even at the peak.{again}",
        fix=fix,
        saving_bytes=idle,
        upper_bound=True,
        derived="peak reserved memory minus peak allocated memory",
        confidence="high" if retries else "medium",
        falsified_by=f"set {_EXPANDABLE}; the finding is wrong if reserved memory and retries stay the same",
        evidence=(Evidence("memory", [dict(zip(_FIGURES, figures))]),),
    )


def _figures(case: Case) -> tuple[int, int, int, int, int, str]:
    """Return the values of `_FIGURES`; 0 for those of the device that are unknown."""
    if not case.has_recording:
        memory, reserved = case.memory, case.memory.peak_reserved_bytes
        if reserved is None:
            raise Unavailable("Reserved memory is unknown. Profile on a GPU with profile_memory=True.")
        allocated = reserved - (memory.fragmentation_bytes or 0)
        return allocated, reserved, case.device.memory_bytes, 0, memory.num_retries or 0, ""
    facts = case.recording.facts
    counts = facts.get("memory") or {}
    if "peak_reserved_bytes" not in counts:
        raise Unavailable("The recording has no allocator figures. They are taken on a GPU after the clean steps.")
    variables = (facts.get("environment") or {}).get("variables") or {}
    settings = " ".join(str(value) for name, value in variables.items() if "ALLOC_CONF" in str(name))
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "driver_total_bytes", "driver_used_bytes",
             "num_allocator_retries")  # fmt: skip
    allocated, reserved, total, used, retries = (int(counts.get(name) or 0) for name in names)
    return allocated, reserved, total, used, retries, settings


_PEAK_SHARE = 0.05
_MANY_STEPS = 1000  # growth that doubles the peak within so many steps is reported


@rule
def memory_growth(case: Case) -> list[Finding]:
    """Does every step leave memory behind, or keep an earlier step's graph alive?"""
    growth, memory = case.memory_growth, case.memory
    levels = case.run.tracks.get("allocated_bytes") if case.has_recording else None
    if growth is None or (levels is not None and levels.rises_by(growth.bytes_per_step / 2) is False):
        return _kept(memory)  # a tensor that the next step replaces looks like one that is left behind
    held = max(growth.held_bytes or 0, _in_graphs(memory))
    is_graph = any(left.num_tensors > 1 for left in memory.left_alive)
    is_much = held >= _PEAK_SHARE * memory.peak_bytes or growth.bytes_per_step * _MANY_STEPS >= memory.peak_bytes
    # A graph's tensors also keep its nodes alive in host memory, which is not measured: always a mistake.
    if not is_much and not is_graph:
        return []
    row = growth.rows[0]
    what = row["op"] or "something"
    shape = f" of shape {row['shape']}" if row["shape"] else ""
    frame = next((left.frame for left in memory.left_alive if left.frame), None)
    where = frame or next((row["holder"] for row in growth.rows if row["holder"]), None)
    so_far = f"This happens in {plural(growth.num_steps, 'step')} in a row, on top of"
    if growth.held_bytes is not None:
        num = max(row["num_held"] for row in growth.rows)
        so_far = f"Earlier steps left {size(held)}, up to {plural(num, 'tensor')} of the same kind, of"
    fix = "keep numbers, not tensors: losses.append(loss.item()); for tensors: .detach().cpu(), and clear the list"
    return one_finding(
        sentence=f"Every step leaves {size(growth.bytes_per_step)} of memory behind, mostly from {what}{shape}"
        f"{f', held by {where}' if where else ''}{' in a graph that is never freed' if is_graph else ''}. {so_far} "
        f"the {size(memory.peak_bytes)} peak.",
        fix=fix if where else f"{fix}  # stepscope run --memory train.py names the variable",
        saving_bytes=held or growth.bytes_per_step,
        derived="memory held from earlier steps" if held else "memory left by one step",
        confidence="high" if is_much else "medium",
        falsified_by=f"train on; the finding is wrong if the peak is the same {_MANY_STEPS:,} steps later",
        places=() if growth.kept is None else case.host_places(growth.kept),
        evidence=(Evidence("memory left behind per step", growth.rows[:8]), *_graphs(memory)),
    )


def _kept(memory: Account) -> list[Finding]:
    """Return a finding for graphs of earlier steps that stay alive without growing in number."""
    num_bytes = _in_graphs(memory)
    if not memory.left_alive or num_bytes < _PEAK_SHARE * memory.peak_bytes:
        return []
    largest = memory.left_alive[0]
    by = f", held by {largest.frame}" if largest.frame else ""
    return one_finding(
        sentence=f"{plural(len(memory.left_alive), 'graph')} of earlier steps still "
        f"{'holds' if len(memory.left_alive) == 1 else 'hold'} {size(num_bytes)} of the {size(memory.peak_bytes)} "
        f"peak{by}; the last op is {largest.op or 'unnamed'}.",
        fix="with torch.no_grad(): around code that needs no backward; del loss, out  # before the next forward",
        saving_bytes=num_bytes,
        derived="memory that those graphs keep alive at the peak",
        falsified_by="delete that variable; the finding is wrong if the peak stays the same",
        evidence=_graphs(memory),
    )


def _in_graphs(memory: Account) -> int:
    """Return the bytes that graphs of earlier steps keep alive at the peak."""
    return sum(part.bytes for part in memory.live_at_peak.by_owner if part.name == "left_alive")


def _graphs(memory: Account) -> tuple[Evidence, ...]:
    rows = [
        {"bytes": left.bytes, "num_tensors": left.num_tensors, "op": left.op, "module": left.module,
         "holder": left.frame}
        for left in memory.left_alive[:8]
    ]  # fmt: skip
    return (Evidence("graphs of earlier steps", rows),) if rows else ()


@on_gpu
def allocator_churn(case: Case) -> list[Finding]:
    """Is memory allocated from the driver and returned to it in every step?"""
    retries = retries_of(case)
    try:
        found = _calls(case, retries)
    except Unavailable:
        if retries is None:
            raise
        found = []
    return found or _retrying(case, retries)


def _calls(case: Case, retries: tuple[int, int, bool] | None) -> list[Finding]:
    if case.work.is_empty():
        return []
    calls = case.within(allocator_calls(case.linked))
    saving_ns = case.saving_ns(Change(host=stretches(calls), unwaited=frozenset(calls["event"].to_list())))
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
        fix = "remove torch.cuda.empty_cache() from the loop; if memory is short, " + _WITH_EXPANDABLE
    else:
        fix = "keep tensor sizes the same in every step: pad to a few lengths; or " + _WITH_EXPANDABLE
    told = ""
    if retries and retries[2]:
        told = f" The allocator ran out of memory and retried {plural(retries[0], 'time')}."
    return one_finding(
        sentence=f"Each step allocates memory from the driver "
        f"{plural((calls.height - given_back.height) / case.num_steps, 'time')} and returns it "
        f"{case.number_text(given_back, 'time')}. This takes "
        f"{case.cost_text(float(table['duration_ns'].sum()))}, mostly in {table['name'][0]}.{told}",
        fix=fix,
        saving_ns=saving_ns,
        rows=("idle_allocator",),
        derived="the step replayed without these calls, as if the allocator kept its cache",
        confidence="high" if is_everywhere else "medium",
        falsified_by="trace later steps; the finding is wrong if only the first steps make these calls",
        places=case.host_places(calls),
        evidence=(Evidence("calls of the driver's allocator", table.head(8).to_dicts()),),
    )


def _retrying(case: Case, retries: tuple[int, int, bool] | None) -> list[Finding]:
    """Return the finding from the recording's counters, if the traced steps do not show it."""
    if retries is None or not retries[2]:
        return []
    num, num_steps, _ = retries
    memory = case.recording.facts["memory"]
    reserved, total = (memory.get(name) for name in ("peak_reserved_bytes", "driver_total_bytes"))
    held = f" with {size(reserved)} of {size(total)} reserved" if reserved and total else ""
    return one_finding(
        sentence=f"The allocator ran out of memory {plural(num, 'time')} in {num_steps:,} "
        f"steps{held}. Each time, it returned its cache to the driver and allocated again.",
        fix=_WITH_EXPANDABLE + "  # or a smaller batch",
        derived="counted by the allocator; no traced step shows the cost",
        confidence="medium",
        falsified_by="watch num_alloc_retries in torch.cuda.memory_stats(); the finding is wrong if it stops growing "
        "after the first steps",
        evidence=(Evidence("allocator", [{"num_retries": num, "num_steps": num_steps}]),),
    )

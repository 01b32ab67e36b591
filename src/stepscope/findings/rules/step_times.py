"""Rules about the loop: waiting for data, time between steps, slow steps, steps of a warm-up."""

import shlex
from typing import Any

import polars as pl

from stepscope.analysis.structure.intervals import length_ns, union
from stepscope.analysis.structure.nesting import python_callers
from stepscope.analysis.time.cpu_ledger import TRAINING
from stepscope.analysis.time.stalls import MANY_OPS
from stepscope.errors import ABOUT_CPUS, if_available
from stepscope.findings.op_lines import data_text, outside_text, python_lines, python_text
from stepscope.findings.rule import LENGTH, Case, Evidence, Finding, Unavailable, one_finding, rule
from stepscope.findings.rules.cpu import by_name, ops_of_steps
from stepscope.formatting import duration, plural, safe, whole_percent
from stepscope.session.case import WORTH_SHARE, WORTH_WITHOUT_GPU

_FIX = "DataLoader(dataset, num_workers=4, pin_memory=True, persistent_workers=True)  # one worker per spare core"
_CHECK = "train on one batch over and over; the finding is wrong if the step is not faster"


@rule
def waiting_for_data(case: Case) -> list[Finding]:
    """Does the step wait for its data?"""
    return _in_trace(case) if case.has_gpu_work else _in_samples(case)


def _loader_fix(case: Case, waited_ns: float) -> str:
    """Return the change of the DataLoader that its own figures ask for."""
    facts = case.recording.facts if case.has_recording else {}
    loader = facts.get("loader") or {}
    workers, cores = loader.get("num_workers"), (facts.get("flags") or {}).get("num_cores")
    if workers is None and cores is None:
        return _FIX
    ranks = (facts.get("environment") or {}).get("world_size") or 1
    cores = max(1, cores // ranks) if cores else None  # of each rank
    spare = max(1, (cores or 8) - 1)
    if not workers:
        cheaper = ", or speed up the lines above" if python_text(case, has_others=False) else ""
        if cores == 1:
            whose = "there is one core" if ranks == 1 else "each rank has one core"
            return (
                f"prepare the batches once and store them{cheaper}: {whose}, which workers would share with training"
            )
        workers = f"DataLoader(..., num_workers={min(spare, 8)}, persistent_workers=True)"
        now = "if it has none" if loader.get("num_workers") is None else "now 0: training loads it"
        return f"{workers}  # {now}{cheaper}"
    # Workers that are always busy give one batch per step: more of them, for a step without the wait.
    wanted = -(-workers * case.step_ns // max(1.0, case.step_ns - waited_ns))
    if wanted <= spare:
        return (
            f"DataLoader(..., num_workers={wanted:.0f})  # now {workers}, which keep up with {workers / wanted:.0%}"
        )
    return (
        f"make the dataset cheaper (decode and resize once, store arrays): {workers} workers on {cores or 'these'} "
        f"cores do not keep up, and {wanted:.0f} would not fit"
    )


def _clean_wait_ns(case: Case, waits: pl.DataFrame) -> float:
    """Return the most that the GPU can wait before the forward, by its own events in the clean steps: a trace begins
    with an empty queue, and its first step waits for what the host otherwise does ahead. Infinite if unknown."""
    phases = if_available(lambda: case.summary.phases) if case.has_recording else None
    found = [phase.device_ns for phase in phases or () if phase.name not in TRAINING]
    if not found or (waits["phase"] == "forward").any():
        return float("inf")
    return float("inf") if None in found else sum(filter(None, found))


def _has_no_loader(case: Case) -> bool:
    """Return whether a recording shows that the script makes its batches without a DataLoader."""
    facts = case.recording.facts if case.has_recording else {}
    return "loader" not in facts and bool((facts.get("flags") or {}).get("num_cores"))


def _ahead_fix(case: Case) -> str:
    """Return the change of a loop that makes its batches itself, with the line that takes most of it if known."""
    lines = python_lines(case)
    longest = f" ({safe(lines[0][0].partition(' ')[0], 80)} takes longest)" if lines else ""
    return (
        "batch, pending = pending.result(), pool.submit(next_batch)  # a ThreadPoolExecutor(1) makes the next one "
        f"while the GPU works on this one{longest}; or make it on the GPU, or in a Dataset of a DataLoader(..., "
        "num_workers=…)"
    )


def _in_trace(case: Case) -> list[Finding]:
    waits = case.stalls.filter(pl.col("kind") == "data")
    saving_ns = case.host_saving_ns(waits)
    saving_ns = saving_ns.at_most(max(0.0, min(float(saving_ns), _clean_wait_ns(case, waits))))
    if not case.is_worth(saving_ns):
        return []
    wait_ns = float(waits.select(LENGTH).sum().item())
    is_loader = waits["phase"].eq_missing("data").any()
    preparing = waits.filter(pl.col("num_ops") >= MANY_OPS, pl.col("phase").ne_missing("data"))
    is_preparing = 2 * preparing.select(LENGTH).sum().item() > wait_ns
    is_by_hand = _has_no_loader(case) and not is_loader
    fix = _ahead_fix(case) if is_by_hand else _loader_fix(case, wait_ns / case.num_steps)
    what = "before the forward with no op running, most likely for data"
    if is_preparing:
        num_ops = float(preparing["num_ops"].sum()) / case.num_steps
        what = (
            f"while the host prepares the batch on the CPU, in {plural(num_ops, 'op')}, mostly "
            f"{preparing.sort(LENGTH, descending=True)['most_op'][0]}"
        )
        fix = fix if is_by_hand else f"do it in workers, in the dataset or the collate_fn: {fix}"
    elif is_loader:
        what = "for the DataLoader"
    rows = waits.select("step", "phase", "num_ops", "most_op", LENGTH).head(8).to_dicts()
    return one_finding(
        sentence=f"The GPU waits {case.cost_text(wait_ns / case.num_steps)} {what}. It has only "
        f"{duration(case.step.device_ns, 3)} of work.{python_text(case)}",
        fix=fix,
        saving_ns=saving_ns,
        derived="the step replayed without these waits, as if the batch were ready",
        confidence="high" if is_loader and not is_preparing else "medium",
        falsified_by=_CHECK,
        places=case.host_places(waits),
        is_provable=not is_by_hand,  # workers need a DataLoader
        evidence=(Evidence("waits", rows),),
    )


def _in_samples(case: Case, is_named: bool = True) -> list[Finding]:
    """Return the finding from the phases of the clean steps, if there is no trace of GPU work."""
    summary = case.summary
    phase = next((phase for phase in summary.phases if phase.name == "data"), None)
    if phase is None:
        raise Unavailable("The recording has no clean steps: it ended during warm-up.")
    # On a GPU, only the time between its events counts: data that arrives while it works costs nothing.
    waited_ns = phase.host_ns if phase.device_ns is None else phase.device_ns
    if phase.device_ns is None and summary.counters is not None and (busy := summary.counters.gpu_busy_share):
        waited_ns = min(waited_ns, (1 - busy.mean) * case.step_ns)  # the host may wait for the GPU, as a copy does
    if waited_ns < (WORTH_WITHOUT_GPU if phase.device_ns is None else WORTH_SHARE) * case.step_ns:
        return []
    if is_named != summary.data_is_named:
        return []
    loader = _loader_fix(case, waited_ns)
    rows = [{"phase": row.name, "duration_ns": row.ns, "share": row.share} for row in summary.rows]
    if not is_named:
        return _beside(case, waited_ns, loader, rows)
    preparing = if_available(lambda: _preparing(case))
    slow = f", which has no workers and spends most of it in {preparing}" if preparing is not None else ""
    return one_finding(
        sentence=f"Training waits {case.cost_text(waited_ns)} for the DataLoader{slow}, on average over the "
        f"typical steps among {summary.num_clean} clean ones.{data_text(case, waited_ns / 10)}",
        fix=loader,
        saving_ns=waited_ns,
        rows=("cpu_data", "idle_data"),
        upper_bound=True,
        derived="the mean of the data phase; workers that share the CPU with training hide less of it",
        falsified_by=_CHECK,
        evidence=(Evidence("a typical step by phase", rows),),
    )


def _preparing(case: Case) -> str | None:
    """Return the op with most of the time before the forward, if ops and not a wait fill it on the traced CPU."""
    has_workers = (case.recording.facts.get("loader") or {}).get("num_workers") != 0
    if not case.is_on_cpu or has_workers:
        return None
    is_before = ~pl.col("phase").cast(pl.String).is_in(TRAINING)
    ops, _ = ops_of_steps(case)
    spent = by_name(ops.filter(is_before), case.num_steps)
    phases = case.linked.steps.phases.filter(is_before)
    traced_ns = float((phases["end_ns"] - phases["start_ns"]).sum()) / case.num_steps
    return safe(spent["name"][0], 60) if 2 * float(spent["duration_ns"].sum()) > traced_ns > 0 else None


@rule
def host_work_between_steps(case: Case) -> list[Finding]:
    """Does the script work between a step and the next forward, in a loop without a DataLoader?"""
    if case.recording and case.has_gpu_work:  # `waiting_for_data` and `host_stall` look at what the GPU waits for
        raise Unavailable(ABOUT_CPUS)
    return _in_samples(case, is_named=False)


def _beside(case: Case, spent_ns: float, loader: str, rows: list[dict[str, Any]]) -> list[Finding]:
    """Return the finding about a loop without a DataLoader: what of it makes the batch is not known."""
    found = if_available(lambda: _between(case))
    parts, tables = found if found is not None else ("", [])
    return one_finding(
        sentence=f"Host work between steps takes {case.cost_text(spent_ns)}: from the end of a step to the next "
        f"forward, without a DataLoader{parts}.{outside_text(case, spent_ns / 10)}",
        fix="metrics, histograms and averages of weights every N steps; what makes the batch: once before training, "
        f'or in workers ({loader}). `with stepscope.phase("data"):` around it tells one from the other',
        saving_ns=spent_ns,
        rows=("cpu_between", "idle_data"),
        upper_bound=True,
        derived="all of that time, on average over the typical clean steps; what training needs of it remains",
        confidence="medium",
        falsified_by="leave it out of a run; the finding is wrong if the step is not faster",
        evidence=(*tables, Evidence("a typical step by phase", rows)),
    )


_LEAST_LINE = 0.05  # of the time between steps, for a line of the script to be named


def _between(case: Case) -> tuple[str, list[Evidence]]:
    """Return what the traced time between steps consists of, as text and evidence: ops, and the script's lines."""
    gaps = case.linked.steps.phases.filter(~pl.col("phase").cast(pl.String).is_in([*TRAINING, "data"]))
    gaps = case.within(gaps)
    whole_ns = max(1, length_ns(union(gaps)))
    host = case.linked.host.filter(pl.col("phase").cast(pl.String) == "other", pl.col("step").is_not_null())
    host = case.within(host).with_columns(pl.col("name").cast(pl.String))
    ops = by_name(host.filter(pl.col("kind") == "op"), case.num_steps)
    share = min(1.0, float(ops["duration_ns"].sum()) * case.num_steps / whole_ns)
    text = f". {whole_percent(share)} of it is in ops"
    text += f", mostly {safe(ops['name'][0], 60)}" if ops.height else ""
    lines = host.with_columns(python_callers(case.linked.host, host["row"])).drop_nulls("caller")
    spent = lines.group_by("caller").agg(pl.col("self_ns").sum() / case.num_steps)
    spent = spent.rename({"self_ns": "duration_ns"}).sort("duration_ns", "caller", descending=[True, False])
    named = spent.filter(pl.col("duration_ns") * case.num_steps >= _LEAST_LINE * whole_ns)
    if named.height:
        text += f"; the lines that take it: {', '.join(safe(name, 60) for name in named['caller'].head(3))}"
    tables = [Evidence("ops between steps", ops.head(8).to_dicts())] if ops.height else []
    return text, [*([Evidence("lines between steps", spent.head(8).to_dicts())] if spent.height else []), *tables]


_IN_STEP = ("cpu_between", "cpu_outside", "cpu_data", "cpu_python", "cpu_ops", "cpu_products", "idle_python",
            "idle_launch", "idle_synchronization", "idle_data", "idle_unknown")  # fmt: skip
"""Rows that hold what every step has of the work between steps."""
_BETWEEN_FIXES = {
    "data": "DataLoader(..., persistent_workers=True)  # keep the workers from one epoch to the next",
    "rollout": "collect more at once: a larger batch of environments, or generation with a key-value cache",
    "logging": "keep metrics on the device and log them every N steps",
}


@rule
def between_steps(case: Case) -> list[Finding]:
    """Does the loop spend time between its training steps: rollouts, logging, starting workers?"""
    loop = case.summary.loop
    if loop is None:
        raise Unavailable("The recording has no undisturbed steps: it ended during warm-up.")
    findings = []
    rows = {row.name: row for row in loop.rows}
    for name, ns in (*loop.between_ns.items(), *loop.in_step_ns.items()):
        row = rows.get(name)
        if row is None or name not in _BETWEEN_FIXES or not row.num or not case.is_worth(ns):  # others have a rule
            continue
        where = f" ({row.places[0]})" if row.places else ""
        what = "Starting the DataLoader" if name == "data" else name.capitalize()
        evidence = {"what": name, "times": row.num, "total_ns": row.ns, "per_step_ns": ns}
        each_ns = ns * loop.num_steps / row.num
        longer_ns = row.ns - each_ns * row.num  # the first may open files or compile, so it does not count
        first = (
            f"; the first takes {duration(longer_ns, 3)} longer and is left out" if longer_ns > each_ns / 2 else ""
        )
        has_workers = name != "data" or (case.recording.facts.get("loader") or {}).get("num_workers") != 0
        findings.append(
            Finding(
                sentence=f"{what}{where} takes {duration(ns, 3)} per step on average: {plural(row.num, 'time')} in "
                f"{plural(loop.num_steps, 'step')}, {duration(each_ns, 3)} each{first}.",
                fix=_BETWEEN_FIXES[name] if has_workers else _loader_fix(case, ns),
                saving_ns=ns,
                rows=("between_steps",) if name in loop.between_ns else _IN_STEP,
                upper_bound=True,
                derived="its wall-clock time in the loop, divided by the steps",
                confidence="high" if row.num > 1 else "medium",
                falsified_by="leave it out of a run and compare the throughput",
                evidence=(
                    Evidence("time between steps", [evidence]),
                    Evidence("places in the script", [{"place": place} for place in row.places[:3]]),
                ),
            )
        )
    return findings


_NOISE_FIXES = {
    "data": "give the DataLoader more num_workers or a larger prefetch_factor: every few batches it has none ready",
    "other": "do it less often or in the background: torch.distributed.checkpoint.async_save, evaluation in "
    "another process, metrics kept on the GPU until they are written",
}  # by phase; within a pass or the optimizer the time belongs to training, as with gradient accumulation


@rule
def noisy_steps(case: Case) -> list[Finding]:
    """Is there a slow step at regular intervals, for reasons other than training?"""
    if not case.recording.window("clean"):
        raise Unavailable("The recording has no clean steps: it ended during warm-up.")
    from stepscope.analysis.time.step_times import slow_steps  # a bare trace does without

    found = slow_steps(case.recording)
    if found is None or found.phase not in _NOISE_FIXES or not case.is_worth(found.excess_ns):
        return []
    # Without a DataLoader, the time before a forward may be anything.
    is_data = found.phase == "data" and case.summary.data_is_named
    slowest = max(ns for _, ns in found.slow)
    where = "waiting for data" if is_data else "outside of forward, backward and optimizer"
    rows = [{"step": step, "duration_ns": ns, "phase": found.phase} for step, ns in found.slow]
    finding = Finding(
        sentence=f"Every {found.period} steps, one takes up to {duration(slowest, 3)} (median: "
        f"{duration(found.median_ns, 3)}), mostly {where}. On average, this adds {duration(found.excess_ns, 3)} to "
        f"each of {plural(found.num_steps, 'step')}.",
        fix=_NOISE_FIXES["data" if is_data else "other"],
        saving_ns=found.excess_ns,
        rows=("slow_steps",),
        upper_bound=True,
        derived="the time of these steps above the median, averaged over all steps; the median does not show it",
        confidence="high" if len(found.slow) > 3 else "medium",
        falsified_by="record again; the finding is wrong if other steps are slow, or none",
        evidence=(Evidence("slow steps", rows[:8]),),
    )
    return [finding]


_FIRST_CALL = {"compile": "compiling, loading or planning kernels", "allocator": "allocating memory from the driver"}
_FIRST_CALL_SHARE = 0.1  # of a trace's only step; less may have other causes


@rule
def first_call(case: Case) -> list[Finding]:
    """Is one-time startup cost mistaken for a normal step?"""
    if case.clean_ns is not None:
        return _unsettled(case)
    # With several steps, the first is not among the typical ones.
    return _only_step(case) if case.linked.steps.num == 1 else []


def _unsettled(case: Case) -> list[Finding]:
    from stepscope.analysis.time.step_times import settling

    found = settling(case.recording)
    if found is None or not case.is_worth(found.mean_ns - found.settled_ns):
        return []
    row = {"num_unsettled": found.num_unsettled, "num_steps": found.num_steps, "first_ns": found.first_ns,
           "settled_ns": found.settled_ns, "mean_ns": found.mean_ns, "median_ns": case.step_ns}  # fmt: skip
    num = int((case.recording.facts.get("windows") or {}).get("warmup") or 0) + found.num_unsettled
    were = "was" if found.num_unsettled == 1 else f"{found.num_unsettled} were"
    return one_finding(
        sentence=f"Of {plural(found.num_steps, 'clean step')}, the first {were} still warming "
        f"up: the first took {duration(found.first_ns, 3)}, those in the second half "
        f"{duration(found.settled_ns, 3)} each. The mean ({duration(found.mean_ns, 3)}) therefore includes warm-up.",
        fix=f"stepscope run --warmup {num} --clean {max(20, found.num_steps)} {_script(case)}",
        derived="no time is saved; the times in this recording are too high",
        confidence="medium",
        falsified_by="record with a longer warm-up; the finding is wrong if step times still fall during it",
        evidence=(Evidence("clean steps", [row]),),
    )


def _script(case: Case) -> str:
    """Return the script of a recording with its arguments, as typed after `stepscope run`."""
    command = case.recording.facts.get("command") or {}
    words = [str(word) for word in command.get("argv") or ["train.py"]]
    return safe(shlex.join(["-m", *words] if command.get("module") else words))


def _only_step(case: Case) -> list[Finding]:
    if not case.has_gpu_work:
        return []
    first = case.stalls.filter(pl.col("kind").is_in(list(_FIRST_CALL)))
    first_ns = float(first.select(LENGTH).sum().item()) if first.height else 0.0
    saving_ns = case.host_saving_ns(first)
    if first_ns < _FIRST_CALL_SHARE * case.step_ns or not case.is_worth(saving_ns):
        return []
    kinds = first.group_by("kind").agg(LENGTH.sum()).sort("duration_ns", descending=True)
    parts = " and ".join(f"{duration(ns, 3)} {_FIRST_CALL[kind]}" for kind, ns in kinds.iter_rows())
    return one_finding(
        sentence=f"The trace has only one step, and it looks like the first of a run: it spends {parts} out of "
        f"{duration(case.step_ns, 3)}. Later steps are likely to be faster.",
        fix="torch.profiler.schedule(wait=2, warmup=2, active=3), with prof.step() at the end of each step",
        saving_ns=saving_ns,
        derived="the step replayed without this time; later steps are likely to be shorter by as much",
        confidence="medium",
        falsified_by="trace later steps; the finding is wrong if they spend as long on this",
        places=case.host_places(first),
        evidence=(Evidence("one-time costs", first.select("kind", "op", LENGTH).head(8).to_dicts()),),
    )

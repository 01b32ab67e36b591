"""Questions of the megalodon study that recordings answer: products, schedules, fusion."""

import gzip
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepscope.errors import Unavailable, UsageError
from stepscope.formatting import cell, plural
from stepscope.studies.figures import PEAK, TIME, said, span, table
from stepscope.studies.stored import Recorded, Stored
from stepscope.studies.study import Records, Tables, question, table_of

SUMMARY = ("dtype", "bf16_reduction", "seq_len", "batch_size", "ms_per_step", "peak_mem_gb")
SCHEDULES = ("short", "long")
_NUM_OPS = 40


def summary_csv(stored: Stored) -> str:
    """Return summary.csv with rows added to those it already has; no row is ever removed."""
    from stepscope.render.csv import csv_of

    return appended(stored.folder / "summary.csv", csv_of(table("summary", "Steps", _summary(stored), *SUMMARY)))


def appended(path: Path, content: str) -> str:
    """Return what a CSV file has, and below it those lines of `content` that it does not have yet."""
    header, *lines = content.splitlines()
    kept = (path.read_text(encoding="utf-8").splitlines() if path.is_file() else []) or [header]
    if kept[:1] != [header]:
        raise UsageError(f"{path} has other columns than {header}. Move the file away")
    known = Counter(kept)
    for line in lines:  # two equal rows, such as two that ran out of memory, are two lines
        if known[line] > 0:
            known[line] -= 1
        else:
            kept.append(line)
    return "\n".join(kept) + "\n"


def _summary(stored: Stored) -> Iterator[dict[str, Any]]:
    """Yield one row per point: milliseconds per step and the peak in 10⁹ bytes, or its status."""
    for record in stored.rows("steps").needed():
        time_ns, peak = record[TIME], record[PEAK]
        row = {**record, "batch_size": record["batch"]}
        row["ms_per_step"] = record["status"] if time_ns is None else round(time_ns / 1e6, 4)
        row["peak_mem_gb"] = record["status"] if peak is None else round(peak / 1e9, 6)
        yield {name: row[name] for name in SUMMARY}


def figure_text(name: str) -> Callable[[Stored], str]:
    """Return one figure of the summary, one line per point."""
    names = (*SUMMARY[:4], name)
    return lambda stored: _text("", [{each: str(row[each]) for each in names} for row in _summary(stored)])


def recorded(stored: Stored) -> Iterator[tuple[str, Recorded]]:
    """Yield the recordings with their names: schedule, path, length."""
    for schedule in SCHEDULES:
        for one in stored.recordings(schedule):
            if one.status == "ok" and one.folder is not None:
                yield f"{schedule}_{one.axes['ema']}_{one.axes['seq_len']}", one


def key_averages(stored: Stored) -> dict[str, str]:
    """Return tables by op of every recording: device time (host time on a CPU), and memory."""
    made = {}
    for name, one in recorded(stored):
        made[f"key_averages_{name}_device_time.txt"] = _by_time(one)
        made[f"key_averages_{name}_memory.txt"] = _by_memory(one)
    if not made:
        raise Unavailable("nothing was recorded")
    return made


def traces(stored: Stored) -> dict[str, bytes]:
    """Return the trace of every window, by the number of its last step."""
    made = {}
    for name, one in recorded(stored):
        assert one.folder is not None
        for number, window in windows_of(one):
            made[f"{name}/speed_step{number}.json.gz"] = gzip.decompress((one.folder / window["file"]).read_bytes())
    if not made:
        raise Unavailable("no trace was recorded")
    return made


def windows_of(one: Recorded) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the trace windows of a recording: the number of the last step, and the facts of the window."""
    recording = one.source.recording
    first = recording.facts.get("trace")
    if not first:
        return
    steps = [sample.step for sample in recording.window("trace")]
    for window in (first, *first.get("repeated", ())):
        traced, steps = steps[: window["num_steps"]], steps[window["num_steps"] :]
        yield traced[-1], window


def _by_time(one: Recorded) -> str:
    account = one.source.analysis.ranks[0]
    num_steps = max(1, account.steps.height)
    names = ["host_self_ns", "host_total_ns"]
    if account.ops.head(_NUM_OPS)["device_self_ns"].sum():
        names = ["device_self_ns", "device_total_ns", *names]
    whole = max(1, account.ops[names[0]].sum())
    rows = [
        {"op": "(no op)" if row["op"] is None else row["op"],
         **{name: row[name] / num_steps for name in ("num_calls", *names)}, "share": row[names[0]] / whole}
        for row in account.ops.head(_NUM_OPS).to_dicts()
    ]  # fmt: skip
    return _text(f"One step by op, {num_steps} steps of the first trace window, {account.ops.height} ops", rows)


def _by_memory(one: Recorded) -> str:
    from stepscope.analysis.memory.by_owner import memory_by_op

    ops = memory_by_op(one.source.allocations)
    names = ("op", "num_allocations", "allocated_bytes", "largest_bytes", "at_peak_bytes")
    rows = [{name: getattr(op, name) for name in names} for op in ops[:_NUM_OPS]]
    peak = cell("peak_bytes", one.source.memory.account.peak_bytes)
    return _text(f"One step by op, by bytes allocated; the peak is {peak}, {len(ops)} ops", rows)


def _text(title: str, rows: list[dict[str, Any]]) -> str:
    """Return rows as aligned text, however wide."""
    from stepscope.render.terminal import table_lines

    lines = table_lines(table("", "", rows, *(rows[0] if rows else ())), len(rows), width=1 << 20)
    return "\n".join([title, "", *lines] if title else lines) + "\n"


PLAYBOOK_SCHEDULES = ((1, 1, 2, 1), (1, 1, 1, 1), (2, 3, 3, 2))
"""Wait, warm-up, active, repeat in the playbook's commands."""
SPAN = ("module", "phase", "num_ops", "num_kernels", "host_ns", "device_ns", "uncovered_ns")
CHAIN = ("num_chains", "num_kernels", "duration_ns", "bytes", "fused_bytes")

PUBLISHED = {512: 1.25}  # The playbook's gain from bf16 reduction. At 2048 tokens it says "negligible impact".


@table_of(
    "gemm-share", "Matrix products in a step", is_optional=True,
    note="speedup_if_free: the most that another way to sum products can bring",
)  # fmt: skip
def gemm_share(stored: Stored) -> Records:
    for one in stored.recordings("short"):
        account, step = one.source.analysis.ranks[0], one.source.summary.step_ns
        total, gemm = (int(account.gemm_share[name].sum()) for name in ("total_ns", "gemm_ns"))
        if total and step is not None:
            share = min(1.0, gemm / max(1, account.steps.height) / step.median)
            row = {"seq_len": one.axes["seq_len"], "step_ns": step.median, "gpu_work_share": gemm / total}
            row |= {"step_share": share, "speedup_if_free": 1 / max(1e-9, 1 - share)}
            yield row | {"published_speedup": PUBLISHED.get(one.axes["seq_len"])}


@table_of("schedules", "Steps asked for and steps traced")
def schedules(stored: Stored) -> Records:
    for name, one in recorded(stored):
        steps, traced = one.source.recording.facts["windows"], [w["num_steps"] for _, w in windows_of(one)]
        repeat = max(1, steps["trace_warmup"])
        row = {"schedule": name, "wait": steps["warmup"] + steps["clean"], "warm_up": 1}
        row |= {"active": steps["trace"] // repeat, "repeat": repeat, "num_asked": steps["trace"]}
        yield row | {"num_traced": sum(traced), "num_windows": len(traced)}


@table_of("windows", "Every trace window", note="slowdown: traced step ÷ clean step")
def windows(stored: Stored) -> Records:
    for name, one in recorded(stored):
        clean = one.source.summary.step_ns
        for last_step, window in windows_of(one):
            num, step_ns = window["num_steps"], window["window_ns"] / window["num_steps"]
            row = {"schedule": name, "last_step": last_step, "num_steps": num}
            row["num_kernels"] = window["num_kernels"] / num if window["num_kernels"] else None
            row |= {"traced_step_ns": step_ns, "clean_step_ns": clean.median if clean else None}
            yield row | {"slowdown": step_ns / clean.median if clean else None}


@table_of(
    "playbook-schedules", "What the playbook's loop runs of its schedules",
    note="it runs wait + warm-up + active · repeat steps; a cycle needs wait + warm-up + active",
)  # fmt: skip
def playbook_schedules(_stored: Stored) -> Records:
    for wait, warm_up, active, repeat in PLAYBOOK_SCHEDULES:
        run, cycle = wait + warm_up + active * repeat, wait + warm_up + active
        row = {"wait": wait, "warm_up": warm_up, "active": active, "repeat": repeat, "num_run": run}
        yield row | {"num_needed": cycle * repeat, "num_whole_cycles": min(repeat, run // cycle)}


@question(
    "Did every cycle of the schedule come, and does it matter?", schedules, windows, playbook_schedules,
    claim="Its loop runs 11 of the 16 steps its schedule needs: cycle 2 of 2 never ends.",
)  # fmt: skip
def schedule(tables: Tables) -> str:
    rows = tables["schedules"].needed()
    asked, came, repeat, num = (sum(r[n] for r in rows) for n in ("num_asked", "num_traced", "repeat", "num_windows"))
    clean = [row["clean_step_ns"] for row in tables["windows"] if row["clean_step_ns"]]
    apart = f"; clean steps take {span('_ns', clean)} by process" if clean else ""
    return f"{came} of {plural(asked, 'step')} were traced, in {num} of {plural(repeat, 'window')}{apart}."


def longest(stored: Stored) -> Recorded:
    known = [one for _, one in recorded(stored)]
    if not known:
        raise Unavailable("nothing was recorded")
    return max(known, key=lambda one: (one.axes["seq_len"], one.source.summary.num_clean))


@table_of(
    "spans", "Host spans per step", " ".join(SPAN), num_shown=20,
    note="traced step: the profiler slows the host, not the GPU",
)  # fmt: skip
def spans(stored: Stored) -> Records:
    from stepscope.analysis.structure.host_spans import host_spans

    found = host_spans(longest(stored).source.case.linked).to_dicts()
    on_gpu = any(row["num_kernels"] for row in found)  # on a CPU ops compute on the host
    names = SPAN if on_gpu else (*SPAN[:3], "host_ns")
    named = ({**row, "module": row["module"] or "(no module)"} for row in found if row["host_ns"] >= 1000)
    return [{name: row[name] for name in names} for row in named]


@table_of("chains", "Chains that one kernel could do, per step")
def chains(stored: Stored) -> Records:
    from stepscope.analysis.memory.module_tree import starred

    case = longest(stored).source.case
    modules = dict(case.all_work.select("event", "module").iter_rows())
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for chain in case.segments.to_dicts():
        if chain["num_kernels"] < 2:
            continue
        module = starred(modules.get(chain["events"][0])) or "(no module)"
        ops = ", ".join(op.removeprefix("aten::") for op in chain["ops"])
        row = groups.setdefault((module, chain["phase"], ops), dict.fromkeys(CHAIN, 0.0))
        for name, value in zip(CHAIN, (1, *(chain[name] for name in CHAIN[1:]))):
            row[name] += value / case.num_steps
    rows = [dict(zip(("module", "phase", "ops"), key)) | row for key, row in groups.items()]
    return sorted(rows, key=lambda row: -row["duration_ns"])


@question(
    "Which spans of the host are candidates for fusion?", spans, chains,
    claim="Suspects timestep_norm of taking the GPU's time.",
)  # fmt: skip
def fusion(tables: Tables) -> str:
    rows = [row for row in tables["spans"] if row["module"] != "(no module)"]
    if not rows:
        raise Unavailable("the trace has no modules")
    first = rows[0]
    work: dict[str, float] = {}
    if "device_ns" not in first:
        share = first["host_ns"] / sum(row["host_ns"] for row in tables["spans"])
        return f"{said('share', share)} of the host time is in the {first['phase']} of {first['module']} (on a CPU)."
    for row in tables["spans"]:
        work[row["module"]] = work.get(row["module"], 0.0) + row["device_ns"]
    most = max(work, key=lambda module: work[module])
    saved = sum(row["num_kernels"] - row["num_chains"] for row in tables["chains"])
    return (
        f"{sum(row['uncovered_ns'] > 0 for row in rows)} of {len(rows)} spans keep the host busy longer than the "
        f"GPU, most the {first['phase']} of {first['module']} ({said('_ns', first['host_ns'])} to launch "
        f"{said('_ns', first['device_ns'])} of work); {most} has {said('share', work[most] / sum(work.values()))} of "
        f"the GPU work, and fusing every chain would save {saved:,.0f} launches per step."
    )

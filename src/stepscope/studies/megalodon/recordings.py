"""Questions of the megalodon study that recordings answer: products, schedules, fusion."""

from __future__ import annotations

from typing import Any

from stepscope.errors import Unavailable
from stepscope.formatting import plural
from stepscope.studies.figures import said, span
from stepscope.studies.megalodon.files import recorded, windows_of
from stepscope.studies.stored import Recorded, Stored
from stepscope.studies.study import Records, Tables, question, table_of

PLAYBOOK_SCHEDULES = ((1, 1, 2, 1), (1, 1, 1, 1), (2, 3, 3, 2))
"""Wait, warm-up, active, repeat in the playbook's commands."""
SPAN = ("module", "phase", "num_ops", "num_kernels", "host_ns", "device_ns", "uncovered_ns")
CHAIN = ("num_chains", "num_kernels", "duration_ns", "bytes", "fused_bytes")

PUBLISHED = {512: 1.25}
"""The playbook's gain from bf16 reduction. At 2048 tokens it says "negligible impact"."""


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
    """Return the recording of the longest sequence."""
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
    for chain in case.chains.to_dicts():
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

"""The answers of the study `megalodon` that its recordings give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from stepscope.document.model import Text
from stepscope.errors import Unavailable
from stepscope.formatting import plural
from stepscope.studies.figures import said, table
from stepscope.studies.megalodon.files import recorded, windows_of
from stepscope.studies.stored import Recorded, Stored

PUBLISHED_SCHEDULES = ((1, 1, 2, 1), (1, 1, 1, 1), (2, 3, 3, 2))
"""Wait, warm-up, active, repeat: those of its commands."""
SUSPECTED = "timestep_norm"
"""The module that the playbook suspects of taking the GPU's time."""
TIME = "time_ns"
_CHAIN = ("num_chains", "num_kernels", "duration_ns", "bytes", "fused_bytes")


def schedule(stored: Stored) -> Iterator[Any]:
    """Steps that were asked for and steps that came, window by window; a short schedule beside a long one."""
    schedules: list[dict[str, Any]] = []
    traced: list[dict[str, Any]] = []
    measured: dict[int, dict[str, Any]] = {}
    for name, one in recorded(stored):
        summary, steps = one.source.card.summary, one.source.card.recording.facts["windows"]
        windows = list(windows_of(one))
        repeat = max(1, steps["trace_warmup"])
        row = {"schedule": name, "wait": steps["warmup"] + steps["clean"], "warm_up": 1}
        row |= {"active": steps["trace"] // repeat, "repeat": repeat, "num_asked": steps["trace"]}
        row |= {"num_traced": sum(window["num_steps"] for _, window in windows), "num_windows": len(windows)}
        schedules.append(row)
        for last_step, window in windows:
            step_ns = window["window_ns"] / window["num_steps"]
            row = {"schedule": name, "last_step": last_step, "num_steps": window["num_steps"]}
            if window["num_kernels"]:
                row["num_kernels"] = window["num_kernels"] / window["num_steps"]
            row |= {"traced_step_ns": step_ns, "clean_step_ns": None, "slowdown": None}
            if summary.step_ns is not None:
                clean_ns = summary.step_ns.median
                row |= {"clean_step_ns": clean_ns, "slowdown": step_ns / clean_ns}
            traced.append(row)
        if summary.step_ns is not None:
            steps_ns = [sample.wall_ns for sample in one.source.card.recording.window("clean")]
            measured.setdefault(one.axes["seq_len"], {})[name.split("_")[0]] = summary.step_ns, steps_ns
    if not schedules:
        raise Unavailable("nothing was recorded")
    asked, came, repeat, num = (
        sum(row[name] for row in schedules) for name in ("num_asked", "num_traced", "repeat", "num_windows")
    )
    published = _published_schedules()
    cut = [row for row in published if row["num_whole_cycles"] < row["repeat"]]
    sentences = [
        f"{came} of the {plural(asked, 'step')} that were to be traced were traced, in {num} of "
        f"{plural(repeat, 'window')}.",
        *(
            f"The playbook's loop runs {row['num_run']} steps of a schedule that needs {row['num_needed']}: cycle "
            f"{row['num_whole_cycles'] + 1} of {row['repeat']} never comes to its end."
            for row in cut
        ),
    ]
    for length, known in measured.items():
        if len(known) > 1:
            (short, _), (long, steps_ns) = known["short"], known["long"]
            first_ns = median(steps_ns[: short.num_samples])
            sentences.append(
                f"At {length} tokens the clean step is {said(TIME, short.median)} by {short.num_samples} steps of "
                f"one process and {said(TIME, long.median)} by {long.num_samples} of another: two processes are "
                f"{said('share', abs(short.median / long.median - 1))} apart, which says nothing of the schedules. "
                f"Inside the longer one the first {short.num_samples} clean steps have a median of "
                f"{said(TIME, first_ns)}, all {long.num_samples} of {said(TIME, median(steps_ns))}, and p90 − p10 is "
                f"{said(TIME, long.p90 - long.p10)}."
            )
    yield Text(" ".join(sentences))
    yield table("schedules", "Steps that were to come, and that came", schedules, *schedules[0])
    if traced:
        note = "slowdown: a traced step ÷ a clean one"
        yield table("windows", "Every trace window", traced, *traced[0], note=note)
    note = "it ran wait + warm-up + active · repeat steps; a cycle has wait + warm-up + active"
    title = "What the playbook's loop runs of its schedules"
    yield table("playbook-schedules", title, published, *published[0], note=note)


def _published_schedules() -> list[dict[str, int]]:
    rows = []
    for wait, warm_up, active, repeat in PUBLISHED_SCHEDULES:
        run, cycle = wait + warm_up + active * repeat, wait + warm_up + active
        row = {"wait": wait, "warm_up": warm_up, "active": active, "repeat": repeat, "num_run": run}
        rows.append(row | {"num_needed": cycle * repeat, "num_whole_cycles": min(repeat, run // cycle)})
    return rows


def gemm_share(stored: Stored, published: Mapping[int, float]) -> Iterator[Any]:
    """How much of a step matrix products can change at all; whether a published gain, by length, can be of them."""
    for one in stored.recordings("short"):
        if one.status != "ok":
            continue
        account, summary = one.source.analysis.ranks[0], one.source.card.summary
        total, gemm = (int(account.gemm_share[name].sum()) for name in ("total_ns", "gemm_ns"))
        if not total or summary.step_ns is None:
            continue
        gemm_ns = gemm / max(1, account.steps.height)
        share = min(1.0, gemm_ns / summary.step_ns.median)
        at_most = 1 / max(1e-9, 1 - share)
        gain = published.get(one.axes["seq_len"])
        more = ""
        if gain is not None and gain > at_most:
            more = (
                f" The playbook's {gain:.2f} times at this length is more than that: it cannot be of the products in "
                "such a step."
            )
        yield Text(
            f"At {one.axes['seq_len']} tokens matrix products are {said('share', gemm / total)} of the GPU's work "
            f"and {said('share', share)} of a clean step of {said(TIME, summary.step_ns.median)}: were they free, "
            f"the step would be {at_most:.2f} times as fast; how they are summed can bring no more.{more}"
        )


def fusion(stored: Stored) -> Iterator[Any]:
    """Modules in which the host is busier than the GPU, and chains of ops that one kernel could do."""
    from stepscope.analysis.structure.host_spans import host_spans

    one = _longest(stored)
    every = host_spans(one.source.case.linked).to_dicts()
    names = ["module", "phase", "num_ops", "num_kernels", "host_ns", "device_ns", "uncovered_ns"]
    length = one.axes["seq_len"]
    on_gpu = any(span["num_kernels"] for span in every)
    spans = [span | {"module": span["module"] or "(no module)"} for span in every if span["host_ns"] >= 1000]
    inside = [span for span in spans if span["module"] != "(no module)"]
    if not inside:
        raise Unavailable("the trace has no modules")
    first, host_ns = inside[0], sum(span["host_ns"] for span in spans)
    note = "of a traced step: the profiler slows the host, not the GPU"
    if on_gpu:
        note += "; (no module) in the backward has the wait of the thread that called it"
        bound = [span for span in inside if span["uncovered_ns"] > 0]
        yield Text(
            f"At {length} tokens, in a traced step, in which the profiler slows the host and not the GPU, the host "
            f"takes longer than the GPU in {len(bound)} of {len(inside)} spans. Most in the {first['phase']} of "
            f"{first['module']}: {first['num_ops']:.0f} ops launch {first['num_kernels']:.0f} kernels, "
            f"{said(TIME, first['device_ns'])} of work that takes the host {said(TIME, first['host_ns'])}. "
            f"{_most_work(spans)}"
        )
    else:
        names = [name for name in names if name not in ("num_kernels", "device_ns", "uncovered_ns")]
        yield Text(
            f"It ran on a CPU, where ops compute on the host: no span is without work. Most of the host's time is in "
            f"the {first['phase']} of {first['module']}, {said('share', first['host_ns'] / host_ns)} of it in "
            f"{first['num_ops']:.0f} ops a step, {said(TIME, first['host_ns'] / max(1, first['num_ops']))} each."
        )
    yield table("spans", "Spans of the host, a step", spans, *names, num_shown=20, note=note)
    found = [each for each in one.source.diagnosis.findings if each.id in ("unfused_elementwise", "launch_bound")]
    for finding in found:
        yield Text(finding.sentence)
    chains = _chain_rows(one)
    yield Text(_saved(chains, every))
    title = "Chains that one kernel could do, a step"
    yield table("chains", title, chains, "module", "phase", "ops", *_CHAIN)


def _saved(chains: list[dict[str, Any]], spans: list[dict[str, Any]]) -> str:
    """What one kernel for each chain would spare the host, and the GPU at the most."""
    num_kernels, num_chains, chained_ns = (
        sum(row[name] for row in chains) for name in ("num_kernels", "num_chains", "duration_ns")
    )
    num_all, device_ns = (sum(span[name] for span in spans) for name in ("num_kernels", "device_ns"))
    return (
        f"One kernel for each chain would save {num_kernels - num_chains:,.0f} of {num_all:,.0f} launches a step, "
        f"but less than {said(TIME, chained_ns)} of {said(TIME, device_ns)} of the GPU's work."
    )


def _most_work(spans: list[dict[str, Any]]) -> str:
    """The module with the most GPU work, all phases together."""
    device_ns: dict[str, float] = {}
    for span in spans:
        device_ns[span["module"]] = device_ns.get(span["module"], 0) + span["device_ns"]
    name, whole = max(device_ns, key=lambda module: device_ns[module]), sum(device_ns.values())
    suspected = ", which the playbook suspected" if name.endswith(SUSPECTED) else ""
    return (
        f"The most GPU work is in {name}{suspected}: {said(TIME, device_ns[name])} of {said(TIME, whole)}, "
        f"{said('share', device_ns[name] / whole)}."
    )


def _chain_rows(one: Recorded) -> list[dict[str, Any]]:
    """Chains of elementwise kernels by the module of their first: Unavailable without GPU work."""
    from stepscope.analysis.memory.module_tree import starred

    case = one.source.case
    modules = dict(case.all_work.select("event", "module").iter_rows())
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for chain in case.chains.to_dicts():
        module = starred(modules.get(chain["events"][0])) or "(no module)"
        ops = ", ".join(op.removeprefix("aten::") for op in chain["ops"])
        row = groups.setdefault((module, chain["phase"], ops), dict.fromkeys(_CHAIN, 0.0))
        for name, value in zip(_CHAIN, (1, *(chain[name] for name in _CHAIN[1:]))):
            row[name] += value / case.num_steps
    if not groups:
        raise Unavailable("no chain of three elementwise kernels or more is in the trace")
    rows = [dict(zip(("module", "phase", "ops"), key)) | row for key, row in groups.items()]
    return sorted(rows, key=lambda row: -row["duration_ns"])


def _longest(stored: Stored) -> Recorded:
    known = [one for _, one in recorded(stored)]
    if not known:
        raise Unavailable("nothing was recorded")
    return max(known, key=lambda one: (one.axes["seq_len"], one.source.card.summary.num_clean))

"""Does torch.compile fall apart into pieces, or go without CUDA graphs?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.whatif import stretches
from stepscope.errors import Unavailable
from stepscope.findings.compile_log import compile_entries, compile_report, count_of
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import Case

_MANY_SIZES = 8
"""CUDA graphs of one function, one for each set of sizes: more, and most steps record instead of replaying."""


def check(case: Case) -> list[Finding]:
    breaks = sorted(compile_entries(case, "graph_breaks"), key=count_of, reverse=True)
    return [*_breaks(case, breaks), *_sizes(compile_report(case).get("cuda_graphs"))]


def _breaks(case: Case, breaks: list[dict[str, Any]]) -> list[Finding]:
    try:
        regions = case.compiled_regions
        entries = case.region_entries(all_but_first=bool(breaks))
    except Unavailable:
        if not breaks and case.recording.compiler is None:
            return []  # nothing was compiled
        return [_told(case, breaks, None, "")] if breaks else []
    if breaks and regions.is_empty():
        # A break within a loop cannot be gone on from: torch then gives the whole function up.
        return [_told(case, breaks, None, "no compiled code runs in the traced steps: the function is run eagerly")]
    saving_ns = case.saving_ns(Change(host=stretches(entries))) if entries.height else 0.0
    if not case.is_worth(saving_ns):
        return []
    entered_ns = float((entries["end_ns"] - entries["start_ns"]).sum()) / case.num_steps
    seen = (
        f"{plural(regions.height / case.num_steps, 'compiled region')} are called a step, and the host spends "
        f"{duration(entered_ns, 3)} of {duration(case.step_ns, 3)} on getting into the later ones"
    )
    return [replace(_told(case, breaks, saving_ns, seen), places=case.host_places(entries))]


def _told(case: Case, breaks: list[dict[str, Any]], saving_ns: float | None, seen: str) -> Finding:
    parts = [seen] if seen else []
    if breaks:
        total = sum(map(count_of, breaks))
        where, why = breaks[0].get("place"), str(breaks[0].get("reason")).rstrip(".")
        parts.insert(0, f"torch.compile broke the graph {plural(total, 'time')}, most often at {where}: {why}")
    else:
        is_nested = bool(case.compiled_regions["is_nested"].any())
        parts.insert(
            0,
            "torch.compile broke the graph: regions call one another"
            if is_nested
            else "torch.compile made pieces of the model, called in a row: the graph breaks within a loop, or each "
            "was compiled by itself",
        )
    rows = [{"reason": one.get("reason"), "place": one.get("place"), "count": count_of(one)} for one in breaks[:8]]
    fullgraph = "torch.compile(model, fullgraph=True)"
    fix = f"TORCH_LOGS=graph_breaks python train.py  # names each place; {fullgraph} fails there"
    if breaks:
        fix = f"change {breaks[0].get('place')}, or take it out of the model; {fullgraph} says whether any is left"
    return Finding(
        sentence="; ".join(parts).rstrip(".") + ".",
        fix=fix,
        saving_ns=saving_ns,
        derived="the step replayed without the host's time for getting from one region into the next, up to the "
        "first op of its code; what fusing across the break would save, and CUDA graphs of the whole, is not counted"
        if saving_ns is not None
        else "told by torch.compile; what the step would take compiled, no trace of this run can say",
        confidence="high" if breaks and saving_ns is not None else "medium",
        falsified_by="torch.compile(model, fullgraph=True) that compiles",
        evidence=(Evidence("graph breaks", rows),) if rows else (Evidence("compiled regions", _by_name(case)),),
    )


def _by_name(case: Case) -> list[dict[str, Any]]:
    table = case.compiled_regions.group_by("name", "is_nested").len("num_calls")
    return table.sort("num_calls", "name", descending=[True, False]).head(8).to_dicts()


def _sizes(graphs: object) -> list[Finding]:
    num_sizes = graphs.get("num_distinct_sizes") if isinstance(graphs, dict) else None
    if not isinstance(graphs, dict) or not isinstance(num_sizes, int) or num_sizes <= _MANY_SIZES:
        return []
    return [
        Finding(
            sentence=f"CUDA graphs were recorded for {num_sizes} different sizes of one compiled function, "
            f"{graphs.get('num_recorded')} graphs in all: each new size records one, and keeps its memory.",
            fix="pad inputs to a few sizes; or torch._inductor.config.triton.cudagraph_skip_dynamic_graphs = True",
            derived="counted by Inductor; what a recording costs is in the steps that compile",
            confidence="medium",
            falsified_by="a number of sizes that stands still after the first steps",
            evidence=(Evidence("CUDA graphs", [dict(graphs)]),),
        )
    ]

"""Does torch.compile split the model into pieces, or fail to use CUDA graphs?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stepscope.findings.compile_log import compile_entries, compile_report, count_of
from stepscope.findings.rule import (
    LENGTH,
    Case,
    Change,
    Evidence,
    Finding,
    Unavailable,
    cost_text,
    stretches,
    total_ns,
)
from stepscope.formatting import plural

_MANY_SIZES = 8  # CUDA graphs of one function; with more, most steps record a graph instead of replaying one


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
        return [_finding(case, breaks, None, "")] if breaks else []
    if breaks and regions.is_empty():
        # torch cannot resume after a break within a loop: it runs the whole function eagerly.
        return [_finding(case, breaks, None, "No compiled code runs in the traced steps: the function runs eagerly")]
    saving_ns = case.saving_ns(Change(host=stretches(entries))) if entries.height else 0.0
    if not case.is_worth(saving_ns):
        return []
    seen = (
        f"Each step calls {plural(regions.height / case.num_steps, 'compiled region')}, and entering the later ones "
        f"takes the host {cost_text(case, total_ns(case, entries, LENGTH))}"
    )
    return [replace(_finding(case, breaks, saving_ns, seen), places=case.host_places(entries))]


def _finding(case: Case, breaks: list[dict[str, Any]], saving_ns: float | None, seen: str) -> Finding:
    parts = [seen] if seen else []
    if breaks:
        total = sum(map(count_of, breaks))
        where, why = breaks[0].get("place"), str(breaks[0].get("reason")).rstrip(".")
        parts.insert(0, f"torch.compile broke the graph {plural(total, 'time')}, most often at {where} ({why})")
    else:
        is_nested = bool(case.compiled_regions["is_nested"].any())
        parts.insert(
            0,
            "torch.compile broke the graph: compiled regions call each other"
            if is_nested
            else "torch.compile split the model into pieces called in a row: the graph breaks within a loop, or each "
            "piece was compiled separately",
        )
    rows = [{"reason": one.get("reason"), "place": one.get("place"), "count": count_of(one)} for one in breaks[:8]]
    fullgraph = "torch.compile(model, fullgraph=True)"
    fix = f"TORCH_LOGS=graph_breaks python train.py  # lists each place; {fullgraph} fails there"
    if breaks:
        fix = f"change {breaks[0].get('place')}, or move it out of the model; {fullgraph} shows whether any are left"
    return Finding(
        sentence=". ".join(parts).rstrip(".") + ".",
        fix=fix,
        saving_ns=saving_ns,
        derived="the step replayed without the host's time between one region and the first op of the next; savings "
        "from fusing across the break or from CUDA graphs are not counted"
        if saving_ns is not None
        else "reported by torch.compile; the trace does not show how fast the step would be compiled",
        confidence="high" if breaks and saving_ns is not None else "medium",
        falsified_by="use torch.compile(model, fullgraph=True); the finding is wrong if it compiles",
        evidence=(Evidence("graph breaks", rows),) if rows else (Evidence("compiled regions", _by_name(case)),),
    )


def _by_name(case: Case) -> list[dict[str, Any]]:
    table = case.compiled_regions.group_by("name", "is_nested").len("num_calls")
    return table.sort("num_calls", "name", descending=[True, False]).head(8).to_dicts()


def _sizes(graphs: object) -> list[Finding]:
    num_sizes = graphs.get("num_distinct_sizes") if isinstance(graphs, dict) else None
    if not isinstance(graphs, dict) or not isinstance(num_sizes, int) or num_sizes <= _MANY_SIZES:
        return []
    finding = Finding(
        sentence=f"CUDA graphs were recorded for {num_sizes} different sizes of one compiled function, "
        f"{graphs.get('num_recorded')} graphs in total. Each new size records another graph and keeps its memory.",
        fix="pad inputs to a few sizes; or torch._inductor.config.triton.cudagraph_skip_dynamic_graphs = True",
        derived="counted by Inductor; the steps that compile include the cost of recording",
        confidence="medium",
        falsified_by="train on; the finding is wrong if the number of sizes stops growing after the first steps",
        evidence=(Evidence("CUDA graphs", [dict(graphs)]),),
    )
    return [finding]

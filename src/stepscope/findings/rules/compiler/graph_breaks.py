"""Does torch.compile split the model into pieces, or fail to use CUDA graphs?"""

from __future__ import annotations

from typing import Any

from stepscope.findings.compile_log import compile_entries, compile_report, count_of
from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, one_finding, plural

_MANY_SIZES = 8  # CUDA graphs of one function; with more, most steps record a graph instead of replaying one


def check(case: Case) -> list[Finding]:
    breaks = sorted(compile_entries(case, "graph_breaks"), key=count_of, reverse=True)
    return [*_breaks(case, breaks), *_sizes(compile_report(case).get("cuda_graphs"))]


def _breaks(case: Case, breaks: list[dict[str, Any]]) -> list[Finding]:
    try:
        regions = case.compiled_regions
        entries = case.region_entries(all_but_first=bool(breaks))
    except Unavailable:
        # Without a recording, this is Unavailable; without breaks, nothing is wrong or nothing was compiled.
        return _broken(case, breaks, None, "") if case.recording and breaks else []
    if breaks and regions.is_empty():
        # torch cannot resume after a break within a loop: it runs the whole function eagerly.
        return _broken(case, breaks, None, "No compiled code runs in the traced steps: the function runs eagerly")
    saving_ns = case.host_saving_ns(entries)
    if not case.is_worth(saving_ns):
        return []
    seen = (
        f"Each step calls {case.number_text(regions, 'compiled region')}, and entering the later ones "
        f"takes the host {case.cost_text(entries)}"
    )
    return _broken(case, breaks, saving_ns, seen, case.host_places(entries))


def _broken(
    case: Case, breaks: list[dict[str, Any]], saving_ns: float | None, seen: str, places: Any = ()
) -> list[Finding]:
    fullgraph = "torch.compile(model, fullgraph=True)"
    derived = "reported by torch.compile; the trace does not show how fast the step would be compiled"
    if saving_ns is not None:
        derived = (
            "the step replayed without the host's time between one region and the first op of the next; savings "
            "from fusing across the break or from CUDA graphs are not counted"
        )
    if breaks:
        place, why = breaks[0].get("place"), str(breaks[0].get("reason")).rstrip(".")
        total = plural(sum(map(count_of, breaks)), "time")
        what = f"torch.compile broke the graph {total}, most often at {place} ({why})"
        fix = f"change {place}, or move it out of the model; {fullgraph} shows whether any are left"
        rows = [
            {"reason": one.get("reason"), "place": one.get("place"), "count": count_of(one)} for one in breaks[:8]
        ]
        evidence = Evidence("graph breaks", rows)
    else:
        what = (
            "torch.compile split the model into pieces called in a row: the graph breaks within a loop, or each "
            "piece was compiled separately"
        )
        if case.compiled_regions["is_nested"].any():
            what = "torch.compile broke the graph: compiled regions call each other"
        fix = f"TORCH_LOGS=graph_breaks python train.py  # lists each place; {fullgraph} fails there"
        regions = case.compiled_regions.group_by("name", "is_nested").len("num_calls")
        largest = regions.sort("num_calls", "name", descending=[True, False]).head(8)
        evidence = Evidence("compiled regions", largest.to_dicts())
    return one_finding(
        sentence=". ".join(filter(None, (what, seen))).rstrip(".") + ".",
        fix=fix,
        saving_ns=saving_ns,
        derived=derived,
        confidence="high" if breaks and saving_ns is not None else "medium",
        falsified_by="use torch.compile(model, fullgraph=True); the finding is wrong if it compiles",
        places=places,
        evidence=(evidence,),
    )


def _sizes(graphs: object) -> list[Finding]:
    sizes = graphs.get("num_distinct_sizes") if isinstance(graphs, dict) else None
    if not isinstance(graphs, dict) or not isinstance(sizes, int) or sizes <= _MANY_SIZES:
        return []
    return one_finding(
        sentence=f"CUDA graphs were recorded for {sizes} different sizes of one compiled function, "
        f"{graphs.get('num_recorded')} graphs in total. Each new size records another graph and keeps its memory.",
        fix="pad inputs to a few sizes; or torch._inductor.config.triton.cudagraph_skip_dynamic_graphs = True",
        derived="counted by Inductor; the steps that compile include the cost of recording",
        confidence="medium",
        falsified_by="train on; the finding is wrong if the number of sizes stops growing after the first steps",
        evidence=(Evidence("CUDA graphs", [dict(graphs)]),),
    )

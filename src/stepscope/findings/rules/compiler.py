"""Rules about torch.compile: graph breaks, recompiles, and compiling that does not pay off."""

import re
from collections import Counter
from dataclasses import replace
from statistics import median
from typing import Any

import polars as pl

from stepscope.analysis.compiler.compile_summary import split_guard
from stepscope.analysis.compiler.compiled_regions import entering
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.errors import if_available
from stepscope.findings.rule import LENGTH, Case, Evidence, Finding, Unavailable, count_of, entries, one_finding, rule
from stepscope.findings.rules.fusion import fusible
from stepscope.formatting import duration, plural
from stepscope.session.case import WORTH_SHARE


@rule
def compile_not_amortized(case: Case) -> list[Finding]:
    """Did torch.compile take longer than the run could save?"""
    recording, report = case.recording, case.compile_report
    if not report.get("num_compiles"):
        return []
    seconds, step_ns = report.get("compile_seconds"), case.clean_ns
    if not isinstance(seconds, (int, float)) or not step_ns:
        raise Unavailable("The recording has no clean steps to compare compile time with.")
    if recording.status != "finished" or (recording.facts.get("command") or {}).get("exit_after"):
        raise Unavailable("The run was cut short, so its total number of steps is unknown. Record a whole run.")
    num_steps = len(recording.samples)
    stepping_s = num_steps * step_ns / 1e9
    # If compiling halves the step, it saves as much time as all steps took.
    if seconds <= stepping_s:
        return []
    enough = round(seconds * 1e9 / step_ns)
    row = {"compile_seconds": seconds, "num_compiles": report.get("num_compiles"), "num_steps": num_steps,
           "step_ns": step_ns, "first_steps_ns": list(case.summary.warmup_ns[:4])}  # fmt: skip
    return one_finding(
        sentence=f"torch.compile took {seconds:.0f} s, but the {plural(num_steps, 'step')} of the run took only "
        f"{stepping_s:.1f} s ({duration(step_ns, 3)} each). Even if it makes every step twice as fast, it pays off "
        f"only after {plural(enough, 'step')}.",
        fix="do not compile runs this short; or compile one block, for block in model.blocks: block.compile(), "
        "and keep the cache: TORCHINDUCTOR_CACHE_DIR=/a/folder/that/stays",
        derived="compile time compared with the clean steps of the run; the fix does not make steps faster",
        confidence="high" if seconds > 2 * stepping_s else "medium",
        falsified_by="time an eager step; the finding is wrong if it takes more than twice as long as a compiled "
        "one, or if the run is usually longer",
        evidence=(Evidence("compile time", [row]),),
    )


_MANY_SIZES = 8  # CUDA graphs of one function; with more, most steps record a graph instead of replaying one


@rule
def graph_breaks(case: Case) -> list[Finding]:
    """Does torch.compile split the model into pieces, or fail to use CUDA graphs?"""
    breaks = sorted(entries(case.compile_report, "graph_breaks"), key=count_of, reverse=True)
    return [*_breaks(case, breaks), *_sizes(case.compile_report.get("cuda_graphs"))]


def _breaks(case: Case, breaks: list[dict[str, Any]]) -> list[Finding]:
    try:
        regions = case.compiled_regions
        entries = case.within(entering(case.linked, regions, all_but_first=bool(breaks)))
    except Unavailable:
        # Without a recording, this is Unavailable; without breaks, nothing is wrong or nothing was compiled.
        return _broken(case, breaks, None, "") if case.recording and breaks else []
    if breaks and regions.is_empty():
        # torch cannot resume after a break within a loop: it runs the whole function eagerly.
        return _broken(case, breaks, None, "No compiled code runs in the traced steps: the function runs eagerly")
    saving_ns = case.host_saving_ns(entries)
    if not case.is_worth(saving_ns):
        return []
    change = replace(saving_ns.change, overhead=case.overhead)
    host_ns = saving_ns if case.is_on_cpu else case.step.host_ns - case.replay.play(change).host_ns
    seen = (
        f"Each step calls {case.number_text(regions, 'compiled region')}, and entering the later ones "
        f"takes the host {case.cost_text(host_ns)}"
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


@rule
def recompiles(case: Case) -> list[Finding]:
    """Does every step spend time on compiling, or on planning kernels for new shapes?"""
    return [*_planning(case), *_stopped_compiling(case)]


def _planning(case: Case) -> list[Finding]:
    try:
        planning = case.stalls.filter(pl.col("kind") == "compile")
    except Unavailable:
        if not case.compile_report:
            raise
        return _compiling_steps(case)
    saving_ns = case.host_saving_ns(planning)
    if not case.is_worth(saving_ns):
        return _compiling_steps(case)
    per_step = float(planning.select(LENGTH).sum().item()) / case.num_steps
    num_steps = planning["step"].n_unique()
    where = planning.group_by("op").agg(LENGTH.sum()).sort("duration_ns", descending=True)
    ops = [str(op) for op in where["op"].drop_nulls().head(2)]
    changing = _changing_shapes(planning)
    guard = _guard(case)
    if changing:
        why = f"shapes change from step to step ({changing}), and each new one is compiled or planned for again"
        fix = "keep shapes the same: pad to a few lengths, drop_last=True; or torch.compile(model, dynamic=True)"
    else:
        why = "something is compiled or planned for again"
        fix = "TORCH_LOGS=recompiles,graph_breaks python train.py  # shows the guard that failed"
    if num_steps == 1:
        why, fix = "only in one step, so this may be a one-time cost", "record later, with more warm-up steps"
    if guard:
        why, fix = f"{why}; torch.compile reports: {guard}", _fix_of(guard)
    rows = planning.select("step", "phase", "op", "shapes", LENGTH).head(8).to_dicts()
    return one_finding(
        sentence=f"Compiling or planning{' in ' + ' and '.join(ops) if ops else ''} takes {case.cost_text(per_step)} "
        f"of host time, {case.number_text(planning, 'time')} per step: {why}.",
        fix=fix,
        saving_ns=saving_ns,
        derived="the step replayed without this time; the cost of running eagerly instead is not counted",
        confidence="high" if changing or guard else "medium" if num_steps > 1 else "low",
        falsified_by="train on inputs of one shape; the finding is wrong if the host spends as long on this",
        places=case.host_places(planning),
        evidence=(Evidence("planning", rows), *_guards(case)),
    )


def _compiling_steps(case: Case) -> list[Finding]:
    """Return a finding if clean steps that compiled took longer than the others and no traced step shows it."""
    if not case.compile_report:
        return []
    timed = case.recording.window("clean")
    quiet = [sample.wall_ns for sample in timed if not sample.num_compiles]
    compiling = [sample.wall_ns for sample in timed if sample.num_compiles]
    if len(compiling) < 2 or not quiet:
        return []  # once is a one-time cost
    saving_ns = max(0.0, sum(compiling) - len(compiling) * median(quiet)) / len(timed)
    guard = _guard(case)
    if saving_ns < WORTH_SHARE * median(quiet):
        return []
    return one_finding(
        sentence=f"{len(compiling)} of {len(timed)} clean steps recompiled something and took "
        f"{duration(median(compiling), 3)}; the others took {duration(median(quiet), 3)}"
        f"{f' ({guard})' if guard else ''}.",
        fix=_fix_of(guard or ""),
        saving_ns=saving_ns,
        derived="the extra time of the compiling steps, averaged over all clean steps",
        confidence="high" if guard else "medium",
        falsified_by="train on inputs of one shape; the finding is wrong if as many steps compile",
        evidence=_guards(case),
    )


def _stopped_compiling(case: Case) -> list[Finding]:
    hits = entries(case.compile_report, "recompile_limit_hits")
    if not hits:
        return []
    first = max(hits, key=count_of)
    guard = _guard(case)
    rows = [{"frame": one.get("frame"), "count": count_of(one)} for one in hits[:8]]
    fused = if_available(lambda: fusible(case)[1])
    is_worth = fused is not None and case.is_worth(fused)
    return one_finding(
        sentence=f"torch.compile reached its recompile limit for {first.get('frame')}, which has run eagerly "
        f"since then{f' ({guard})' if guard else ''}.",
        fix=_fix_of(guard or ""),
        saving_ns=fused if is_worth else None,
        upper_bound=True,
        group="compile" if is_worth else None,
        derived="reported by torch.compile; the step replayed with everything fused that is not compiled"
        if is_worth
        else "reported by torch.compile; how fast the compiled function would be is unknown",
        falsified_by="raise torch._dynamo.config.recompile_limit; the finding is wrong if as many ops run eagerly",
        evidence=(Evidence("functions over the recompile limit", rows), *_guards(case)),
    )


def _guard(case: Case) -> str | None:
    """Return the guard that failed most often, as torch.compile prints it, or None."""
    texts = [
        str(entry["failed_guards"][0])
        for entry in entries(case.compile_report, "recompiles")
        if isinstance(entry.get("failed_guards"), list) and entry["failed_guards"]
    ]
    if not texts:
        return None
    ((most, _),) = Counter(split_guard(text)[0] for text in texts).most_common(1)
    return next(text for text in texts if split_guard(text)[0] == most)[:200]


def _guards(case: Case) -> tuple[Evidence, ...]:
    rows = entries(case.compile_report, "recompiles")[:8]
    return (Evidence("recompiles", rows),) if rows else ()


def _fix_of(guard: str) -> str:
    if re.search(r"size mismatch|stride mismatch|\.size\(\)|shape", guard):
        return "keep shapes the same: pad to a few lengths, drop_last=True; or torch.compile(model, dynamic=True)"
    return (
        "TORCH_LOGS=recompiles python train.py  # shows each guard; pass changing values as tensors, not as "
        "numbers or attributes"
    )


def _changing_shapes(planning: pl.DataFrame) -> str | None:
    """Return the first op whose first operand changes shape from step to step, with its shapes, or None."""
    for (op,), part in planning.drop_nulls("op").group_by("op", maintain_order=True):
        shapes: dict[int | None, str] = {}
        for step, text in part.select("step", "shapes").iter_rows():
            tensors = [one for one in operands(text, None) if isinstance(one, Tensor) and one.shape]
            if tensors:
                shapes.setdefault(step, str(list(tensors[0].shape)))
        different = list(dict.fromkeys(shapes.values()))
        if len(different) > 1:
            return f"{op}: {', '.join(different[:3])}"
    return None

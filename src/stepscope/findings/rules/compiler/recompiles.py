"""Does every step spend time on compiling, or on planning kernels for new shapes?"""

from __future__ import annotations

import re
from collections import Counter
from statistics import median

import polars as pl

from stepscope.analysis.compiler.compile_summary import split_guard
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.findings.compile_log import compile_entries, compile_report, count_of
from stepscope.findings.rule import LENGTH, Case, Evidence, Finding, Unavailable, duration, one_finding
from stepscope.session.case import WORTH_SHARE


def check(case: Case) -> list[Finding]:
    return [*_planning(case), *_stopped_compiling(case)]


def _planning(case: Case) -> list[Finding]:
    try:
        planning = case.stalls.filter(pl.col("kind") == "compile")
    except Unavailable:
        if not compile_report(case):
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
    if not compile_report(case):
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
    hits = compile_entries(case, "recompile_limit_hits")
    if not hits:
        return []
    first = max(hits, key=count_of)
    guard = _guard(case)
    rows = [{"frame": one.get("frame"), "count": count_of(one)} for one in hits[:8]]
    return one_finding(
        sentence=f"torch.compile reached its recompile limit for {first.get('frame')}, which has run eagerly "
        f"since then{f' ({guard})' if guard else ''}.",
        fix=_fix_of(guard or ""),
        derived="reported by torch.compile; how fast the compiled function would be is unknown",
        falsified_by="raise torch._dynamo.config.recompile_limit; the finding is wrong if as many ops run eagerly",
        evidence=(Evidence("functions over the recompile limit", rows), *_guards(case)),
    )


def _guard(case: Case) -> str | None:
    """Return the guard that failed most often, as torch.compile prints it, or None."""
    texts = [
        str(entry["failed_guards"][0])
        for entry in compile_entries(case, "recompiles")
        if isinstance(entry.get("failed_guards"), list) and entry["failed_guards"]
    ]
    if not texts:
        return None
    ((most, _),) = Counter(split_guard(text)[0] for text in texts).most_common(1)
    return next(text for text in texts if split_guard(text)[0] == most)[:200]


def _guards(case: Case) -> tuple[Evidence, ...]:
    rows = compile_entries(case, "recompiles")[:8]
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

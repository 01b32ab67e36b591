"""Is time spent in every step on compiling, or on planning kernels for shapes not seen before?"""

from __future__ import annotations

import re
from collections import Counter
from statistics import median

import polars as pl

from stepscope.analysis.compiler.compile_summary import split_guard
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.whatif import stretches
from stepscope.errors import Unavailable
from stepscope.findings.compile_log import compile_entries, compile_report, count_of
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import WORTH_SHARE, Case


def check(case: Case) -> list[Finding]:
    return [*_planning(case), *_given_up(case)]


def _planning(case: Case) -> list[Finding]:
    try:
        planning = case.stalls.filter(pl.col("kind") == "compile")
    except Unavailable:
        if not compile_report(case):
            raise
        return _compiling_steps(case)
    saving_ns = case.saving_ns(Change(host=stretches(planning))) if planning.height else 0.0
    if not case.is_worth(saving_ns):
        return _compiling_steps(case)
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
    per_step = float(planning.select(length).sum().item()) / case.num_steps
    num_steps = planning["step"].n_unique()
    where = planning.group_by("op").agg(length.sum()).sort("duration_ns", descending=True)
    ops = [str(op) for op in where["op"].drop_nulls().head(2)]
    changing = _changing_shapes(planning)
    guard = _guard(case)
    if changing:
        why = f"the shapes change from step to step ({changing}), so that each is compiled or planned for anew"
        fix = "keep one shape: pad to a few lengths, drop_last=True; or torch.compile(model, dynamic=True)"
    else:
        why = "something is compiled or planned for again"
        fix = "TORCH_LOGS=recompiles,graph_breaks python train.py  # names the guard that failed"
    if num_steps == 1:
        why, fix = "seen in one step only: first-call cost, unless it comes back", "record later: more warm-up steps"
    if guard:
        why, fix = f"{why}; torch.compile says: {guard}", _fix_of(guard)
    return [
        Finding(
            sentence=f"The host is kept {duration(per_step, 3)} a step by "
            f"{plural(planning.height / case.num_steps, 'stretch')} of compiling or planning"
            f"{' in ' + ' and '.join(ops) if ops else ''}: {why}.",
            fix=fix,
            saving_ns=saving_ns,
            derived="the step replayed with these stretches gone; an eager fallback's cost is not counted",
            confidence="high" if changing or guard else "medium" if num_steps > 1 else "low",
            falsified_by="stretches as long in a run whose inputs all have one shape",
            places=case.host_places(planning),
            evidence=(
                Evidence("planning", planning.select("step", "phase", "op", "shapes", length).head(8).to_dicts()),
                *_guards(case),
            ),
        )
    ]


def _compiling_steps(case: Case) -> list[Finding]:
    """Steps of the clean window that compiled, against those that did not: where no traced step shows it."""
    if not compile_report(case):
        return []
    timed = case.recording.window("clean")
    quiet = [sample.wall_ns for sample in timed if not sample.num_compiles]
    compiling = [sample.wall_ns for sample in timed if sample.num_compiles]
    if len(compiling) < 2 or not quiet:
        return []  # once is first-call cost
    saving_ns = max(0.0, sum(compiling) - len(compiling) * median(quiet)) / len(timed)
    guard = _guard(case)
    if saving_ns < WORTH_SHARE * median(quiet):
        return []
    return [
        Finding(
            sentence=f"{len(compiling)} of {len(timed)} clean steps compiled something again and took "
            f"{duration(median(compiling), 3)}, where the others took {duration(median(quiet), 3)}"
            f"{f': {guard}' if guard else ''}.",
            fix=_fix_of(guard or ""),
            saving_ns=saving_ns,
            derived="what the compiling steps took beyond the others, over all clean steps",
            confidence="high" if guard else "medium",
            falsified_by="a run whose inputs all have one shape and that compiles as often",
            evidence=_guards(case),
        )
    ]


def _given_up(case: Case) -> list[Finding]:
    hits = compile_entries(case, "recompile_limit_hits")
    if not hits:
        return []
    first = max(hits, key=count_of)
    guard = _guard(case)
    return [
        Finding(
            sentence=f"torch.compile gave {first.get('frame')} up: compiled again too often, it runs eagerly since"
            f"{f' ({guard})' if guard else ''}.",
            fix=_fix_of(guard or ""),
            derived="told by torch.compile; what the compiled function would take is not known",
            confidence="high",
            falsified_by="a recompile limit raised (torch._dynamo.config.recompile_limit) with no fewer eager ops",
            evidence=(
                Evidence("given up", [{"frame": one.get("frame"), "count": count_of(one)} for one in hits[:8]]),
                *_guards(case),
            ),
        )
    ]


def _guard(case: Case) -> str | None:
    """The guard that failed most often, as torch.compile words it, whatever the value and the compile."""
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
        return "keep one shape: pad to a few lengths, drop_last=True; or torch.compile(model, dynamic=True)"
    return (
        "TORCH_LOGS=recompiles python train.py  # names each guard; pass what changes as a tensor, not as a number "
        "or an attribute"
    )


def _changing_shapes(planning: pl.DataFrame) -> str | None:
    """Of the op that planned longest, first operands that differ from step to step."""
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

"""Is time spent in every step on compiling, or on planning kernels for shapes not seen before?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.replay import Change
from stepscope.analysis.whatif import stretches
from stepscope.findings.case import Case
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.wording import milliseconds, several


def check(case: Case) -> list[Finding]:
    planning = case.stalls.filter(pl.col("kind") == "compile")
    saving_ns = case.saving_ns(Change(host=stretches(planning))) if planning.height else 0.0
    if not case.is_worth(saving_ns):
        return []
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
    per_step = float(planning.select(length).sum().item()) / case.num_steps
    num_steps = planning["step"].n_unique()
    where = planning.group_by("op").agg(length.sum()).sort("duration_ns", descending=True)
    ops = [str(op) for op in where["op"].drop_nulls().head(2)]
    changing = _changing_shapes(planning)
    if changing:
        why = f"the shapes change from step to step ({changing}), so that each is compiled or planned for anew"
        fix = "keep one shape: pad to a few lengths, drop_last=True; or torch.compile(model, dynamic=True)"
    else:
        why = "something is compiled or planned for again"
        fix = "TORCH_LOGS=recompiles,graph_breaks python train.py  # names the guard that failed"
    if num_steps == 1:
        why, fix = "seen in one step only: first-call cost, unless it comes back", "record later: more warm-up steps"
    return [
        Finding(
            sentence=f"The host is kept {milliseconds(per_step)} a step by "
            f"{several(planning.height / case.num_steps, 'stretch')} of compiling or planning"
            f"{' in ' + ' and '.join(ops) if ops else ''}: {why}.".replace("stretchs", "stretches"),
            fix=fix,
            saving_ns=saving_ns,
            derived="the step replayed with these stretches gone; an eager fallback's cost is not counted",
            confidence="high" if changing else "medium" if num_steps > 1 else "low",
            falsified_by="stretches as long in a run whose inputs all have one shape",
            evidence=(
                Evidence("planning", planning.select("step", "phase", "op", "shapes", length).head(8).to_dicts()),
            ),
        )
    ]


def _changing_shapes(planning: pl.DataFrame) -> str | None:
    """Of the op that planned longest, first operands that differ from step to step."""
    from stepscope.analysis.op_calls import Tensor
    from stepscope.analysis.op_costs import operands

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

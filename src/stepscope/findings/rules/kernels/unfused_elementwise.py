"""Do chains of elementwise ops, such as handwritten norms or activations, move their tensors many times?"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.analysis.costs.attainable_rates import traffic_ns
from stepscope.findings.rule import Case, Change, Evidence, Finding, one_finding, plural, size

_FUSED = (
    ({"tanh", "pow"}, 'F.gelu(x, approximate="tanh")'),
    ({"tanh", "mul", "add"}, 'F.gelu(x, approximate="tanh")'),
    ({"erf"}, "F.gelu(x)"),
    ({"sub", "mean"}, "F.layer_norm(x, (size,), weight, bias)"),
    ({"pow", "mean"}, "F.rms_norm(x, (size,), weight)"),
    ({"square", "mean"}, "F.rms_norm(x, (size,), weight)"),
    ({"exp", "sum"}, "torch.softmax(x, -1)"),
    ({"sigmoid", "mul"}, "F.silu(x)"),
)
# Ops in a chain, and the one op that does the same.


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    found = case.chains
    if found.is_empty():
        return []
    fused_ns = [traffic_ns(case.device, fused) for fused in found["fused_bytes"]]
    found = found.with_columns(pl.Series("fused_ns", fused_ns)).filter(pl.col("fused_ns") < pl.col("duration_ns"))
    durations = dict(found.select("last", "fused_ns").iter_rows())
    events = found["events"].explode()
    gone = events.filter(~events.is_in(list(durations)))
    known = _known(found)
    # Calling compiled code takes the host about as long as the launches it saves: only a torch op saves host time.
    change = case.without(gone) if known else Change(gone=frozenset(gone.to_list()))
    saving_ns = case.saving_ns(replace(change, duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    per_step = found.select(pl.col("num_kernels", "bytes", "fused_bytes", "duration_ns").sum() / case.num_steps)
    num_kernels, moved, fused, total_ns = per_step.row(0)
    named = found.with_columns(pl.col("ops").list.join(", ").str.replace_all("aten::", "", literal=True))
    sizes = [pl.col("num_kernels", "bytes", "fused_bytes").first(), pl.col("fused_ns").sum() / case.num_steps]
    table = case.grouped(named, "num_chains", "phase", "shape", "dtype", "ops", more=sizes)
    table = table.select(pl.exclude("fused_ns"), "fused_ns")
    longest = table.row(0, named=True)
    return one_finding(
        sentence=f"{plural(num_kernels, 'elementwise kernel')} per step, in {case.number_text(found, 'chain')}, take "
        f"{case.cost_text(total_ns)}. Fused, they would move {size(fused)} instead of {size(moved)}. The longest "
        f"chain, over {list(longest['shape'])}: {_short(longest['ops'])}.",
        fix=known or "model = torch.compile(model)  # or torch.compile of the function with the chain",
        saving_ns=saving_ns,
        derived="the step replayed with one kernel per chain, which reads the chain's inputs and writes its result "
        "at 85 % of the device's bandwidth"
        + ("" if known else "; host time stays the same: calling compiled code takes about as long as the launches"),
        confidence="high" if moved > 3 * fused else "medium",
        falsified_by="use torch.compile; the finding is wrong if there are as many kernels and they take as long, "
        "without a graph break in the chain",
        places=case.places(events),
        evidence=(Evidence("chains of elementwise ops", table.head(8).to_dicts()),),
    )


def _known(found: pl.DataFrame) -> str | None:
    """Return the torch op that does the same as a chain in the forward, or None."""
    forward = found.filter(pl.col("phase").ne_missing("backward")).sort("duration_ns", descending=True)
    for ops in forward["ops"]:
        names = [str(op).removeprefix("aten::") for op in ops]
        for wanted, fused in _FUSED:
            if wanted <= {name.rstrip("_") for name in names}:
                return f"{fused}  # instead of {_short(', '.join(names))}; for all: torch.compile(model)"
    return None


def _short(ops: str, most: int = 10) -> str:
    names = ops.split(", ")
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

"""Does a scatter, such as the backward of advanced indexing, take far longer than its bytes explain?"""

from __future__ import annotations

from typing import Any

import polars as pl

from stepscope.analysis.costs.attainable_rates import scatter_ns
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.findings.rule import Case, Evidence, Finding, one_finding, plural, size

# Positions of the operand with the values to add, and of the operand they are added to. Embedding's backward creates
# the latter itself, so the trace does not show how many rows it has.
_SCATTERS: dict[str, tuple[int, int | None]] = {
    "aten::_index_put_impl_": (2, 0), "aten::index_put_": (2, 0), "aten::index_put": (2, 0),
    "aten::_unsafe_index_put": (2, 0), "aten::embedding_dense_backward": (0, None), "aten::index_add_": (3, 0),
    "aten::index_add": (3, 0), "aten::scatter_add_": (3, 0), "aten::scatter_add": (3, 0),
    "aten::scatter_reduce_": (3, 0), "aten::scatter_reduce": (3, 0),
    "aten::_embedding_bag_dense_backward": (0, None), "aten::_unsafe_masked_index_put_accumulate": (3, 0),
}  # fmt: skip
# A scatter slower than this many times a good one is serialized. For advanced indexing, the estimate is more exact.
_FAR, _FAR_OF_INDEXING = 4.0, 2.0
_FIXES = {
    "index_put": "F.embedding(index, x) instead of x[index]",
    "embedding": "torch.compile(model), or one_hot(index).T @ gradient if the table is small",
    "index_add": "torch.use_deterministic_algorithms(False) if it is on; else a segment reduction over sorted rows",
    "scatter": "torch.use_deterministic_algorithms(False) if it is on; else a segment reduction over sorted rows",
}


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    # A call is the outermost of these ops: index_put_ calls its implementation, which sorts first.
    work = case.work.with_columns(pl.col("op").cast(pl.String), pl.col("root_op").cast(pl.String))
    calls = work.filter(pl.col("op").is_in(list(_SCATTERS)), pl.col("kind") == "kernel")
    durations: dict[int, float] = {}
    gone: list[int] = []
    rows: list[dict[str, Any]] = []
    for _, part in calls.group_by("call", maintain_order=True):
        first = part.sort("duration_ns").row(-1, named=True)
        sizes = _sizes(first)
        now_ns = int(part["duration_ns"].sum())
        if sizes is None:
            continue
        added, moved, num_indices = sizes
        good_ns = scatter_ns(case.device, moved, num_indices)
        if now_ns < (_FAR_OF_INDEXING if "index_put" in first["op"] else _FAR) * good_ns:
            continue
        durations[first["event"]] = good_ns
        gone += [event for event in part["event"] if event != first["event"]]
        rows.append({"op": first["op"], "called": first["root_op"], "shapes": first["shapes"], "bytes": added,
                     "kernel": str(first["name"]), "duration_ns": now_ns, "phase": first["phase"]})  # fmt: skip
    if not rows:
        return []
    saving_ns = case.saving_ns(case.without(gone, durations))
    if not case.is_worth(saving_ns):
        return []
    keys = ("op", "called", "shapes", "kernel", "phase")
    table = case.grouped(pl.DataFrame(rows), "num_calls", *keys, more=[pl.col("bytes").first()])
    worst = table.row(0, named=True)
    total_ns, total_bytes = float(table["duration_ns"].sum()), sum(row["bytes"] for row in rows) / case.num_steps
    share = total_bytes / total_ns * 1e9 / case.device.bandwidth_bytes_per_s
    fix = next((text for name, text in _FIXES.items() if name in worst["op"]), _FIXES["scatter"])
    called = f" for {worst['called']}" if worst["called"] != worst["op"] else ""
    return one_finding(
        sentence=f"Adding {size(total_bytes)} in {plural(len(rows) / case.num_steps, 'scatter')} per step "
        f"({worst['op']}{called}, in {_short(worst['kernel'])}) takes {case.cost_text(total_ns)}, at {share:.1%} of "
        "the device's bandwidth, because repeated indices are processed one after another.",
        fix=fix,
        saving_ns=saving_ns,
        derived="the step replayed with each done like embedding's backward: sort the indices, read the values once, "
        "read and write the target rows, at 40 % of the device's bandwidth",
        confidence="high" if share < 0.05 else "medium",
        falsified_by="make all indices different; the finding is wrong if the scatter is not faster",
        places=case.places([*durations, *gone]),
        evidence=(Evidence("scatters far below the bandwidth", table.head(8).to_dicts()),),
    )


def _sizes(row: dict[str, Any]) -> tuple[int, int, int] | None:
    """Return the bytes a scatter adds, the least bytes it moves, and its number of indices."""
    given = operands(row["shapes"], row["dtypes"])
    place, target_place = _SCATTERS[row["op"]]
    values = given[place] if place < len(given) else None
    if not isinstance(values, Tensor) or not values.num_bytes or not values.shape:
        return None
    target = given[target_place] if target_place is not None and target_place < len(given) else None
    added = values.num_bytes
    if isinstance(target, Tensor) and target.num_bytes and len(target.shape) > 0:
        row_elements = max(1, target.num_elements // max(1, target.shape[0]))
        return added, added + 2 * min(added, target.num_bytes), max(1, values.num_elements // row_elements)
    return added, 3 * added, max(1, values.num_elements // max(1, values.shape[-1]))


def _short(kernel: str) -> str:
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "").split("<")[0].split("(")[0].strip()
    return name.rsplit("::", 1)[-1] or kernel[:40]

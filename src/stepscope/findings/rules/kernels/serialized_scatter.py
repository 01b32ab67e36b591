"""Does a scatter, such as the backward of advanced indexing, take far longer than its bytes?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl

from stepscope.analysis.costs.attainable_rates import scatter_ns
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural, size
from stepscope.session.case import Case

# Each with the operand that holds what is added up, the gradient of what was looked up, and with the one that it is
# added to; embedding's backward makes that itself, and how many rows it has is not among its shapes.
_SCATTERS: dict[str, tuple[int, int | None]] = {
    "aten::_index_put_impl_": (2, 0), "aten::index_put_": (2, 0), "aten::index_put": (2, 0),
    "aten::_unsafe_index_put": (2, 0), "aten::embedding_dense_backward": (0, None), "aten::index_add_": (3, 0),
    "aten::index_add": (3, 0), "aten::scatter_add_": (3, 0), "aten::scatter_add": (3, 0),
    "aten::scatter_reduce_": (3, 0), "aten::scatter_reduce": (3, 0),
    "aten::_embedding_bag_dense_backward": (0, None), "aten::_unsafe_masked_index_put_accumulate": (3, 0),
}  # fmt: skip
_FAR, _FAR_OF_INDEXING = 4.0, 2.0
"""Times what a good one takes: a scatter that takes longer is serialized. What the backward of advanced indexing is
compared with is the very kernel that takes its place."""
_FIXES = {
    "index_put": "F.embedding(index, x) in place of x[index]",
    "embedding": "torch.compile(model), or one_hot(index).T @ gradient where the table is small",
    "index_add": "torch.use_deterministic_algorithms(False) if it is on; else a segment reduction over sorted rows",
    "scatter": "torch.use_deterministic_algorithms(False) if it is on; else a segment reduction over sorted rows",
}


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    # A call is the outermost of these ops: index_put_ calls its own implementation, which sorts first.
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
    saving_ns = case.saving_ns(replace(case.without(pl.Series(gone, dtype=pl.Int64)), duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    table = pl.DataFrame(rows).group_by("op", "called", "shapes", "kernel", "phase").agg(
        (pl.len() / case.num_steps).alias("num_calls"), pl.col("bytes").first(),
        pl.col("duration_ns").sum() / case.num_steps,
    ).sort("duration_ns", descending=True)  # fmt: skip
    worst = table.row(0, named=True)
    total_ns, total_bytes = float(table["duration_ns"].sum()), sum(row["bytes"] for row in rows) / case.num_steps
    share = total_bytes / total_ns * 1e9 / case.device.bandwidth_bytes_per_s
    fix = next((text for name, text in _FIXES.items() if name in worst["op"]), _FIXES["scatter"])
    called = f", for what {worst['called']} looked up," if worst["called"] != worst["op"] else ""
    return [
        Finding(
            sentence=f"{plural(len(rows) / case.num_steps, 'scatter')} a step ({worst['op']}{called} in "
            f"{_short(worst['kernel'])}): {duration(total_ns, 3)} of {duration(case.step_ns, 3)} to add up "
            f"{size(total_bytes)}, at {share:.1%} of the device's bandwidth: one index after another.",
            fix=fix,
            saving_ns=saving_ns,
            derived="the step replayed with each as embedding's backward does it: indices sorted, values read once, "
            "and the rows that they go to read and written, at 40 % of the device's bandwidth",
            confidence="high" if share < 0.05 else "medium",
            falsified_by="a scatter as slow with indices that are all different",
            places=case.places([*durations, *gone]),
            evidence=(Evidence("scatters far below the bandwidth", table.head(8).to_dicts()),),
        )
    ]


def _sizes(row: dict[str, Any]) -> tuple[int, int, int] | None:
    """Of a scatter, the bytes that it adds up, the bytes that it moves at the least, and how many indices it has."""
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

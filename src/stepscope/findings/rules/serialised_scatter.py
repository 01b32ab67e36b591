"""Does a scatter, such as the backward of advanced indexing, take far longer than its bytes?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl

from stepscope.analysis.op_calls import Tensor
from stepscope.analysis.op_costs import operands
from stepscope.analysis.reach import traffic_ns
from stepscope.findings.case import Case
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.wording import gibibytes, milliseconds, several

# Each with the operand that holds what is added up: the gradient of what was looked up.
_SCATTERS = {
    "aten::_index_put_impl_": 2, "aten::index_put_": 2, "aten::index_put": 2, "aten::_unsafe_index_put": 2,
    "aten::embedding_dense_backward": 0, "aten::index_add_": 3, "aten::index_add": 3, "aten::scatter_add_": 3,
    "aten::scatter_add": 3, "aten::scatter_reduce_": 3, "aten::scatter_reduce": 3,
    "aten::_embedding_bag_dense_backward": 0, "aten::_unsafe_masked_index_put_accumulate": 3,
}  # fmt: skip
_PASSES = 3
"""The values are read, and the rows that they are added to are read and written."""
_FAR = 4.0
"""Times what its bytes need: a scatter that takes longer is serialised."""
_FIXES = {
    "index_put": "torch.index_select(x, 0, index) or F.embedding(index, x) in place of x[index]",
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
        num_bytes = _bytes(first)
        now_ns = int(part["duration_ns"].sum())
        if num_bytes is None or now_ns < _FAR * traffic_ns(case.device, num_bytes):
            continue
        durations[first["event"]] = traffic_ns(case.device, num_bytes)
        gone += [event for event in part["event"] if event != first["event"]]
        rows.append({"op": first["op"], "called": first["root_op"], "shapes": first["shapes"], "bytes": num_bytes,
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
            sentence=f"{several(len(rows) / case.num_steps, 'scatter')} a step ({worst['op']}{called} in "
            f"{_short(worst['kernel'])}): {milliseconds(total_ns)} of {milliseconds(case.step_ns)} to add up "
            f"{gibibytes(total_bytes / _PASSES)}, at {share:.1%} of the device's bandwidth: one index after another.",
            fix=fix,
            saving_ns=saving_ns,
            upper_bound=True,
            derived="the step replayed with one kernel for each, which reads the values and reads and writes the "
            "rows at 85 % of the device's bandwidth",
            confidence="high" if share < 0.05 else "medium",
            falsified_by="a scatter as slow with indices that are all different",
            places=case.places([*durations, *gone]),
            evidence=(Evidence("scatters far below the bandwidth", table.head(8).to_dicts()),),
        )
    ]


def _bytes(row: dict[str, Any]) -> int | None:
    """What a scatter moves at the least."""
    given = operands(row["shapes"], row["dtypes"])
    place = _SCATTERS[row["op"]]
    values = given[place] if place < len(given) else None
    size = values.num_bytes if isinstance(values, Tensor) else None
    return _PASSES * size if size else None


def _short(kernel: str) -> str:
    name = kernel.removeprefix("void ").split("<")[0].split("(")[0].strip()
    return name.rsplit("::", 1)[-1] or kernel[:40]

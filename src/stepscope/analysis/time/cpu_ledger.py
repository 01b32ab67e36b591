"""The ledger of a step on a CPU: the time of its ops, whose least time is unknown, and the time without any op.

Phases are as long as in the steps without the profiler. How much of a phase no op covers comes from the trace, as
a lower bound: what the profiler adds to a phase is taken from it first.
"""

from collections.abc import Mapping

import polars as pl

from stepscope.analysis.structure.intervals import intersect, length_ns, spans, union
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.time.ledger import Ledger

PRODUCTS = ["aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_convolution",
            "aten::convolution_backward", "aten::_convolution", "aten::mkldnn_linear",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward"]  # fmt: skip
DATA = "data"
_MOST_OPS = 10
TRAINING = ("forward", "backward", "optimizer")


def cpu_ledger(
    linked: Linked, phases_ns: Mapping[str, float], step_ns: float, between_ns: float, slow_ns: float
) -> Ledger:
    """Return the ledger of a step of `step_ns`, split like `phases_ns`, with what lies between and in slow steps."""
    steps = linked.steps.table.select("start_ns", "end_ns")
    ops = linked.host.filter(pl.col("kind") == "op")
    products = ops.filter(pl.col("name").cast(pl.String).is_in(PRODUCTS))
    covered = [intersect(union(spans(some)), union(steps)) for some in (ops, products)]
    total_ns = round(step_ns)
    whole = sum(phases_ns.values()) or 1.0
    outside_ns = sum(ns for phase, ns in phases_ns.items() if phase not in (DATA, *TRAINING))
    sums = {"cpu_data": phases_ns.get(DATA, 0.0), "cpu_outside": outside_ns}
    parts = {row: round(total_ns * ns / whole) for row, ns in sums.items()}
    num_steps = max(1, steps.height)
    product_ns = op_ns = 0.0
    for phase, ns in phases_ns.items():
        if phase not in TRAINING:
            continue
        during = intersect(union(linked.steps.phases.filter(pl.col("phase").cast(pl.String) == phase)), union(steps))
        traced_ns = length_ns(during) / num_steps
        all_ns, products_ns = (length_ns(intersect(some, during)) / num_steps for some in covered)
        without_ns = max(0.0, traced_ns - all_ns - max(0.0, traced_ns - ns))
        share = products_ns / all_ns if all_ns else 0.0
        product_ns += share * max(0.0, ns - without_ns)
        op_ns += (1 - share) * max(0.0, ns - without_ns)
    parts["cpu_products"], parts["cpu_ops"] = (round(total_ns * ns / whole) for ns in (product_ns, op_ns))
    parts["cpu_python"] = total_ns - sum(parts.values())
    parts |= {"between_steps": round(between_ns), "slow_steps": max(0, round(slow_ns))}
    schema = dict.fromkeys(("event", "duration_ns", "ns", "least_ns", "good_ns"), pl.Int64) | {"row": pl.String}
    filled = {row: ns for row, ns in parts.items() if ns}
    return Ledger(sum(parts.values()), 1, filled, pl.DataFrame(schema=schema), _largest(ops, union(steps), num_steps))


def _largest(ops: pl.DataFrame, steps: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    """Return the ops that take most of the traced steps, each by where it is called, with its own time alone."""
    keys = ("phase", "module", "name")
    inside = ops.filter(pl.col("step").is_not_null()).with_columns(pl.col(keys).cast(pl.String))
    sums = (pl.len() / num_steps).alias("num_calls"), (pl.col("self_ns").sum() / num_steps).alias("time_ns")
    share = (pl.col("time_ns") / (max(1, length_ns(steps)) / num_steps)).alias("share")
    table = inside.group_by(keys).agg(sums).with_columns(share)
    return table.sort("time_ns", *keys, descending=[True, False, False, False], nulls_last=True).head(_MOST_OPS)

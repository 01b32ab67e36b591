"""The ledger of a step on a CPU: the time of its ops, whose least time is unknown, and the time without any op.

Phases are as long as in the steps without the profiler. How much of a phase no op covers comes from the trace, as
a lower bound: what the profiler adds to a phase is taken from it first.
"""

from collections.abc import Mapping

import polars as pl

from stepscope.analysis.ranks.collectives import host_collectives
from stepscope.analysis.structure.intervals import intersect, length_ns, spans, union
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.time.ledger import Ledger

PRODUCTS = ["aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_convolution",
            "aten::convolution_backward", "aten::_convolution", "aten::mkldnn_linear",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward"]  # fmt: skip
DATA = "data"
BETWEEN = "between"  # from a step to the next forward, if no DataLoader tells data from other work
_MOST_OPS = 10
TRAINING = ("forward", "backward", "optimizer")


def cpu_ledger(
    linked: Linked,
    work: pl.DataFrame,
    phases_ns: Mapping[str, float],
    step_ns: float,
    between_ns: float,
    slow_ns: float,
) -> Ledger:
    """Return the ledger of a step of `step_ns`, split like `phases_ns`, with what lies between and in slow steps;
    `work` are the ops that findings may claim."""
    steps = linked.steps.table.select("start_ns", "end_ns")
    ops = linked.host.filter(pl.col("kind") == "op")
    products = ops.filter(pl.col("name").cast(pl.String).is_in(PRODUCTS))
    covered = [intersect(union(spans(some)), union(steps)) for some in (ops, products)]
    exchanged = union(spans(host_collectives(linked)))
    total_ns = round(step_ns)
    whole = sum(phases_ns.values()) or 1.0
    outside_ns = sum(ns for phase, ns in phases_ns.items() if phase not in (DATA, BETWEEN, *TRAINING))
    own = {"cpu_data": phases_ns.get(DATA, 0.0), "cpu_between": phases_ns.get(BETWEEN, 0.0)}
    sums = {**own, "cpu_outside": outside_ns}
    parts = {row: round(total_ns * ns / whole) for row, ns in sums.items()}
    num_steps = max(1, steps.height)
    product_ns = op_ns = ranks_ns = 0.0
    for phase, ns in phases_ns.items():
        if phase not in TRAINING:
            continue
        during = intersect(union(linked.steps.phases.filter(pl.col("phase").cast(pl.String) == phase)), union(steps))
        traced_ns = length_ns(during) / num_steps
        all_ns, products_ns = (length_ns(intersect(some, during)) / num_steps for some in covered)
        without_ns = max(0.0, traced_ns - all_ns - max(0.0, traced_ns - ns))
        exchanging = intersect(exchanged, during)
        waiting_ns = length_ns(exchanging) - length_ns(intersect(covered[0], exchanging))
        ranks_ns += min(without_ns, waiting_ns / num_steps)
        share = products_ns / all_ns if all_ns else 0.0
        product_ns += share * max(0.0, ns - without_ns)
        op_ns += (1 - share) * max(0.0, ns - without_ns)
    for row, ns in {"cpu_products": product_ns, "cpu_ops": op_ns, "cpu_ranks": ranks_ns}.items():
        parts[row] = round(total_ns * ns / whole)
    parts["cpu_python"] = total_ns - sum(parts.values())
    parts |= {"between_steps": round(between_ns), "slow_steps": max(0, round(slow_ns))}
    num_typical = max(1, work["step"].n_unique())
    filled = {row: ns * num_typical for row, ns in parts.items() if ns}
    events = _events(work, filled, "cpu_between" if BETWEEN in phases_ns else "cpu_outside")
    largest = _largest(ops, union(steps), num_steps)
    return Ledger(sum(filled.values()), num_typical, filled, events, largest)


def _events(work: pl.DataFrame, parts: Mapping[str, int], beside: str) -> pl.DataFrame:
    """Return each op with the row that holds it; together they take no more than the row."""
    phase = pl.col("phase").cast(pl.String)
    is_product = pl.col("op").cast(pl.String).is_in(PRODUCTS)
    row = (
        pl.when(phase == DATA).then(pl.lit("cpu_data"))
        .when(~phase.is_in(TRAINING).fill_null(False)).then(pl.lit(beside))
        .when(is_product).then(pl.lit("cpu_products")).otherwise(pl.lit("cpu_ops")).alias("row")
    )  # fmt: skip
    held = pl.col("row").replace_strict(dict(parts), default=0, return_dtype=pl.Float64)
    left = (held / pl.col("duration_ns").sum().over("row")).clip(0, 1).fill_nan(0)
    nothing = [pl.lit(0, pl.Int64).alias(name) for name in ("least_ns", "good_ns")]
    return work.select("event", "duration_ns", row).with_columns(
        (pl.col("duration_ns") * left).floor().cast(pl.Int64).alias("ns"), *nothing
    )


def _largest(ops: pl.DataFrame, steps: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    """Return the ops that take most of the traced steps, each by where it is called, with its own time alone."""
    keys = ("phase", "module", "name")
    inside = ops.filter(pl.col("step").is_not_null()).with_columns(pl.col(keys).cast(pl.String))
    sums = (pl.len() / num_steps).alias("num_calls"), (pl.col("self_ns").sum() / num_steps).alias("time_ns")
    share = (pl.col("time_ns") / (max(1, length_ns(steps)) / num_steps)).alias("share")
    table = inside.group_by(keys).agg(sums).with_columns(share)
    return table.sort("time_ns", *keys, descending=[True, False, False, False], nulls_last=True).head(_MOST_OPS)

"""The ops of a CPU as the work of a device, so that what reads GPU work reads them too."""

from dataclasses import replace

import polars as pl

from stepscope.analysis.kernels.kernel_classes import UNCLASSIFIED, classify_kernels
from stepscope.analysis.kernels.kernel_name_tables import VIEWS
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import matches

_OP = r"^\w+::\w+$"  # of torch or an extension; names of the engine's wrappers have more parts
_LEAST_NS = 20_000  # of an op of no known class that counts: a shorter one reads or wraps a number
_WITHOUT_WORK = rf"^aten::({'|'.join(sorted(VIEWS))}|(new_)?empty(_like|_strided)?)$"


def with_cpu_work(linked: Linked, factor: float) -> Linked:
    """Return a trace whose device table has the ops of its steps, each for its own time; `factor` is how long a step
    takes without the profiler, as a share of a traced one.

    An op is its own launch. Views and ops on single numbers do nothing, and of an op that calls another of its class,
    such as aten::linear, the inner one does the work.
    """
    host = linked.host
    names = host["name"].cast(pl.String)
    is_op = (host["kind"] == "op") & host["step"].is_not_null() & matches(host["name"], _OP)
    has_size = host["shapes"].cast(pl.String).str.contains(r"\d").fill_null(True)
    ops = host.filter(is_op & has_size & ~names.str.contains(_WITHOUT_WORK)).with_columns(
        pl.col("name").cast(pl.String)
    )
    kinds = classify_kernels(ops.select(pl.lit("").alias("name"), pl.col("name").alias("op"), kind=pl.lit("kernel")))
    ops = ops.with_columns(kinds["class"]).filter(
        (pl.col("class") != UNCLASSIFIED) | (pl.col("self_ns") >= _LEAST_NS)
    )
    inner = ops.select(pl.col("parent").alias("row"), "class")
    texts = linked.device.schema
    table = ops.join(inner, on=["row", "class"], how="anti", maintain_order="left").select(
        pl.col("row").alias("event"),
        pl.lit("kernel").cast(texts["kind"]).alias("kind"),
        pl.col("name").cast(texts["name"]),
        pl.lit(0, pl.Int32).alias("device"),
        pl.col("thread").cast(pl.Int64).alias("stream"),
        "start_ns",
        (pl.col("self_ns") * factor).round().cast(pl.Int64).alias("duration_ns"),
        "end_ns",
        pl.col("row").alias("launch"),
        pl.col("row").alias("op"),
        pl.col("name").cast(texts["name"]).alias("op_name"),
        "module",
        pl.lit("compute").cast(texts["activity"]).alias("activity"),
        "class",
        "step",
        "phase",
    )
    return replace(linked, device=table.sort("start_ns", "event"))

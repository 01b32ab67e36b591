"""GPU work with the op that launched it and that op's cost."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.op_costs import COLUMNS
from stepscope.analysis.costs.roofline import costed_calls
from stepscope.analysis.kernels.recomputed import is_run_again
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.names import matches
from stepscope.analysis.structure.nesting import ancestor, climb

# Autograd's wrappers around backward ops, which nobody called.
COMPILED = r"^CompiledFunction|^Torch-Compiled Region|^## Call CompiledFxGraph"
_AUTOGRAD = r"^autograd::|Backward\d*$|^torch::autograd::|^CompiledFunction|AccumulateGrad$"


def work(linked: Linked) -> pl.DataFrame:
    """Return GPU work by time, one row per event.

    `call` is the row of the launching op, `op` its name. `root` is the row of the outermost op that the program
    called (for the backward, the op it belongs to), `root_op` its name. `is_compiled` marks work of torch.compile.
    `flops`, `bytes`, `dtype` and `peak_dtype` are those of the whole call and stand at its longest event.
    """
    host, device = linked.host, linked.device
    calls = costed_calls(linked).filter(pl.col("op").is_not_null())
    costs = calls.select(pl.col("op").alias("call"), "flops", "bytes", "dtype", "peak_dtype")
    called = host["forward"].gather(device["op"])
    # A checkpoint recomputes a forward inside a backward.
    is_backward = called.is_not_null() & ~is_run_again(host).gather(device["op"])
    called = called.zip_with(is_backward.fill_null(False), device["op"])
    roots = outermost_op(host, called)
    table = device.select(
        "event", "kind", "name", "class", "activity", "start_ns", "duration_ns", "device", "stream", "step", "phase",
        "module", pl.col("op").alias("call"), pl.col("op_name").alias("op"), roots.alias("root"),
        host["name"].gather(roots).alias("root_op"),
        ancestor(host, matches(host["name"], COMPILED)).gather(device["op"]).is_not_null().alias("is_compiled"),
        *(host[text].gather(device["op"]).alias(text) for text in COLUMNS if text != "name"),
    )  # fmt: skip
    table = table.join(costs, on="call", how="left", maintain_order="left")
    is_longest = pl.col("duration_ns").rank("ordinal", descending=True).over("call") == 1
    return table.with_columns(
        pl.when(is_longest).then(pl.col(name)).alias(name) for name in ("flops", "bytes", "dtype", "peak_dtype")
    )


def outermost_op(host: pl.DataFrame, rows: pl.Series) -> pl.Series:
    """Return rows of ops moved up as long as the event above is an op that somebody called."""
    is_called = (host["kind"] == "op") & ~matches(host["name"], _AUTOGRAD)

    def goes_up(_: pl.Series, above: pl.Series) -> pl.Series:
        return is_called.gather(above).fill_null(False)

    return climb(rows, host["parent"].gather, goes_up)

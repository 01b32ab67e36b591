"""GPU work with the op that launched it and that op's cost."""

import polars as pl

from stepscope.analysis.costs.op_costs import COLUMNS
from stepscope.analysis.costs.roofline import costed_calls
from stepscope.analysis.kernels.recomputed import is_run_again
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.names import matches
from stepscope.analysis.structure.nesting import ancestor, outermost

_COMPILED = r"^CompiledFunction|^Torch-Compiled Region|^## Call CompiledFxGraph"
# Autograd's wrappers around backward ops.
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
    origins = origins_of(host, device["op"])
    table = device.select(
        "event", "kind", "name", "class", "activity", "start_ns", "duration_ns", "device", "stream", "step", "phase",
        "module", pl.col("op").alias("call"), pl.col("op_name").alias("op"),
        *origins.drop("is_backward"),
        *(host[text].gather(device["op"]).alias(text) for text in COLUMNS if text != "name"),
    )  # fmt: skip
    table = table.join(costs, on="call", how="left", maintain_order="left")
    is_longest = pl.col("duration_ns").rank("ordinal", descending=True).over("call") == 1
    return table.with_columns(pl.when(is_longest).then(pl.col("flops", "bytes", "dtype", "peak_dtype")))


def origins_of(host: pl.DataFrame, rows: pl.Series) -> pl.DataFrame:
    """Return where the program called each op: `root`, `root_op`, `is_backward`, `is_compiled`.

    The root is the outermost op that the program called; for a backward op, that of its forward op.
    """
    forward = host["forward"].gather(rows)
    # A checkpoint recomputes a forward inside a backward.
    is_backward = (forward.is_not_null() & ~is_run_again(host).gather(rows)).fill_null(False)
    is_called = (host["kind"] == "op") & ~matches(host["name"], _AUTOGRAD)
    roots = outermost(host, forward.zip_with(is_backward, rows), is_called)
    compiled = ancestor(host, matches(host["name"], _COMPILED)).gather(rows)
    return pl.DataFrame(
        {
            "root": roots,
            "root_op": host["name"].gather(roots),
            "is_backward": is_backward,
            "is_compiled": compiled.is_not_null(),
        }
    )

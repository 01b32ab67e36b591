"""Host time by module compared with the GPU work it launches: where many small kernels could be one."""

import polars as pl

from stepscope.analysis.memory.module_tree import starred
from stepscope.analysis.structure.links import Linked

_GROUP = ("module", "phase")


def host_spans(linked: Linked) -> pl.DataFrame:
    """Return figures per step by module (numbers starred) and phase, the largest `uncovered_ns` first.

    `num_ops` counts ops called by the program or autograd, `host_ns` excludes inner modules, `device_ns` is kernel
    time, `uncovered_ns` how much longer the host takes than the GPU. A null `module` is code outside all modules.
    """
    host, device = linked.host, linked.device
    num_steps = max(1, linked.steps.num)
    names = pl.concat([host["module"].cast(pl.String), device["module"].cast(pl.String)]).unique().drop_nulls()
    short = {name: starred(name) for name in names}
    module = pl.col("module").cast(pl.String).replace(short)
    phase = pl.col("phase").cast(pl.String)

    def in_steps(events: pl.DataFrame, is_counted: pl.Series, num: str, time: str, total: str) -> pl.DataFrame:
        counted = events.with_columns(is_counted.alias(num)).filter(pl.col("step").is_not_null())
        return counted.group_by(module, phase).agg(pl.col(num).sum().cast(pl.Int64), pl.col(time).sum().alias(total))

    is_called = (host["kind"] == "op") & host["op"].gather(host["parent"]).is_null()
    on_host = in_steps(host, is_called, "num_ops", "self_ns", "host_ns")
    on_device = in_steps(device, device["kind"] == "kernel", "num_kernels", "duration_ns", "device_ns")
    figures = ("num_ops", "num_kernels", "host_ns", "device_ns")
    table = on_host.join(on_device, on=_GROUP, how="full", coalesce=True, nulls_equal=True)
    return (
        table.with_columns(pl.col(name).fill_null(0) / num_steps for name in figures)
        .with_columns((pl.col("host_ns") - pl.col("device_ns")).clip(0).alias("uncovered_ns"))
        .select(*_GROUP, *figures, "uncovered_ns")
        .sort("uncovered_ns", "host_ns", "module", "phase", descending=[True, True, False, False], nulls_last=True)
    )

"""The work of a step in one table: the kernels of a GPU, or the ops of a CPU by their own time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import polars as pl

from stepscope.analysis.time.cpu_ledger import PRODUCTS
from stepscope.errors import Unavailable
from stepscope.session.case import WORTH_SHARE, WORTH_WITHOUT_GPU, Case

CPU_ROWS = ("cpu_products", "cpu_ops", "cpu_outside", "cpu_python")
_NAMES = ["event", "kind", "op", "class", "start_ns", "duration_ns", "step", "phase", "module", "call",
          "shapes", "dtypes", "inputs"]  # fmt: skip
_LOOKUPS = "aten::embedding|aten::_embedding_bag|aten::index_select|aten::index_add"


@dataclass(frozen=True)
class OpWork:
    case: Case
    table: pl.DataFrame
    """The columns of `Case.work` in `_NAMES`, with names as text. On a CPU, `event` is the row of an op, and
    `duration_ns` is as in steps without the profiler."""

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows of the ledger that hold it; on a GPU, the events do."""
        return CPU_ROWS if self.case.is_on_cpu else ()

    def saving_ns(self, gone: Iterable[int], durations_ns: Mapping[int, float]) -> float:
        """Return what a step saves without some work, and with `durations_ns` of other work; 0 if too little."""
        if not self.case.is_on_cpu:
            saving_ns = self.case.saving_ns(self.case.without(gone, durations_ns))
            return saving_ns if saving_ns >= WORTH_SHARE * self.case.step_ns else 0.0
        every = dict(self.table.select("event", "duration_ns").iter_rows())
        less_ns = sum(every[event] - ns for event, ns in durations_ns.items()) + sum(every[event] for event in gone)
        saving_ns = less_ns / self.case.num_steps
        return saving_ns if saving_ns >= WORTH_WITHOUT_GPU * self.case.step_ns else 0.0


def clean_factor(case: Case) -> float:
    """Return how long a step without the profiler takes, as a share of a traced one on a CPU."""
    traced_ns = (case.replay.end_ns - case.replay.start_ns) / case.num_steps
    return case.step_ns / max(1.0, traced_ns)


def op_work(case: Case, needs_shapes: bool = False) -> OpWork:
    """Return the work of the typical steps; Unavailable without a trace, or without shapes that are needed."""
    if not case.is_on_cpu:
        if needs_shapes:
            case.with_shapes()
        texts = pl.col("kind", "op", "class", "phase", "module", "shapes", "dtypes", "inputs").cast(pl.String)
        return OpWork(case, case.work.select(_NAMES).with_columns(texts))
    host = case.within(case.linked.host.filter(pl.col("kind") == "op", pl.col("step").is_not_null()))
    if host.is_empty() or (needs_shapes and host["shapes"].null_count() == host.height):
        raise Unavailable("The trace has no ops with shapes in its steps. Record with record_shapes=True.")
    factor = clean_factor(case)
    name = pl.col("name").cast(pl.String)
    kinds = (
        pl.when(name.is_in(PRODUCTS)).then(pl.lit("gemm")).when(name.str.contains(_LOOKUPS))
        .then(pl.lit("embedding_index")).otherwise(pl.lit("elementwise"))
    )  # fmt: skip
    table = host.select(
        pl.col("row").alias("event"),
        pl.lit("kernel").alias("kind"),
        name.alias("op"),
        kinds.alias("class"),
        "start_ns",
        (pl.col("self_ns") * factor).alias("duration_ns"),
        "step",
        pl.col("phase", "module").cast(pl.String),
        pl.col("row").alias("call"),
        pl.col("shapes", "dtypes", "inputs").cast(pl.String),
    )
    return OpWork(case, table)

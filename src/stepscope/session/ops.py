"""The ops of a case's steps with what became of their results."""

from functools import cached_property
from typing import Any

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.op_log import logged_ops, runs_unseen
from stepscope.session.per_step import PerStep


class Ops(PerStep):
    """What a case can say of the ops of its steps, if its recording has a log of them."""

    @property
    def allocations(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def linked(self) -> Linked:
        raise NotImplementedError

    @property
    def all_work(self) -> pl.DataFrame:
        raise NotImplementedError

    @property
    def work(self) -> pl.DataFrame:
        raise NotImplementedError

    @property
    def clean_share(self) -> float:
        raise NotImplementedError

    @cached_property
    def logged_steps(self) -> pl.DataFrame:
        """The ops of all steps with the line behind each and the use of its result (`op_log.py`); `self_ns` is the
        time of their work on the GPU if there is one."""
        ops = logged_ops(self.allocations, self.linked.host)
        if self.is_on_cpu:
            return ops
        spent = self.all_work.group_by(row="call").agg(pl.col("duration_ns").sum().cast(pl.Int64).alias("self_ns"))
        return (
            ops.drop("self_ns")
            .join(spent, on="row", how="left", maintain_order="left")
            .with_columns(pl.col("self_ns").fill_null(0))
        )

    @property
    def op_share(self) -> float:
        """The time of an op without the profiler ÷ its `self_ns` in `logged_steps`."""
        return self.clean_share if self.is_on_cpu else 1.0

    @cached_property
    def hides_reads(self) -> bool:
        """Whether code ran that the log of ops does not see, such as compiled code: what it read is unknown."""
        return runs_unseen(self.work)

"""Tables of a case's steps summed up per step, as numbers and as text."""

from collections.abc import Sequence

import polars as pl

from stepscope.formatting import duration, plural, whole_percent

LENGTH = (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")


class PerStep:
    """What a case with its steps can say of a table."""

    @property
    def num_steps(self) -> int:
        raise NotImplementedError

    @property
    def step_ns(self) -> float:
        raise NotImplementedError

    @property
    def average_ns(self) -> float:
        raise NotImplementedError

    @property
    def is_on_cpu(self) -> bool:
        raise NotImplementedError

    @property
    def unit(self) -> str:
        """What its work consists of."""
        return "op" if self.is_on_cpu else "kernel"

    def total_ns(self, table: pl.DataFrame, time: pl.Expr | None = None) -> float:
        """Return the sum of a table's durations in ns, per step."""
        return float(table.select(_time(table, time).sum()).item() or 0) / self.num_steps

    def grouped(
        self, table: pl.DataFrame, count: str, *keys: str, time: pl.Expr | None = None, more: Sequence[pl.Expr] = ()
    ) -> pl.DataFrame:
        """Return the number of rows and their time, both per step, by `keys`; the longest first."""
        time = _time(table, time)
        rows = table.group_by(keys, maintain_order=True).agg(
            (pl.len() / self.num_steps).alias(count), *more, time.sum() / self.num_steps
        )
        return rows.sort(time.meta.output_name(), descending=True)

    def number_text(self, table: pl.DataFrame, noun: str, nouns: str = "") -> str:
        """Return the number of a table's rows per step with their noun, as `plural` does: `24 kernels`."""
        noun, nouns = (text.replace("kernel", self.unit) for text in (noun, nouns))
        return plural(table.height / self.num_steps, noun, nouns)

    def cost_text(self, cost: float | pl.DataFrame) -> str:
        """Return a time, or that of a table, per step, of the average step: `15.7 ms per step (25 % of 61.7 ms)`."""
        ns = self.total_ns(cost) if isinstance(cost, pl.DataFrame) else cost
        share = f" ({whole_percent(ns / self.average_ns)} of {duration(self.average_ns, 3)})" if self.step_ns else ""
        return f"{duration(ns, 3)} per step{share}"


def _time(table: pl.DataFrame, time: pl.Expr | None) -> pl.Expr:
    own = pl.col("duration_ns") if "duration_ns" in table.columns else LENGTH
    return own if time is None else time

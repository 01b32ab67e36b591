"""Changes to a trace from a description: faster kernels, removed launches."""

import re
from collections import Counter
from collections.abc import Iterable

import polars as pl

from stepscope.analysis.structure.intervals import union
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import matches
from stepscope.analysis.time.replay import Change
from stepscope.errors import UsageError

_WAITING = r"(?i)synchronize"
FIELDS = {"class": "class", "kernel": "name", "op": "op", "called": "root_op", "module": "module", "phase": "phase"}
"""Fields to select work by, and their columns in `work`."""


class Saving(float):
    """The time that a change saves per step, in ns, with the change."""

    change: Change

    def __new__(cls, ns: float, change: Change) -> "Saving":
        saving = super().__new__(cls, ns)
        saving.change = change
        return saving

    def at_most(self, ns: float) -> "Saving":
        """Return the saving, cut to a time."""
        return Saving(min(self, ns), self.change)

    def __deepcopy__(self, memo: object) -> float:
        return float(self)


def without(linked: Linked, events: Iterable[int], is_loop: bool = False) -> Change:
    """Return the change that removes GPU work, and the host time of ops that did nothing else.

    For a removed loop, also the time and waits between removed launches.
    """
    gone = frozenset(events)
    spent = _spent_on(linked, gone)
    if not is_loop:
        return Change(gone=gone, host=stretches(spent))
    host = stretches(pl.concat([spent, _between(linked, gone)]))
    waits = linked.host.filter(matches(linked.host["name"], _WAITING)).select("event", "start_ns", "end_ns")
    around = host.select("start_ns", pl.col("end_ns").alias("until_ns"))
    inside = waits.sort("start_ns").join_asof(around, on="start_ns").filter(pl.col("end_ns") <= pl.col("until_ns"))
    return Change(gone=gone, host=host, unwaited=frozenset(inside["event"].to_list()))


def stretches(spans: pl.DataFrame, factor: float = 0.0) -> pl.DataFrame:
    """Return disjoint spans of host time of which `factor` is left."""
    return union(spans.select("start_ns", "end_ns")).with_columns(pl.lit(factor, pl.Float64).alias("factor"))


def spared_ns(change: Change) -> float:
    """Return the host time that a change spares, as traced."""
    if change.host is None or change.host.is_empty():
        return 0.0
    length = (pl.col("end_ns") - pl.col("start_ns")) * (1 - pl.col("factor"))
    return float(change.host.select(length.sum()).item())


def _spent_on(linked: Linked, gone: frozenset[int]) -> pl.DataFrame:
    """Return the spans of the highest ops and calls all of whose GPU work is removed."""
    above, is_op = linked.above, linked.is_op
    num_gone = Counter(row for event in gone for row in above.get(event, ()))
    rows = set()
    for event in gone:
        top = None
        for place, row in enumerate(above.get(event, ())):
            if num_gone[row] < linked.num_below[row] or (place and not is_op[row]):
                break
            top = row
        if top is not None:
            rows.add(top)
    return linked.host.select("start_ns", "end_ns").gather(sorted(rows))


def _between(linked: Linked, gone: frozenset[int]) -> pl.DataFrame:
    """Return spans from each removed launch to the end of the next, if that is removed too."""
    launched = linked.device.select("launch", pl.col("event").is_in(list(gone)).alias("is_gone")).drop_nulls("launch")
    launched = launched.group_by("launch").agg(pl.col("is_gone").all())
    times = linked.host.select("start_ns", "end_ns").with_row_index("launch")
    calls = launched.with_columns(pl.col("launch").cast(pl.UInt32)).join(times, on="launch").sort("start_ns")
    # An op on a CPU can contain the next launches: the time up to one that stays.
    kept_ns = pl.when(~pl.col("is_gone")).then(pl.col("start_ns")).backward_fill()
    is_between = pl.col("is_gone") & pl.col("is_gone").shift(-1)
    spans = calls.select("start_ns", pl.min_horizontal(pl.col("end_ns").shift(-1), kept_ns), is_between)
    return spans.filter("is_gone").drop("is_gone")


def choose(work: pl.DataFrame, words: str) -> pl.DataFrame:
    """Return the work that matches every `field=pattern`, separated by commas; `*` matches anything.

    A class matches by its prefix (`attention` for forward and backward), a module includes inner ones. Raises
    UsageError for unknown fields, or if nothing matches.
    """
    chosen = work
    for word in words.split(","):
        field, is_there, pattern = word.strip().partition("=")
        if field not in FIELDS or not is_there or not pattern:
            raise UsageError(f"{word!r}: write FIELD=PATTERN, where FIELD is one of {', '.join(FIELDS)}.")
        expression = ".*".join(re.escape(part) for part in pattern.strip().split("*"))
        inside = {"class": r"(_.*)?", "module": r"(\..*)?"}.get(field, "")
        names = chosen[FIELDS[field]].cast(pl.String)
        fitting = chosen.filter(names.str.contains(f"(?s)^{expression}{inside}$").fill_null(False))
        if fitting.is_empty():
            there = ", ".join(
                str(name)[:60] for name in names.drop_nulls().value_counts(sort=True)[names.name].head(6)
            )
            raise UsageError(f"{word!r} matches no GPU work; there is {there or 'nothing with such a name'}")
        chosen = fitting
    return chosen

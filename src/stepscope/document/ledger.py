"""Builds the ledger of a step: a waterfall from its whole time down to its limit, and a table."""

from itertools import accumulate

from stepscope.analysis.time.ledger import LIMIT, LOSS, RATES, ROWS, UNKNOWN, WORK, Ledger
from stepscope.document.model import Bars, Part, Series, Table
from stepscope.document.tables import columns_of, table_of
from stepscope.formatting import duration, percent

NAMES = {
    "products": "limit: products", "traffic": "limit: memory traffic",
    "cpu_products": "products", "cpu_ops": "other ops", "cpu_data": "waiting for data", "cpu_python": "Python, no op",
    "cpu_ranks": "waiting for ranks", "cpu_outside": "outside the passes", "cpu_between": "host work between steps",
    "kernel_rates": "good kernels, above the limit", "slow_products": "slow products",
    "layout": "changes of layout", "unfused": "not fused", "copies": "copies, casts",
    "scatters": "lookups, scatters", "updates": "slow updates", "recomputed": "recomputed",
    "communication": "communication", "transfers": "transfers", "idle_launch": "idle: launches",
    "idle_synchronization": "idle: host waited for GPU", "idle_data": "idle: data",
    "idle_allocator": "idle: allocator", "idle_python": "idle: Python",
    "idle_compile": "idle: compiling", "idle_other_ranks": "idle: other ranks",
    "idle_queued": "idle: between kernels", "between_steps": "between steps", "slow_steps": "slow steps",
    "idle_unknown": "idle: unknown", "unknown_work": "unknown work", "disagreement": "trace against clean steps",
}  # fmt: skip
_ORDER = (LOSS, UNKNOWN, RATES, WORK, LIMIT)
_LEAST_SHARE = 0.005  # of the step, for a bar of its own


def ledger_parts(ledger: Ledger, later_are_faster: bool) -> list[Part]:
    """Return a step from its largest loss down to the least time that its work needs.

    If steps after those that were timed took less, the title says that it is about a timed one.
    """
    rows = sorted(ledger.rows, key=lambda row: (_ORDER.index(row.kind), -row.ns))
    is_large = [row.kind in (LIMIT, WORK) or abs(row.share) >= _LEAST_SHARE for row in rows]
    bars = [(NAMES[row.id], row.ns) for row, large in zip(rows, is_large) if large]
    if rest := sum(row.ns for row, large in zip(rows, is_large) if not large):
        num_above = sum(large and row.kind not in (LIMIT, WORK) for row, large in zip(rows, is_large))
        bars.insert(num_above, ("smaller rows", rest))
    left = [ledger.step_ns - spent for spent in accumulate(ns for _, ns in bars)]
    end = "its ops" if ledger.is_of_cpu else "what its work needs"
    step = "a timed step" if later_are_faster else "a step"
    title = f"{step}'s {duration(ledger.step_ns, 3)}, down to {end}"
    row_name, meaning = (lambda row: NAMES[row.id]), (lambda row: ROWS[row.id][1])
    columns = columns_of(rows, "row kind time_ns:ns share what_it_is", row=row_name, what_it_is=meaning)
    labels, times = zip(("the step", ledger.step_ns), *bars)
    starts, series = [0.0, *(max(0.0, start) for start in left)], (Series("time", times),)
    largest = {
        "largest_ops": ("ops that take most of a traced step", ledger.largest_ops),
        "largest_lines": ("lines that take most of a step", ledger.largest_lines),
    }
    return [
        *(
            table_of(frame.rename({"name": "op", "place": "line"}, strict=False), id, what, num_shown=frame.height)
            for id, (what, frame) in largest.items()
            if frame is not None and frame.height
        ),
        Bars("ledger", title, labels, series, "time_ns", ledger.step_ns, starts, caption=limit_text(ledger)),
        Table("ledger", "ledger of a step", columns, num_shown=len(rows), page_only=True),
    ]


def limit_text(ledger: Ledger) -> str:
    """Return how far a step is from the least time that its work needs on its device."""
    if ledger.is_of_cpu:
        share = ledger.per_step_ns(WORK) / ledger.step_ns
        return f"Ops take {percent(share)} of the step. The least time they need on a CPU is unknown."
    if ledger.limit_share is None:
        return "The least time this work needs is unknown: no shapes in the trace, or no peak rates for the device."
    limit_ns, good_ns = ledger.per_step_ns(LIMIT), ledger.per_step_ns(LIMIT, RATES)
    return (
        f"The work needs at least {duration(limit_ns, 3)} on this device, {percent(ledger.limit_share)} of the step, "
        f"and {duration(good_ns, 3)} with good kernels."
    )

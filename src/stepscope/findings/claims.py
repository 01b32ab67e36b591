"""What findings claim of a step's ledger, and what none of them does.

A finding claims the GPU work that its change removes or shortens, and idle time for what else it saves. It can claim
no more than its rows hold: its saving is cut to that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import polars as pl

from stepscope.analysis.time.ledger import LOSS, ROWS, UNKNOWN, Ledger, limit_row
from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.what_if import Saving
from stepscope.findings.finding import Finding

_APART = ("cpu_data", "cpu_between")  # a change to the work of passes does not shorten them
OTHERS = (
    *(row for row in ROWS if row.startswith(("idle_", "cpu_")) and row not in _APART), "communication", "transfers"
)  # fmt: skip
"""Rows that a change claims from besides the work that it shortens."""


class Claims:
    """The claims of a step's findings, one after the other."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        names = ("event", "row", "duration_ns", "ns", "least_ns", "good_ns")
        self._events = {event: facts for event, *facts in ledger.events.select(names).iter_rows()}
        self._taken: dict[int, float] = {}  # ns that any finding would save, by event
        self._other: dict[str, float] = {}  # the same, per step, by row without events

    @property
    def step_ns(self) -> float:
        return self._ledger.step_ns

    def held_ns(self, row: str) -> float:
        """Return what a row holds per step."""
        return max(0, self._ledger.parts.get(row, 0)) / self._ledger.num_steps

    def claimed(self, finding: Finding) -> Finding:
        """Return a finding with what it claims, and a saving that is no larger."""
        if finding.saving_ns is None:
            return finding
        shorter = self._shorter(finding.saving_ns.change) if isinstance(finding.saving_ns, Saving) else {}
        claims: dict[str, float] = {}
        for event, ns in shorter.items():
            for row, part in self._parts(event, ns):
                claims[row] = claims.get(row, 0.0) + part / self._ledger.num_steps
        rest = max(0.0, finding.saving_ns - sum(claims.values()))
        others = self.split(finding.rows, rest, claims)
        if isinstance(finding.saving_ns, Saving) or not finding.rows:
            left = [row for row in OTHERS if row not in others]
            others |= self.split(left, rest - sum(others.values()), claims)
        for row, ns in others.items():
            self._other[row] = max(self._other.get(row, 0.0), ns)
        for event, ns in shorter.items():
            self._taken[event] = max(self._taken.get(event, 0.0), ns)
        claims |= {row: ns + claims.get(row, 0.0) for row, ns in others.items()}
        saving_ns = min(float(finding.saving_ns), sum(claims.values()))
        return replace(finding, saving_ns=saving_ns, claims={row: ns for row, ns in claims.items() if ns >= 1})

    def split(self, rows: Sequence[str], ns: float, claims: Mapping[str, float]) -> dict[str, float]:
        """Return a time split over rows in proportion to what they hold besides `claims`, and no more than that."""
        held = {row: max(0.0, self.held_ns(row) - claims.get(row, 0.0)) for row in rows}
        whole = sum(held.values())
        return {row: min(ns, whole) * part / whole for row, part in held.items() if part} if ns > 0 and whole else {}

    def unclaimed(self) -> dict[str, float]:
        """Return the losses and unknown times that no finding claims, in ns per step by row."""
        steps = self._ledger.num_steps
        left = {row.id: row.ns for row in self._ledger.rows if row.kind in (LOSS, UNKNOWN) and row.ns > 0}
        taken = [(row, part / steps) for event, ns in self._taken.items() for row, part in self._parts(event, ns)]
        for row, ns in (*taken, *self._other.items()):
            if row in left:
                left[row] -= ns
        return {row: ns for row, ns in left.items() if ns >= 1}

    def unclaimed_work(self, row: str) -> pl.DataFrame:
        """Return the GPU work of a row with its unclaimed loss: `event`, `loss_ns`, `ns`, `least_ns`."""
        rows = [
            (event, ns - good_ns - self._taken.get(event, 0.0), ns, least_ns)
            for event, (of, _, ns, least_ns, good_ns) in self._events.items()
            if of == row
        ]
        schema = {"event": pl.Int64, "loss_ns": pl.Float64, "ns": pl.Int64, "least_ns": pl.Int64}
        return pl.DataFrame(rows, schema=schema, orient="row").filter(pl.col("loss_ns") > 0)

    def _shorter(self, change: Change) -> dict[int, float]:
        """Return by how much each piece of GPU work becomes shorter, of the time that it takes alone."""
        changed = {
            event: self._events[event][1] - ns for event, ns in change.duration_ns.items() if event in self._events
        }
        changed |= dict.fromkeys(change.gone & self._events.keys(), float("inf"))
        return {event: min(less, self._events[event][2]) for event, less in changed.items() if less > 0}

    def _parts(self, event: int, ns: float) -> Iterator[tuple[str, float]]:
        """Return the rows that a shorter event takes from: its loss, then what good kernels leave, then the limit."""
        row, _, whole, least_ns, good_ns = self._events[event]
        rows = ((row, whole - good_ns), ("kernel_rates", good_ns - least_ns), (limit_row(row), least_ns))
        for name, held in rows:
            part = min(ns, held)
            ns -= part
            if part > 0:
                yield name, part

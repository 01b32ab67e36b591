"""Intervals of savings: how far measured savings lay from those that had been expected.

The factors come from planted causes whose saving was measured, by what bounds the step
(`benchmarks/intervals.py`, docs/diagnose.md#intervals).
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import quantiles

from stepscope.analysis.time.ledger import LIMIT, ROWS, Ledger
from stepscope.findings.finding import Finding

COVERAGE = 0.9  # of unknown cases, the share whose saving should be within its interval
GPU, HOST, MEASURED, CPU = "gpu", "host", "measured", "cpu"
FACTORS = {GPU: (0.5, 2.0), HOST: (0.45, 2.0), MEASURED: (0.8, 1.2), CPU: (0.8, 2.4)}
"""Measured ÷ expected savings: if the GPU is busy for nearly all of the step; if it also waits for its host, whose
speed without the profiler is known less well; of time that a recording measured without the profiler; on a CPU."""
_BUSY_SHARE = 0.9
_MEASURED_ROWS = ("between_steps", "slow_steps")


def kind_of(finding: Finding, ledger: Ledger) -> str:
    """Return a key of `FACTORS`."""
    measured_ns = sum(finding.claims.get(row, 0.0) for row in _MEASURED_ROWS)
    if measured_ns > sum(finding.claims.values()) / 2:
        return MEASURED
    if ledger.is_of_cpu:
        return CPU
    rows = {row: ns for row, ns in ledger.parts.items() if row not in _MEASURED_ROWS}
    idle_ns = sum(ns for row, ns in rows.items() if row.startswith("idle_") and row != "idle_queued")
    return GPU if idle_ns <= (1 - _BUSY_SHARE) * sum(rows.values()) else HOST


def interval_ns(finding: Finding, ledger: Ledger) -> tuple[float, float]:
    """Return what a finding saves at least and at most, in ns per step, in `COVERAGE` of cases."""
    low, high = FACTORS[kind_of(finding, ledger)]
    saving_ns = finding.saving_ns or 0.0
    # Nothing can save the least time that the work needs, unless the fix removes the work. Nor can a finding save
    # more than the rows that it claims hold.
    claimed_ns = sum(ns for row, ns in finding.claims.items() if ROWS[row][0] == LIMIT)
    most_ns = ledger.step_ns - ledger.per_step_ns(LIMIT) + claimed_ns
    if finding.claims:
        held_ns = sum(ledger.parts.get(row, 0) for row in finding.claims if ROWS[row][0] != LIMIT) / ledger.num_steps
        most_ns = min(most_ns, held_ns + claimed_ns)
    return low * saving_ns, max(saving_ns, min(high * saving_ns, most_ns))


def with_interval(finding: Finding, ledger: Ledger) -> Finding:
    # On a CPU, a fix with an upper bound may save next to nothing.
    if finding.saving_ns is None or (ledger.is_of_cpu and finding.upper_bound):
        return finding
    low_ns, high_ns = interval_ns(finding, ledger)
    return replace(finding, saving_low_ns=low_ns, saving_high_ns=high_ns)


def fitted(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the factors that `COVERAGE` of some measured ÷ expected savings lie between; any, for fewer than five.

    >>> fitted([0.8, 0.9, 1.0, 1.1, 1.2])
    (0.82, 1.18)
    """
    if len(ratios) < 5:
        return 0.0, float("inf")
    outside = round(2 / (1 - COVERAGE))
    cuts = quantiles(ratios, n=outside, method="inclusive")
    return round(cuts[0], 3), round(cuts[-1], 3)

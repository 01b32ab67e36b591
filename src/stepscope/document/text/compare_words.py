"""A comparison in words and figures: what the terminal and the Markdown say alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stepscope.analysis.comparison.compare import Differs, Pair, Table
from stepscope.analysis.comparison.gates import UNDECIDED, Comparison
from stepscope.analysis.comparison.metrics import FEWEST, METRICS, NO_DIFFERENCE, RUNS, SAME, STEPS, TOO_FEW, Change
from stepscope.analysis.comparison.significance import SIGNIFICANCE
from stepscope.analysis.time.phases import UNATTRIBUTED
from stepscope.formatting import average, milliseconds, percent, plural, significant, size

MINUS = "−"
BY = {
    "phase": "by phase",
    "module": "by module",
    "kernel_class": "by kernel class",
    "op": "by op",
    "memory": "by what is alive at the peak",
    "trace": "where it comes from in a trace",
}
# Rows that moved less than this share of the one that moved most are told together.
WORTH_A_ROW = 0.01


def figure(value: float, unit: str) -> str:
    """A metric's value with its unit.

    >>> figure(2_770_000, "ns"), figure(0.5, "share")
    ('2.770 ms', '50.0 %')
    """
    if unit == "ns":
        return milliseconds(value).replace("-", MINUS)
    return {"bytes": size, "share": percent, "count": average}.get(unit, significant)(value).replace("-", MINUS)


def signed(text: str, value: float) -> str:
    """The text of a magnitude with the value's sign; what rounds to nothing has none.

    >>> signed("4.9 %", -0.049), signed("0.0 %", -0.0001)
    ('−4.9 %', '0.0 %')
    """
    return f"{'+' if value > 0 else MINUS}{text}" if any(digit in text for digit in "123456789") else text


def change_text(change: Change) -> str:
    """The change as a share; where there is none, as a figure."""
    if change.share is None:
        return signed(figure(abs(change.delta), change.unit), change.delta)
    return signed(percent(abs(change.share)), change.share)


def interval_text(change: Change) -> str:
    """The interval of the change, or nothing."""
    if change.low is None or change.high is None:
        return ""
    return f"{signed(percent(abs(change.low)), change.low)} to {signed(percent(abs(change.high)), change.high)}"


def p_text(p_value: float) -> str:
    """The p-value, as far as it says something.

    >>> p_text(0.0002), p_text(0.0412)
    ('p < 0.001', 'p = 0.041')
    """
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.2g}"


def headline(comparison: Comparison) -> str:
    """What was found, in a sentence or two."""
    if len(comparison.pairs) == 1:
        return _pair_sentence(comparison.pairs[0], comparison)
    counts: dict[str, int] = {}
    for pair in comparison.pairs:
        verdict = "not comparable" if pair.refused else step_verdict(pair)
        counts[verdict] = counts.get(verdict, 0) + 1
    told = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    sentence = f"{plural(len(comparison.pairs), 'point')} compared: {told}."
    largest = most_changed(comparison)
    change = None if largest is None else largest.change("step_time")
    if largest is not None and change is not None and change.verdict not in (NO_DIFFERENCE, TOO_FEW):
        sentence += f" Most at {largest.name}: {change_text(change)} ({interval_text(change)})."
    return sentence


def step_verdict(pair: Pair) -> str:
    """The verdict on the step's time, or that there is none."""
    change = pair.change("step_time")
    return "without a step time" if change is None else change.verdict


def most_changed(comparison: Comparison) -> Pair | None:
    """The pair whose step changed most, those with a verdict first."""

    def weight(pair: Pair) -> tuple[bool, float]:
        change = pair.change("step_time")
        if change is None:
            return False, -1.0
        return change.verdict not in (NO_DIFFERENCE, TOO_FEW), abs(change.share or 0.0)

    compared = [pair for pair in comparison.pairs if pair.changes]
    return max(compared, key=weight, default=None)


def _pair_sentence(pair: Pair, comparison: Comparison) -> str:
    if pair.refused:
        told = "; ".join(f"{each.what}: {value_text(each.base)} and {value_text(each.new)}" for each in pair.refused)
        option = ",".join(each.what for each in pair.refused)
        return f"Not comparable: they differ in {told}. If the comparison is about that: --allow {option}"
    change = pair.change("step_time")
    if change is None:
        reason = next((each.reason for each in pair.missing if each.what == "step_time"), "neither side has one")
        return f"No step time to compare: {reason}."
    what = "a traced step" if comparison.kind == "trace" else "a step"
    before, after = figure(change.base, change.unit), figure(change.new, change.unit)
    took = f"{what} takes {after} instead of {before}, {change_text(change)}"
    counts, unit = " and ".join(map(str, change.num_samples or ())), change.samples_are or STEPS
    if change.verdict == TOO_FEW:
        fewest = f"{FEWEST[unit]} on each side are the least"
        return f"Too few samples for a verdict: {counts} {unit}, where {fewest}; {took}."
    tested = f"95 % interval {interval_text(change)}, {p_text(change.p_value or 0.0)}"
    tested += f", {counts} runs" if unit == RUNS else ""
    if change.verdict == NO_DIFFERENCE:
        return f"No difference shown: {took} ({tested}). {_why_none(change, comparison.threshold_share)}"
    return f"{change.verdict.capitalize()}: {took} ({tested}){_mostly(pair)}."


def _why_none(change: Change, threshold_share: float) -> str:
    if change.is_significant:
        return f"That is more than noise, and below the threshold of {percent(threshold_share)}."
    shown = f"Samples like these show a change of {percent(change.detectable_share or 0.0)} four times out of five."
    if change.p_value is not None and change.p_value < SIGNIFICANCE:
        return f"The rank test sees one, the interval of the medians does not exclude 0. {shown}"
    return shown


def _mostly(pair: Pair) -> str:
    """The part that moved most in the direction of the whole."""
    table = next((table for table in pair.tables if table.by == "phase"), None)
    if table is None or not table.delta:
        return ""
    largest = max(table.rows, key=lambda row: row.delta * table.delta)
    if largest.delta * table.delta <= 0 or largest.name == UNATTRIBUTED:
        return ""
    part = "most of it" if abs(largest.delta) >= abs(table.delta) / 2 else "the largest part"
    return f"; {part} in {largest.name} ({delta_text(table, largest.delta)})"


def verdict_text(change: Change) -> str:
    """The verdict; where nothing was shown, from what on something would have been."""
    if change.verdict == NO_DIFFERENCE and change.detectable_share is not None and not change.is_significant:
        return f"{change.verdict} (shown from {percent(change.detectable_share)})"
    return change.verdict


def title_of(metric: str) -> str:
    """A metric as people say it; tables by their names."""
    return METRICS[metric].title if metric in METRICS else BY.get(metric, metric)


def shown_tables(pair: Pair) -> list[Table]:
    """The tables worth a look: not those of a change that is within the noise, or below the threshold."""
    quiet = {"ns": "step_time", "bytes": "peak_memory"}
    changes = {unit: pair.change(metric) for unit, metric in quiet.items()}
    none = {
        unit for unit, change in changes.items() if change is not None and change.verdict in (NO_DIFFERENCE, SAME)
    }
    return [table for table in pair.tables if table.delta and table.unit not in none]


def lacks(pair: Pair) -> list[str]:
    """What could not be told; where no change of time was shown, nobody asks where it comes from."""
    step = pair.change("step_time")
    is_quiet = step is not None and step.verdict == NO_DIFFERENCE
    told = [f"{title_of(each.what)}: {each.reason}" for each in pair.missing if each.what in METRICS or not is_quiet]
    if pair.unchecked:
        told.append(f"whether these are the same in both: {', '.join(pair.unchecked)}")
    return told


def table_title(table: Table) -> str:
    """What the rows add up to."""
    return f"{BY[table.by]} ({delta_text(table, table.delta)} of {table.of})"


def level_text(table: Table, value: float) -> str:
    """A figure of a table: all times of one table with the same decimals, as many as its largest change asks for."""
    if table.unit != "ns":
        return figure(value, table.unit)
    largest = max(abs(row.delta) for row in table.rows) / 1e6
    decimals = min(6, max(0, 2 - math.floor(math.log10(largest)))) if largest else 2
    return f"{value / 1e6:,.{decimals}f} ms".replace("-", MINUS)


def delta_text(table: Table, delta: float) -> str:
    """A change of a table's figure, with its sign."""
    return signed(level_text(table, abs(delta)), delta)


def shown_rows(table: Table, most: int) -> list[tuple[str, float, float, float]]:
    """Name, base, new and delta of the rows that moved most; the others are one row: the deltas still add up."""
    named = [row for row in table.rows if row.name != UNATTRIBUTED]
    largest = max(abs(row.delta) for row in table.rows)
    shown = [row for row in named[:most] if abs(row.delta) >= WORTH_A_ROW * largest and row.delta]
    rest = [row for row in named[len(shown) :] if row.base or row.new]
    shown, rest = ([*shown, *rest], []) if len(rest) == 1 else (shown, rest)
    rows = [(row.name, row.base, row.new, row.delta) for row in shown]
    if rest:
        base, new, delta = (sum(getattr(row, name) for row in rest) for name in ("base", "new", "delta"))
        rows.append((f"{len(rest)} more" if shown else f"all {len(rest)}", base, new, delta))
    return rows + [(row.name, row.base, row.new, row.delta) for row in table.rows if row.name == UNATTRIBUTED]


def common_differs(pairs: Sequence[Pair]) -> list[Differs]:
    """What differs, and alike in every pair."""
    first, *others = pairs
    return [each for each in first.differs if all(each in pair.differs for pair in others)]


def value_text(value: Any) -> str:
    """A setting's value."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return average(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def gate_sentence(comparison: Comparison) -> str:
    """What became of the gates, in one line; nothing without gates."""
    counts: dict[str, int] = {}
    for gate in comparison.gates:
        counts[gate.status] = counts.get(gate.status, 0) + 1
    told = ", ".join(f"{number} {status}" for status, number in counts.items())
    hint = " (a gate never passes on missing data)" if UNDECIDED in counts else ""
    return f"{plural(len(comparison.gates), 'gate')}: {told}{hint}" if told else ""

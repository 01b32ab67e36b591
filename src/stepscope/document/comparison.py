"""Builds a comparison as a document: the verdict, gates, every metric, where the change comes from, what differs."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from stepscope.analysis.comparison import metrics
from stepscope.analysis.comparison.compare import PASSED, UNDECIDED, Comparison, Pair, TableRow
from stepscope.analysis.comparison.compare import Table as Parts
from stepscope.analysis.comparison.metrics import METRICS, NO_DIFFERENCE, NONE_SHOWN, Change
from stepscope.analysis.comparison.significance import SIGNIFICANCE
from stepscope.analysis.time.phases import UNATTRIBUTED
from stepscope.document.model import Document, Fact, Facts, Missing, Part, Section, Table
from stepscope.document.whole_run_comparison import whole_run_parts
from stepscope.formatting import average, milliseconds, percent, plural, significant, size, whole_percent

CONTRADICTS_SHARE = 0.05  # of the throughput: as much may come from what lies between steps
MINUS = "−"
BY = {
    "phase": "by phase", "module": "by module", "kernel_class": "by kernel class", "op": "by op",
    "memory": "by what is alive at the peak", "trace": "where it comes from in a trace",
}  # fmt: skip
_TWO_TIMES = "The step time is that of a typical step, the rate that of the whole loop, with slow steps and pauses."
_LEAST_SHARE_OF_LARGEST = 0.01  # rows that moved less than this share of the one that moved most are shown as one


def comparison_document(comparison: Comparison, num_rows: int = 8) -> Document:
    """Return the comparison; tables of names have `num_rows` rows, and the rest of them in one row."""
    pairs, is_one = comparison.pairs, len(comparison.pairs) == 1
    detailed = pairs[0] if is_one else _most_changed(comparison)
    first: list[Part] = [Facts((Fact("base", comparison.base), Fact("new", comparison.new)))]
    if comparison.gates:
        first.append(_gates(comparison))
    if not is_one:
        first.append(_points(comparison))
    elif pairs[0].changes:
        first.append(_metrics(pairs[0], comparison.kind))
    only = {"base": comparison.only_in_base, "new": comparison.only_in_new}
    alone = tuple(Fact(f"only in {side}", ", ".join(names)) for side, names in only.items() if names)
    first += [Facts(alone, "points without a counterpart")] if alone else []
    sections = [Section("changes", "Changes", tuple(first))]
    if detailed is not None:
        at = "" if is_one else f" at {detailed.name}"
        # Changes within the noise or the threshold have no causes.
        changes = [detailed.change("step_time"), detailed.change("peak_memory")]
        same = (NO_DIFFERENCE, metrics.DISTURBED, metrics.SAME)
        unchanged = {change.unit for change in changes if change and change.verdict in same}
        shown = [table for table in detailed.tables if table.delta and table.unit not in unchanged]
        tables = tuple(_parts(table, num_rows) for table in shown)
        sections.append(Section("causes", f"Where the change comes from{at}", tables))
        sections.append(Section("differences", "What else differs", tuple(_differences(detailed, pairs))))
    if comparison.runs is not None:
        sections.append(Section("runs", "Whole runs", tuple(whole_run_parts(comparison.runs))))
    return Document("comparison", headline(comparison), tuple(section for section in sections if section.parts))


def headline(comparison: Comparison) -> str:
    if len(comparison.pairs) == 1:
        return _pair_sentence(comparison.pairs[0], comparison)
    changes = [pair.change("step_time") for pair in comparison.pairs]
    verdicts = _counts(
        "not comparable" if pair.refused else "without a step time" if change is None else change.verdict
        for pair, change in zip(comparison.pairs, changes)
    )
    sentence = f"{plural(len(comparison.pairs), 'point')} compared: {verdicts}."
    largest = _most_changed(comparison)
    change = None if largest is None else largest.change("step_time")
    if largest is not None and change is not None and change.verdict not in NONE_SHOWN:
        sentence += f" The largest change is at {largest.name}: {change_text(change)} ({interval_text(change)})."
    return sentence


def _counts(words: Iterable[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in Counter(words).items())


def _most_changed(comparison: Comparison) -> Pair | None:
    """Return the pair whose step time changed most, those with a verdict first."""

    def weight(pair: Pair) -> tuple[bool, float]:
        change = pair.change("step_time")
        if change is None:
            return False, -1.0
        return change.verdict not in NONE_SHOWN, abs(change.share or 0.0)

    return max((pair for pair in comparison.pairs if pair.changes), key=weight, default=None)


def _pair_sentence(pair: Pair, comparison: Comparison) -> str:
    if pair.refused:
        both = "; ".join(f"{each.what} ({_text(each.base)} and {_text(each.new)})" for each in pair.refused)
        option = ",".join(each.what for each in pair.refused)
        return f"Not comparable: the two differ in {both}. To compare them anyway, add --allow {option}."
    change = pair.change("step_time")
    if change is None:
        reason = next((each.reason for each in pair.missing if each.what == "step_time"), "neither side has one")
        return f"No step time to compare: {reason}."
    what = "a traced step" if comparison.kind == "trace" else "a step"
    before, after = figure(change.base, change.unit), figure(change.new, change.unit)
    took = f"{what} takes {after} instead of {before}, {change_text(change)}"
    counts, unit = " and ".join(map(str, change.num_samples or ())), change.samples_are or metrics.STEPS
    if change.verdict == metrics.TOO_FEW:
        needed = f"each side needs at least {metrics.FEWEST[unit]}"
        return f"Too few samples for a verdict: {counts} {unit}, and {needed}. Measured: {took}."
    tested = f"95 % interval {interval_text(change)}, {p_text(change.p_value or 0.0)}"
    tested += f", {counts} runs" if unit == metrics.RUNS else ""
    however = _however(pair, change)
    if change.verdict == metrics.DISTURBED:  # a rank test of single steps says nothing about the others on the cores
        return f"Cannot tell: {took} (95 % interval {interval_text(change)}). {_disturbed(change)}"
    if change.verdict == NO_DIFFERENCE:
        return f"No difference shown: {took} ({tested}). {_why_none(change, comparison.threshold_share)}{however}"
    return f"{change.verdict.capitalize()}: {took} ({tested}){_largest_part(pair)}.{however}"


def _however(pair: Pair, change: Change) -> str:
    """Return what the throughput of all steps says if it contradicts the steps that are compared."""
    rate = pair.change("tokens_per_second") or pair.change("samples_per_second")
    if rate is None or rate.share is None or change.share is None or rate.verdict == change.verdict:
        return ""
    is_against = change.verdict == NO_DIFFERENCE or rate.share * change.share > 0
    is_unlike = change.is_disturbed or any(each.what == "tokens" for each in pair.allowed)
    if is_unlike or not is_against or abs(rate.share) <= CONTRADICTS_SHARE:
        return ""
    text = f"{METRICS[rate.metric].title} of the whole loop changed by {change_text(rate)}"
    return f" But {text}: other steps are not like those compared here."


def _disturbed(change: Change) -> str:
    base, new = map(whole_percent, change.others_shares or (0.0, 0.0))
    return (
        f"Other processes used the CPU cores: training waited for one {base} of the time (base) and {new} (new). "
        "Compare several runs of each, made in turns: --base … --new …"
    )


def _why_none(change: Change, threshold_share: float) -> str:
    if change.is_significant:
        return f"The change is larger than the noise but below the threshold of {percent(threshold_share)}."
    power = f"These samples detect a change of {percent(change.detectable_share or 0.0)} four times out of five."
    if change.p_value is not None and change.p_value < SIGNIFICANCE:
        return f"The rank test detects a change, but the interval of the medians includes 0. {power}"
    return power


def _largest_part(pair: Pair) -> str:
    """Return the part that moved most in the direction of the whole."""
    table = next((table for table in pair.tables if table.by == "phase"), None)
    if table is None or not table.delta:
        return ""
    largest = max(table.rows, key=lambda row: row.delta * table.delta)
    if largest.delta * table.delta <= 0 or largest.name == UNATTRIBUTED:
        return ""
    part = "most of it" if abs(largest.delta) >= abs(table.delta) / 2 else "the largest part"
    return f"; {part} is in {largest.name} ({_delta(table, largest.delta)})"


def _gates(comparison: Comparison) -> Table:
    rows = []
    for gate in sorted(comparison.gates, key=lambda gate: gate.status == PASSED):
        change = "" if gate.share is None else signed(percent(abs(gate.share)), gate.share)
        rows.append((gate.status, f"{gate.metric}:{100 * gate.limit_share:g}%", gate.pair or "", change, gate.reason))
    statuses = [gate.status for gate in comparison.gates]
    note = "A gate never passes on missing data." if UNDECIDED in statuses else ""
    titles = ("gate", "limit", "point", "change", "reason")
    return _table("gates", f"Gates: {_counts(statuses)}", titles, rows, note=note, below=("reason",))


def _cells(change: Change) -> tuple[str, ...]:
    base, new = figure(change.base, change.unit), figure(change.new, change.unit)
    return base, new, change_text(change), change.verdict, interval_text(change)


def _metrics(pair: Pair, kind: str) -> Table:
    rows = [(METRICS[change.metric].title, *_cells(change)) for change in pair.changes]
    has_rate = any(pair.change(f"{unit}_per_second") for unit in ("tokens", "samples"))
    note = _TWO_TIMES if kind == "recording" and has_rate and pair.change("step_time") else ""
    titles = ("metric", "base", "new", "change", "verdict", "95 % interval")
    return _table("metrics", "Metrics", titles, rows, note=note)


def _points(comparison: Comparison) -> Table:
    rows = []
    for pair in comparison.pairs:
        step, peak = pair.change("step_time"), pair.change("peak_memory")
        why = "not comparable: " + ", ".join(each.what for each in pair.refused) if pair.refused else ""
        why = why or "; ".join(each.reason for each in pair.missing if each.what == "step_time")
        *cells, interval = [""] * 5 if step is None else _cells(step)
        cells += ["" if peak is None else change_text(peak), interval]
        rows.append((pair.name or pair.base, *cells, "" if step is not None else why))
    titles = ("point", "base", "new", "change", "verdict", "peak memory", "95 % interval", "reason")
    known = titles if any(row[-1] for row in rows) else titles[:-1]
    return _table("points", "Step time of every point", known, rows, below=("reason",))


def _parts(table: Parts, num_rows: int) -> Table:
    rows = [
        (row.name, _delta(table, row.delta), _level(table, row.base), _level(table, row.new))
        for row in _shown_rows(table, num_rows)
    ]
    title = f"{BY[table.by]} ({_delta(table, table.delta)} of {table.of})"
    return _table(f"by_{table.by}", title, ("name", "change", "base", "new"), rows)


def _shown_rows(table: Parts, num_rows: int) -> list[TableRow]:
    """Return the rows that moved most; one row holds the others, so deltas add up."""
    named = [row for row in table.rows if row.name != UNATTRIBUTED]
    least = _LEAST_SHARE_OF_LARGEST * max(abs(row.delta) for row in table.rows)
    shown = [row for row in named[:num_rows] if abs(row.delta) >= least and row.delta]
    rest = [row for row in named[len(shown) :] if row.base or row.new]
    if len(rest) > 1:
        base, new, delta = (sum(getattr(row, name) for row in rest) for name in ("base", "new", "delta"))
        rest = [TableRow(f"{len(rest)} more" if shown else f"all {len(rest)}", base, new, delta)]
    return [*shown, *rest, *(row for row in table.rows if row.name == UNATTRIBUTED)]


def _differences(pair: Pair, pairs: Sequence[Pair]) -> Iterator[Part]:
    first, *others = pairs
    common = [each for each in first.differs if all(each in other.differs for other in others)]
    allowed = {each.what for each in pair.allowed}
    rows = [
        (each.what, _text(each.base), _text(each.new), "yes" if each.what in allowed else "")
        for each in (*pair.allowed, *(each for each in common if each.what not in allowed))
    ]
    if rows:
        titles = ("setting", "base", "new", "allowed")
        yield _table("differences", "Settings and environment", titles if allowed else titles[:3], rows)
    yield from map(Missing, _lacks(pair))
    if pair.notes:
        yield Facts(tuple(Fact("note", note) for note in pair.notes))


def _table(id: str, title: str, titles: Sequence[str], rows: Sequence[Sequence[str]], **more: Any) -> Table:
    columns = {name: [row[place] for row in rows] for place, name in enumerate(titles)}
    return Table(id, title, columns, num_shown=len(rows), **more)


def _lacks(pair: Pair) -> list[str]:
    """Return what could not be compared; if the time did not change, missing causes do not count."""
    step = pair.change("step_time")
    is_unchanged = step is not None and step.verdict in (NO_DIFFERENCE, metrics.DISTURBED)
    texts = [
        f"{METRICS[each.what].title if each.what in METRICS else BY.get(each.what, each.what)}: {each.reason}"
        for each in pair.missing
        if each.what in METRICS or not is_unchanged
    ]
    return texts + ([f"whether these are equal: {', '.join(pair.unchecked)}"] if pair.unchecked else [])


def figure(value: float, unit: str) -> str:
    """Return a metric's value with its unit.

    >>> figure(2_770_000, "ns"), figure(0.5, "share")
    ('2.770 ms', '50.0 %')
    """
    forms: dict[str, Callable[[float], str]] = {"ns": milliseconds, "bytes": size, "share": percent, "count": average}
    return forms.get(unit, significant)(value).replace("-", MINUS)


def signed(text: str, value: float) -> str:
    """Return the text of a magnitude with the value's sign; a magnitude that rounds to 0 has none.

    >>> signed("4.9 %", -0.049), signed("0.0 %", -0.0001)
    ('−4.9 %', '0.0 %')
    """
    return f"{'+' if value > 0 else MINUS}{text}" if any(digit in text for digit in "123456789") else text


def change_text(change: Change) -> str:
    """Return the change as a share, or as a figure if the base is 0."""
    if change.share is None:
        return signed(figure(abs(change.delta), change.unit), change.delta)
    return signed(percent(abs(change.share)), change.share)


def interval_text(change: Change) -> str:
    ends = [signed(percent(abs(end)), end) for end in (change.low, change.high) if end is not None]
    return " to ".join(ends) if len(ends) == 2 else ""


def p_text(p_value: float) -> str:
    """Return the p-value with two digits.

    >>> p_text(0.0002), p_text(0.0412)
    ('p < 0.001', 'p = 0.041')
    """
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.2g}"


def _level(table: Parts, value: float) -> str:
    """Return a figure of a table; all times of one table have the decimals that its largest change needs."""
    if table.unit != "ns":
        return figure(value, table.unit)
    largest = max(abs(row.delta) for row in table.rows) / 1e6
    decimals = min(6, max(0, 2 - math.floor(math.log10(largest)))) if largest else 2
    return f"{value / 1e6:,.{decimals}f} ms".replace("-", MINUS)


def _delta(table: Parts, delta: float) -> str:
    return signed(_level(table, abs(delta)), delta)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return average(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

"""Two runs side by side: what changed, whether it exceeds noise, where it comes from, what else differs, and gates.

Works on two `Subject`s. Uses only the standard library. A gate limits how much a metric may get worse; a missing
metric never passes.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stepscope.analysis.comparison import metrics
from stepscope.analysis.comparison.metrics import METRICS, THRESHOLD_SHARE, TOO_FEW, Change, Measure, change_of
from stepscope.analysis.comparison.whole_runs import WholeRuns
from stepscope.analysis.time.phases import UNATTRIBUTED
from stepscope.display import Shown
from stepscope.errors import UsageError

SCHEMA_VERSION = 1
ASPECTS = ("device", "dtype", "tokens", "parameters", "topology", "flops")
"""What two runs must have in common, unless the comparison is about it (`--allow`)."""
TABLES = ("phase", "module", "kernel_class", "op", "memory")
NO_TRACE = "trace"  # what a side without a trace lacks: the reason for missing modules, classes and ops
_TOLERANCE = {"tokens": 0.01, "flops": 0.01}
"""Batches of real text vary: means within this share are equal. Everything else must match exactly."""
_SAME_SHARE = 0.01  # within which other measured figures, such as clocks, are not listed


@dataclass(frozen=True)
class Parts:
    """One side's table: rows of a whole. The missing rest is `unattributed`."""

    of: str  # the whole; only tables of the same whole are compared
    unit: str
    whole: float
    rows: Mapping[str, float]


@dataclass(frozen=True)
class Subject:
    name: str
    measures: Mapping[str, Measure]
    identity: Mapping[str, Any]  # what must be the same, by `ASPECTS`; None if unknown
    context: dict[str, Any]  # what else may differ, and is then listed
    tables: Mapping[str, tuple[Parts, ...]] = field(default_factory=dict)
    """By kind of parts; the first kind that both sides have is compared."""
    missing: Mapping[str, str] = field(default_factory=dict)  # metric or table → why it is missing, and what to run
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TableRow:
    """One part of a change."""

    name: str
    base: float
    new: float
    delta: float


@dataclass(frozen=True)
class Table:
    """Where a change comes from: the rows' deltas add up to the whole's."""

    by: str  # `phase`, `module`, `kernel_class`, `op` (without a GPU) or `memory` (alive at the peak)
    of: str  # the whole
    unit: str
    base: float
    new: float
    delta: float
    rows: tuple[TableRow, ...]  # the largest change first; `unattributed` is the last


@dataclass(frozen=True)
class Differs:
    """Something that is not the same in both."""

    what: str
    base: Any
    new: Any


@dataclass(frozen=True)
class Missing:
    """A metric or a table that one side lacks."""

    what: str
    reason: str


@dataclass(frozen=True)
class Pair:
    """Two runs, or two points of two sweeps, to compare."""

    name: str | None  # for points: what distinguishes the pair; null if there is only one
    base: str
    new: str
    refused: tuple[Differs, ...]  # why they are not comparable; if not empty, nothing is compared
    allowed: tuple[Differs, ...]  # differences of this kind that `--allow` accepts
    unchecked: tuple[str, ...]  # what should be the same but is unknown for one of them
    differs: tuple[Differs, ...]  # environment, configuration, revision, arguments
    changes: tuple[Change, ...]
    tables: tuple[Table, ...]
    missing: tuple[Missing, ...]  # metrics and tables that one side lacks, with what to run
    notes: tuple[str, ...]

    def change(self, metric: str) -> Change | None:
        """Return the change of a metric; None if it is missing or the pair was refused."""
        return next((change for change in self.changes if change.metric == metric), None)


def compare_pair(
    base: Subject,
    new: Subject,
    threshold_share: float = THRESHOLD_SHARE,
    allow: Collection[str] = (),
    name: str | None = None,
) -> Pair:
    """Return what changed from `base` to `new`; only what differs if they are not comparable."""
    unlike, unchecked = unlike_aspects(base.identity, new.identity)
    refused = tuple(each for each in unlike if each.what not in allow)
    tables, no_tables = ([], []) if refused else _tables(base, new)
    context = (Differs(what, base.context.get(what), new.context.get(what)) for what in base.context | new.context)
    return Pair(
        name=name,
        base=base.name,
        new=new.name,
        refused=refused,
        allowed=tuple(each for each in unlike if each.what in allow),
        unchecked=unchecked,
        differs=tuple(each for each in context if not _is_close(each.base, each.new, float, _SAME_SHARE)),
        changes=tuple(
            change_of(metric, base.measures[metric.name], new.measures[metric.name], threshold_share)
            for metric in METRICS.values()
            if not refused and metric.name in base.measures and metric.name in new.measures
        ),
        tables=tuple(tables),
        missing=() if refused else (*_missing_metrics(base, new), *no_tables),
        notes=tuple(
            f"{side}: {note}"
            for side, subject in (("base", base), ("new", new))
            for note in (*subject.notes, *metrics.correlation_warning(subject.measures.get("step_time")))
        ),
    )


def unlike_aspects(base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[Differs], tuple[str, ...]]:
    """Return the aspects in which two identities differ, and those unknown for one of them."""
    unlike, unchecked = [], []
    for aspect in ASPECTS:
        if aspect not in base and aspect not in new:
            continue  # not applicable
        before, after = base.get(aspect), new.get(aspect)
        if before is None or after is None:
            unchecked.append(aspect)
        elif not _is_close(before, after, (int, float), _TOLERANCE.get(aspect, 0)):
            unlike.append(Differs(aspect, before, after))
    return unlike, tuple(unchecked)


def _is_close(base: Any, new: Any, of: Any, share: float) -> bool:
    """Return whether two values are equal, or numbers of some types that agree within a share."""
    return base == new or (isinstance(base, of) and isinstance(new, of) and math.isclose(base, new, rel_tol=share))


def _missing_metrics(base: Subject, new: Subject) -> list[Missing]:
    """Return metrics that only one side has, and those that one side reports as missing."""
    found = []
    for name in METRICS:
        sides = [(side, subject) for side, subject in (("base", base), ("new", new)) if name not in subject.measures]
        if len(sides) == 1 or any(name in subject.missing for _, subject in sides):
            found.append(Missing(name, _reasons([(side, subject.missing.get(name)) for side, subject in sides])))
    return found


def _tables(base: Subject, new: Subject) -> tuple[list[Table], list[Missing]]:
    """Return the tables that both have, and why others are missing; a missing trace is reported once."""
    sides = (("base", base), ("new", new))
    known = {*base.tables, *new.tables, *base.missing, *new.missing}
    tables, missing = [], []
    for by in (NO_TRACE, *TABLES):
        others = {parts.of: parts for parts in new.tables.get(by, ())}
        both = next(((parts, others[parts.of]) for parts in base.tables.get(by, ()) if parts.of in others), None)
        if both is not None:
            tables.append(_table(by, *both))
        elif by in known and (
            by in (NO_TRACE, "memory") or not any(NO_TRACE in subject.missing for _, subject in sides)
        ):
            lacking = [(side, subject.missing.get(by)) for side, subject in sides if not subject.tables.get(by)]
            reason = _reasons([(side, why) for side, why in lacking if why or by != NO_TRACE])
            if not lacking:  # both have it, of another whole
                reason = f"not comparable: {_reasons([(side, subject.tables[by][0].of) for side, subject in sides])}"
            missing.append(Missing(by, reason))
    return tables, missing


def _reasons(lacking: list[tuple[str, str | None]]) -> str:
    reasons = [why or "not there" for _, why in lacking]
    if len(reasons) == 2 and reasons[0] == reasons[1]:
        return f"both: {reasons[0]}"
    return "; ".join(f"{side}: {why}" for (side, _), why in zip(lacking, reasons))


def _table(by: str, base: Parts, new: Parts) -> Table:
    before, after = _with_unattributed(base), _with_unattributed(new)
    pairs = [(name, before.get(name, 0), after.get(name, 0)) for name in {**before, **after}]
    rows = [TableRow(name, old, now, now - old) for name, old, now in pairs]
    rows.sort(key=lambda row: (row.name == UNATTRIBUTED, -abs(row.delta)))
    return Table(by, base.of, base.unit, base.whole, new.whole, new.whole - base.whole, tuple(rows))


def _with_unattributed(parts: Parts) -> dict[str, float]:
    """Return the rows with `unattributed`, so that they add up to the whole."""
    rows = {name: value for name, value in parts.rows.items() if name != UNATTRIBUTED}
    return {**rows, UNATTRIBUTED: parts.whole - sum(rows.values())}


PASSED, FAILED, UNDECIDED = "passed", "failed", "undecided"
EXIT_FINE, EXIT_FAILED, EXIT_NOT_COMPARABLE = 0, 3, 4
_ROUNDING = 1e-9
_GATE = re.compile(r"([a-z_]+):([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%")


@dataclass(frozen=True)
class Gate:
    """A limit given with `--fail-on`."""

    metric: str
    limit_share: float


@dataclass(frozen=True)
class GateResult:
    """The result of a gate for one pair."""

    metric: str
    limit_share: float
    pair: str | None  # the point's name; null if there is one pair
    status: str
    """`passed`, `failed`, or `undecided`: not comparable, missing, too few samples, or too noisy for the limit."""
    share: float | None  # the metric's change
    reason: str


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The result of `stepscope compare`; `to_json()` is what `--json` prints."""

    kind: str  # `recording`, `bench` or `trace`
    base: str
    new: str
    threshold_share: float  # smaller changes are treated as noise
    pairs: tuple[Pair, ...]  # one pair; for sweeps, one per common point
    only_in_base: tuple[str, ...]  # points without a counterpart
    only_in_new: tuple[str, ...]
    gates: tuple[GateResult, ...]
    runs: WholeRuns | None = None
    """Both runs from start to end; null unless both sides are one recording with a history."""

    @property
    def exit_code(self) -> int:
        """0 fine, 3 a gate failed, 4 not comparable or too few samples (for a gate, else for the step time)."""
        statuses = {gate.status for gate in self.gates}
        if FAILED in statuses:
            return EXIT_FAILED
        steps = [change for pair in self.pairs if (change := pair.change("step_time")) is not None]
        is_compared = bool(statuses) or any(change.verdict != TOO_FEW for change in steps)
        return EXIT_FINE if is_compared and UNDECIDED not in statuses else EXIT_NOT_COMPARABLE

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain values (docs/compare.md)."""
        return {"schema_version": SCHEMA_VERSION, "exit_code": self.exit_code, **asdict(self)}


def parse_gate(text: str) -> Gate:
    """Return a gate from its text; UsageError that lists the known metrics.

    >>> parse_gate("step_time:3%")
    Gate(metric='step_time', limit_share=0.03)
    """
    metric = text.partition(":")[0].strip()
    if metric not in METRICS:
        raise UsageError(f"--fail-on {text}: unknown metric {metric!r}. Choose from {', '.join(METRICS)}.")
    found = _GATE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--fail-on {text}: write METRIC:LIMIT%, for example {metric}:3%.")
    return Gate(metric, float(found.group(2)) / 100)


def decide(gates: Sequence[Gate], pairs: Sequence[Pair], only_in_base: Sequence[str]) -> tuple[GateResult, ...]:
    """Return every gate's result for every pair; a point missing in the new sweep leaves each gate undecided."""
    results = []
    for gate in gates:
        for pair in pairs:
            change = pair.change(gate.metric)
            status, reason = _decide(gate, pair, change)
            share = None if change is None else change.share
            results.append(GateResult(gate.metric, gate.limit_share, pair.name, status, share, reason))
        for name in only_in_base:
            lacks = "the point is only in the base"
            results.append(GateResult(gate.metric, gate.limit_share, name, UNDECIDED, None, lacks))
    return tuple(results)


def _decide(gate: Gate, pair: Pair, change: Change | None) -> tuple[str, str]:
    """Return the status of a gate, and why."""
    if pair.refused:
        return UNDECIDED, f"not comparable: {', '.join(each.what for each in pair.refused)} differs"
    if change is None:
        reason = next(
            (each.reason for each in pair.missing if each.what == gate.metric),
            "neither side has it; stepscope show lists what a run has",
        )
        return UNDECIDED, f"missing: {reason}"
    if change.verdict == TOO_FEW:
        counts = " and ".join(map(str, change.num_samples or ()))
        unit = change.samples_are or metrics.STEPS
        return UNDECIDED, f"too few samples: {counts} {unit}, but each side needs at least {metrics.FEWEST[unit]}"
    if change.share is None:
        return (FAILED, "it was 0 before") if change.is_worse else (PASSED, "no worse")
    detectable = change.detectable_share or 0.0
    if change.is_disturbed:
        return UNDECIDED, "other processes used the CPU cores: record several runs of each in turns"
    if change.is_significant is False and detectable > gate.limit_share:
        reason = f"changes below {100 * detectable:.1f} % are not detectable, which exceeds the limit"
        return UNDECIDED, f"{reason}: record more {change.samples_are}"
    if not change.is_worse:
        return PASSED, "no worse"
    if abs(change.share) <= gate.limit_share + _ROUNDING:
        return PASSED, "worse, within the limit"
    if change.is_significant is False:
        return PASSED, "within the noise, which is below the limit"
    return FAILED, "worse by more than the limit"

"""Two runs side by side: what changed, whether that is more than noise, where it comes from, what else differs.

Works on two `Subject`s, whatever they were read from. The standard library alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stepscope.analysis.comparison.metrics import (
    METRICS,
    STEPS,
    THRESHOLD_SHARE,
    Change,
    Measure,
    change_of,
    neighbors_correlation,
)
from stepscope.analysis.comparison.significance import MIN_SAMPLES
from stepscope.analysis.time.phases import UNATTRIBUTED

SCHEMA_VERSION = 1
ASPECTS = ("device", "dtype", "tokens", "parameters", "topology", "flops")
"""What two runs must have in common, unless the comparison is about it (`--allow`)."""
TABLES = ("phase", "module", "kernel_class", "op", "memory")
NO_TRACE = "trace"
"""What a side is said to lack when it has no trace at all: that is why modules, classes and ops are not told."""
_TOLERANCE = {"tokens": 0.01, "flops": 0.01}
"""Batches of real text vary: up to this share the means of two runs are called equal. All else must be."""
# Neighboring steps that correlate more than chance makes 20 or more of them do, with 95 % probability.
_CORRELATED = 1.645


@dataclass(frozen=True)
class Parts:
    """One side's table: rows that belong to a whole. What they lack is `unattributed`."""

    of: str
    """What the whole is: tables are only held against each other where that is the same."""
    unit: str
    whole: float
    rows: Mapping[str, float]


@dataclass(frozen=True)
class Subject:
    """One of the two that are compared, whatever it was read from."""

    name: str
    measures: Mapping[str, Measure]
    identity: Mapping[str, Any]
    """What must be the same, by `ASPECTS`; None: not known."""
    context: Mapping[str, Any]
    """What else may differ and is then said."""
    tables: Mapping[str, tuple[Parts, ...]] = field(default_factory=dict)
    """By what the parts are; of several kinds, the first that both sides have is compared."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Metric or table → why it is not there, and what to run."""
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

    by: str
    """One of `phase`, `module`, `kernel_class`, `op` (without a GPU) and `memory` (what is alive at the peak)."""
    of: str
    """What the whole is."""
    unit: str
    base: float
    new: float
    delta: float
    rows: tuple[TableRow, ...]
    """The largest change first; `unattributed` is the last."""


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
    """Two runs, or two points of two sweeps, that belong together."""

    name: str | None
    """Of points: what tells the pair from others; null where there is one pair."""
    base: str
    new: str
    refused: tuple[Differs, ...]
    """What makes them not comparable; when there is any, nothing is compared."""
    allowed: tuple[Differs, ...]
    """The same, where the comparison is about it."""
    unchecked: tuple[str, ...]
    """What would have to be the same and is not known of both."""
    differs: tuple[Differs, ...]
    """Environment, configuration, revision, arguments."""
    changes: tuple[Change, ...]
    tables: tuple[Table, ...]
    missing: tuple[Missing, ...]
    """Metrics and tables that one side lacks, with what to run."""
    notes: tuple[str, ...]

    def change(self, metric: str) -> Change | None:
        """The change of a metric; None where it is missing or the pair was refused."""
        return next((change for change in self.changes if change.metric == metric), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_pair(
    base: Subject,
    new: Subject,
    threshold_share: float = THRESHOLD_SHARE,
    allow: Collection[str] = (),
    name: str | None = None,
) -> Pair:
    """What changed from `base` to `new`; nothing but what differs where they are not comparable."""
    unlike, unchecked = unlike_aspects(base.identity, new.identity)
    refused = tuple(each for each in unlike if each.what not in allow)
    tables, no_tables = ([], []) if refused else _tables(base, new)
    changes = [] if refused else _changes(base, new, threshold_share)
    return Pair(
        name=name,
        base=base.name,
        new=new.name,
        refused=refused,
        allowed=tuple(each for each in unlike if each.what in allow),
        unchecked=unchecked,
        differs=_differing(base.context, new.context),
        changes=tuple(changes),
        tables=tuple(tables),
        missing=() if refused else (*_missing_metrics(base, new), *no_tables),
        notes=tuple(
            f"{side}: {note}"
            for side, subject in (("base", base), ("new", new))
            for note in (*subject.notes, *_restlessness(subject))
        ),
    )


def unlike_aspects(base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[Differs], tuple[str, ...]]:
    """The aspects in which two identities differ, and those that are not known of both."""
    unlike, unchecked = [], []
    for aspect in ASPECTS:
        if aspect not in base and aspect not in new:
            continue  # there is no such thing
        before, after = base.get(aspect), new.get(aspect)
        if before is None or after is None:
            unchecked.append(aspect)
        elif aspect in _TOLERANCE and isinstance(before, (int, float)) and isinstance(after, (int, float)):
            if not math.isclose(before, after, rel_tol=_TOLERANCE[aspect]):
                unlike.append(Differs(aspect, before, after))
        elif before != after:
            unlike.append(Differs(aspect, before, after))
    return unlike, tuple(unchecked)


def _differing(base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Differs, ...]:
    names = dict.fromkeys([*base, *new])
    both = [Differs(name, base.get(name), new.get(name)) for name in names]
    return tuple(each for each in both if each.base != each.new and not _is_close(each.base, each.new))


def _is_close(base: Any, new: Any) -> bool:
    """Whether two measured figures, as of clocks, are the same within 1 %."""
    return isinstance(base, float) and isinstance(new, float) and math.isclose(base, new, rel_tol=0.01)


def _changes(base: Subject, new: Subject, threshold_share: float) -> list[Change]:
    return [
        change_of(metric, base.measures[name], new.measures[name], threshold_share)
        for name, metric in METRICS.items()
        if name in base.measures and name in new.measures
    ]


def _missing_metrics(base: Subject, new: Subject) -> list[Missing]:
    """Metrics that one side has and the other not, and those that one says are missing."""
    found = []
    for name in METRICS:
        sides = [(side, subject) for side, subject in (("base", base), ("new", new)) if name not in subject.measures]
        if len(sides) == 1 or any(name in subject.missing for _, subject in sides):
            found.append(Missing(name, _reasons([(side, subject.missing.get(name)) for side, subject in sides])))
    return found


def _tables(base: Subject, new: Subject) -> tuple[list[Table], list[Missing]]:
    """The tables that both have, and why others are not there: a trace that one lacks is said once."""
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
            missing.append(Missing(by, _reasons([(side, why) for side, why in lacking if why or by != NO_TRACE])))
    return tables, missing


def _reasons(lacking: list[tuple[str, str | None]]) -> str:
    """Why one side, or both, lack something."""
    if not lacking:
        return "the two were measured in ways that cannot be held against each other"
    told = [why or "not there" for _, why in lacking]
    if len(told) == 2 and told[0] == told[1]:
        return f"both: {told[0]}"
    return "; ".join(f"{side}: {why}" for (side, _), why in zip(lacking, told))


def _table(by: str, base: Parts, new: Parts) -> Table:
    before, after = _filled(base), _filled(new)
    names = [name for name in dict.fromkeys([*before, *after]) if name != UNATTRIBUTED]
    rows = [_row(name, before.get(name, 0), after.get(name, 0)) for name in names]
    rows.sort(key=lambda row: -abs(row.delta))
    rows.append(_row(UNATTRIBUTED, before[UNATTRIBUTED], after[UNATTRIBUTED]))
    return Table(by, base.of, base.unit, base.whole, new.whole, new.whole - base.whole, tuple(rows))


def _row(name: str, base: float, new: float) -> TableRow:
    return TableRow(name, base, new, new - base)


def _filled(parts: Parts) -> dict[str, float]:
    """The rows with `unattributed`, whatever it was called before: all of them add up to the whole."""
    rows = {name: value for name, value in parts.rows.items() if name != UNATTRIBUTED}
    return {**rows, UNATTRIBUTED: parts.whole - sum(rows.values())}


def _restlessness(subject: Subject) -> list[str]:
    """What the order of the steps says: a machine that is not at rest makes neighboring steps alike."""
    measure = subject.measures.get("step_time")
    if measure is None or measure.of != STEPS or len(measure.samples or ()) < MIN_SAMPLES:
        return []
    samples = measure.samples or ()
    correlation = neighbors_correlation(samples)
    if correlation <= _CORRELATED / math.sqrt(len(samples)):
        return []
    return [
        f"neighboring steps are alike (correlation {correlation:.2f}): the machine was not at rest, or the work "
        "drifts, and the interval is too narrow; record both several times, in turns, and name all: --base … --new …"
    ]

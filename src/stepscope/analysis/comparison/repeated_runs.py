"""Several runs as one side of a comparison, with each run as one sample.

Steps of one run share the machine's state, so they do not show how much runs vary. A side's figure is the geometric
mean over its runs, and its test uses the runs (`significance.difference_of_runs`).
"""

from collections.abc import Iterable, Sequence
from statistics import fmean, geometric_mean, median
from typing import Any

from stepscope.analysis.comparison.compare import Parts, Subject, unlike_aspects
from stepscope.analysis.comparison.metrics import METRICS, RUNS, Measure
from stepscope.errors import NotComparableError


def one_side(runs: Sequence[Subject]) -> Subject:
    """Return the runs as one subject; NotComparableError if they are not of the same thing.

    A metric that one run lacks is missing for the side.
    """
    first = runs[0]
    identity = dict(first.identity)
    for run in runs[1:]:
        unlike, unknown = unlike_aspects(first.identity, run.identity)
        if unlike:
            differences = ", ".join(f"{each.what}: {each.base} and {each.new}" for each in unlike)
            raise NotComparableError(
                f"{first.name} and {run.name} were passed as runs of the same thing but differ in {differences}"
            )
        identity |= dict.fromkeys(unknown)
    return Subject(
        name=", ".join(run.name for run in runs),
        measures={
            name: _measure(name, [run.measures[name] for run in runs])
            for name in first.measures
            if all(name in run.measures for run in runs)
        },
        identity=identity,
        context={name: _common([run.context.get(name) for run in runs]) for name in _names(r.context for r in runs)},
        tables={name: _tables([run.tables.get(name, ()) for run in runs]) for name in _names(r.tables for r in runs)},
        missing=_missing(runs),
        notes=(*_spread(runs), *(f"{run.name}: {note}" for run in runs for note in run.notes)),
    )


def _measure(name: str, measures: Sequence[Measure]) -> Measure:
    values = [measure.value for measure in measures]
    if any(measure.samples is None for measure in measures):
        return Measure(median(values))
    costs = tuple(1 / value if METRICS[name].is_rate else value for value in values)
    return Measure(geometric_mean(values), costs, RUNS)


def _tables(tables: Sequence[Sequence[Parts]]) -> tuple[Parts, ...]:
    """Return the tables that all runs have: rows are means over runs, the whole is that of the metric."""
    found = []
    for parts in tables[0]:
        alike = [next((other for other in run if other.of == parts.of), None) for run in tables]
        runs = [each for each in alike if each is not None]
        if len(runs) == len(tables):
            rows = {name: fmean(run.rows.get(name, 0.0) for run in runs) for name in _names(r.rows for r in runs)}
            wholes = [run.whole for run in runs]
            whole = geometric_mean(wholes) if parts.unit == "ns" and min(wholes) > 0 else median(wholes)
            found.append(Parts(parts.of, parts.unit, whole, rows))
    return tuple(found)


def _missing(runs: Sequence[Subject]) -> dict[str, str]:
    """Return why something is missing, from the first run that lacks it."""
    found: dict[str, str] = {}
    for run in runs:
        lacks = {name: "not there" for other in runs for name in (*other.measures, *other.tables)}
        have = {*run.measures, *(name for name, parts in run.tables.items() if parts)}
        lacks = {name: why for name, why in {**lacks, **run.missing}.items() if name not in have}
        named = {name: why if run.name in why else f"{run.name}: {why}" for name, why in lacks.items()}
        found = {**named, **found}
    return found


def _common(values: Sequence[Any]) -> Any:
    """Return what the runs have in common; measured figures as means, other differences as one text."""
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, float) for value in values):
        return fmean(values)
    return " / ".join(dict.fromkeys(str(value) for value in values))


def _spread(runs: Sequence[Subject]) -> list[str]:
    steps = [run.measures["step_time"].value for run in runs if "step_time" in run.measures]
    if len(steps) < 2:
        return []
    times = ", ".join(f"{ns / 1e6:,.4g}" for ns in steps)
    return [f"{len(steps)} runs with {times} ms per step: up to {100 * (max(steps) / min(steps) - 1):.1f} % apart"]


def _names(mappings: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))

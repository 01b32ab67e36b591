"""From a study's folder to its report: what was asked, what was found, how it was measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stepscope.analysis.comparison.sweeps import NOISY_SHARE, OK
from stepscope.document.model import Fact, Facts, Missing, Report, Section, Table, Text, Value
from stepscope.errors import Unavailable
from stepscope.formatting import plural, safe
from stepscope.studies.figures import without_folders
from stepscope.studies.stored import Stored
from stepscope.studies.study import Question, Recordings, Study
from stepscope.version import __version__


def report_of_study(study: Study, stored: Stored) -> Report:
    """The report: every question a section, before them the answers in short, after them how it was measured."""
    answered = [(question, stored.parts(question.answer)) for question in study.questions]
    measured = _measured(study, stored)
    sections = [
        Section("overview", "Overview", (_facts(study, stored), *_in_short(answered))),
        *(Section(question.id, question.title, parts) for question, parts in answered),
        Section("method", "Method", measured),
    ]
    found = [part for _, parts in answered for part in parts]
    said = [part.text for kind in (Text, Missing) for part in found if isinstance(part, kind)]
    verdict = said[0] if said else "The study asks no question."
    facts: dict[str, Value] = {"source": str(stored.folder), "stepscope": __version__, "study": study.name}
    return Report(study.title, verdict, tuple(sections), facts)


def _in_short(answered: Iterable[tuple[Question, tuple[Any, ...]]]) -> tuple[Any, ...]:
    """The first sentence of every answer, or why there is none."""
    rows = []
    for question, parts in answered:
        first = next((part for part in parts if isinstance(part, (Text, Missing))), None)
        rows.append(Fact(question.title, first.text if first else "–"))
    return (Facts(tuple(rows), "Answers"),)


def _facts(study: Study, stored: Stored) -> Facts:
    facts = stored.facts
    commands = dict.fromkeys(safe(str(command), 500) for command in facts.get("commands") or ())
    rows = [
        Fact("study", study.name, study.about),
        Fact("mode", stored.mode, f"on {safe(str(facts.get('device')))}"),
        *(Fact("made by", command, f"stepscope {safe(str(facts.get('stepscope')))}") for command in commands),
    ]
    for text in _environments(study, stored):
        rows.append(Fact("ran on", text))
    return Facts(tuple(rows), "The study")


def _environments(study: Study, stored: Stored) -> list[str]:
    found: dict[str, None] = {}
    for measure in study.measures:
        try:
            environments = stored.sweep(measure.id).environments
        except Unavailable:
            continue
        for environment in environments.values():
            said = [f"{environment.get('device_name')}", f"torch {environment.get('torch')}"]
            said += [f"{name} {environment[name]}" for name in ("cuda", "driver", "python") if environment.get(name)]
            found[safe(", ".join(said), 300)] = None
    return list(found)


def _measured(study: Study, stored: Stored) -> tuple[Any, ...]:
    """What was run, and which of it has no result."""
    planned = stored.facts.get("num_points")
    columns: dict[str, list[Value]] = {
        "measure": [], "what": [], "num_planned": [], "num_points": [], "statuses": [], "num_noisy": []
    }  # fmt: skip
    failures: dict[str, list[Value]] = {"measure": [], "point": [], "status": [], "reason": []}
    for measure in study.measures:
        try:
            summary = stored.summary(measure.id)
        except Unavailable:
            continue
        for point in summary.points:
            if point.status != OK:
                failures["measure"].append(measure.id)
                failures["point"].append(safe(" ".join(f"{n}={point.axes.get(n)}" for n in summary.varying), 300))
                failures["status"].append(point.status)
                failures["reason"].append(safe(without_folders(point.reason), 300))
        how = "stepscope run" if isinstance(measure, Recordings) else "stepscope bench"
        columns["measure"].append(measure.id)
        columns["what"].append(f"{measure.about} ({how} of {measure.workload})")
        columns["num_planned"].append(planned.get(measure.id) if isinstance(planned, dict) else None)
        columns["num_points"].append(len(summary.points))
        columns["statuses"].append(
            ", ".join(f"{number} {status}" for status, number in summary.num_by_status.items())
        )
        columns["num_noisy"].append(sum(point.is_noisy for point in summary.points))
    if not any(columns["num_planned"]):  # measured before a study said it
        del columns["num_planned"]
    note = f"noisy: p90 − p10 of the samples is over {NOISY_SHARE:.0%} of their median"
    parts: list[Any] = [Table("measures", "What was measured", columns, 40, note)]
    if failures["point"]:
        title = f"{plural(len(failures['point']), 'point')} without a result"
        parts.append(Table("failures", title, failures, 40))
    return tuple(parts)

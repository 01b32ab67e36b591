"""Builds the report of a study's folder: the answers in short, each question, how it was measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stepscope.analysis.comparison.sweeps import NOISY_SHARE, OK
from stepscope.document.model import Document, Fact, Facts, Missing, Section, Table, Text, Value
from stepscope.errors import Unavailable
from stepscope.formatting import plural, safe, whole_percent
from stepscope.studies.answers import answer_of
from stepscope.studies.figures import table, without_folders
from stepscope.studies.stored import Stored
from stepscope.studies.study import Question, Recordings, Study
from stepscope.version import __version__

Answered = Iterable[tuple[Question, tuple[Any, ...]]]


def report_of_study(study: Study, stored: Stored) -> Document:
    """Return the report: an overview, one section per question, and the method."""
    answered = [(question, answer_of(question, stored)) for question in study.questions]
    sections = [
        Section("overview", "Overview", (_facts(study, stored), *_in_short(answered))),
        *(Section(question.id, question.title, parts) for question, parts in answered),
        Section("method", "Method", _measured(study, stored)),
    ]
    said = [
        part.text for kind in (Text, Missing) for _, parts in answered for part in parts if isinstance(part, kind)
    ]
    facts: dict[str, Value] = {"source": str(stored.folder), "stepscope": __version__, "study": study.name}
    return Document(study.title, said[0] if said else "The study asks no question.", tuple(sections), facts)


def _in_short(answered: Answered) -> tuple[Any, ...]:
    """Return the sentence of every answer, and what the original note says."""
    short = []
    for question, parts in answered:
        first = next((part for part in parts if isinstance(part, (Text, Missing))), None)
        short.append((question, first.text if first else "–"))
    answers = Facts(tuple(Fact(question.title, text) for question, text in short), "Answers")
    claims = tuple(Fact(question.title, question.claim) for question, _ in short if question.claim)
    return (answers, Facts(claims, "What the original note says")) if claims else (answers,)


def _facts(study: Study, stored: Stored) -> Facts:
    facts = stored.facts
    commands = dict.fromkeys(safe(str(command), 500) for command in facts.get("commands") or ())
    rows = [
        Fact("study", study.name, study.about),
        Fact("mode", stored.mode, f"on {safe(str(facts.get('device')))}"),
        *(Fact("made by", command, f"stepscope {safe(str(facts.get('stepscope')))}") for command in commands),
        *(Fact("ran on", text) for text in _environments(study, stored)),
    ]
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
    """Return what was run, and the points without a result."""
    planned = stored.facts.get("num_points")
    measures: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for measure in study.measures:
        try:
            summary = stored.summary(measure.id)
        except Unavailable:
            continue
        how = "stepscope run" if isinstance(measure, Recordings) else "stepscope bench"
        row = {"measure": measure.id, "what": f"{measure.about} ({how} of {measure.workload})"}
        row |= {"num_planned": planned[measure.id]} if isinstance(planned, dict) and measure.id in planned else {}
        statuses = ", ".join(f"{number} {status}" for status, number in summary.num_by_status.items())
        num_noisy = sum(point.is_noisy for point in summary.points)
        measures.append(row | {"num_points": len(summary.points), "statuses": statuses, "num_noisy": num_noisy})
        for point in summary.points:
            if point.status != OK:
                knobs = " ".join(f"{name}={point.axes.get(name)}" for name in summary.varying)
                row = {"measure": measure.id, "point": safe(knobs, 300), "status": point.status}
                failures.append(row | {"reason": safe(without_folders(point.reason), 300)})
    names = dict.fromkeys(name for row in measures for name in row) or ("measure",)
    note = f"noisy: p90 − p10 of the samples is over {whole_percent(NOISY_SHARE)} of their median"
    parts = [table("measures", "What was measured", measures, *names, note=note)]
    if failures:
        title = f"{plural(len(failures), 'point')} without a result"
        columns: dict[str, list[Value]] = {name: [row[name] for row in failures] for name in failures[0]}
        parts.append(Table("failures", title, columns, 40))
    return tuple(parts)

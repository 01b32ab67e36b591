"""Builds the report of a study's folder: the answers in short, each question, how it was measured.

A part of an answer that cannot be made costs only itself.
"""

import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.analysis.comparison.sweeps import NOISY_SHARE, OK
from stepscope.document.model import Chart, Document, Fact, Facts, Findings, Missing, Section, Table, Text, Value
from stepscope.errors import RecordingError, TraceError, Unavailable
from stepscope.formatting import plural, safe, whole_percent
from stepscope.studies.figures import HOST_PACED, bars, lines, table, without_folders
from stepscope.studies.stored import Rows, Stored
from stepscope.studies.study import BarsOf, ChartOf, Drawn, LinesOf, Question, Recordings, Study, TableOf
from stepscope.version import __version__

_FILE_NAME = re.compile(r"[\w+-][\w.+-]*")


def report_of_study(study: Study, stored: Stored) -> Document:
    """Return the report: an overview, one section per question, and the method."""
    answered = [(question, answer_of(question, stored)) for question in study.questions]
    said = [[part for part in parts if isinstance(part, (Text, Missing))] for _, parts in answered]
    short = [Fact(question.title, first[0].text if first else "–") for (question, _), first in zip(answered, said)]
    claims = [Fact(question.title, question.claim) for question in study.questions if question.claim]
    overview = [_facts(study, stored), Facts(tuple(short), "Answers")]
    overview += [Facts(tuple(claims), "What the original note says")] if claims else []
    sections = [
        Section("overview", "Overview", tuple(overview)),
        *(Section(question.id, question.title, parts) for question, parts in answered),
        Section("method", "Method", tuple(_measured(study, stored))),
    ]
    # The verdict is the first answer; only if there is none, why.
    verdicts = sorted((part for parts in said for part in parts), key=lambda part: isinstance(part, Missing))
    facts: dict[str, Value] = {"source": str(stored.folder), "stepscope": __version__, "study": study.name}
    verdict = verdicts[0].text if verdicts else "The study asks no question."
    return Document(study.title, verdict, tuple(sections), facts)


def answer_of(question: Question, stored: Stored) -> tuple[Any, ...]:
    """Return the parts that answer a question: the sentence, the charts, the tables. Computed once."""
    return stored.once(("answer", question.title), lambda: tuple(_parts(question, stored)))


def _parts(question: Question, stored: Stored) -> Iterator[Any]:
    """Yield every part, or why it cannot be made; one reason once."""
    makers: list[Callable[[], Iterable[Any]]] = [partial(_made, part, stored) for part in question.parts]
    if (sentence := question.sentence) is not None:
        makers.insert(0, lambda: [Text(sentence(LazyTables(question.parts, stored)))])
    if question.answer is not None:
        makers = [partial(question.answer, stored)]
    missing = set()
    for make in makers:
        try:
            yield from map(_checked, make())
        except (Exception, SystemExit) as error:
            reason = _reason(error)
            if reason not in missing:
                yield Missing(reason)
            missing.add(reason)


def _reason(error: BaseException) -> str:
    """Return why a part is missing: not measured, or a mistake in the answer with its line."""
    if isinstance(error, (Unavailable, RecordingError, TraceError)):
        return f"Not measured: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    said = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
    return f"Not answered: {safe(said, 300)}"


class LazyTables(dict[str, Rows]):
    """Rows of a question's tables by id, made when they are asked for."""

    def __init__(self, parts: Iterable[Any], stored: Stored) -> None:
        self._tables, self._stored = {part.id: part for part in parts if isinstance(part, TableOf)}, stored

    def __missing__(self, id: str) -> Rows:
        return self._stored.rows(self._tables[id])


def _made(declared: TableOf | ChartOf, stored: Stored) -> Iterator[Table | Chart]:
    """Yield a declared table or chart; nothing for an optional table without rows."""
    if isinstance(declared, TableOf):
        rows = stored.rows(declared)
        if not len(rows) and not declared.is_optional:
            raise Unavailable(f"nothing was measured for {declared.title!r}")
        if len(rows):
            names = declared.columns.split() or list(rows[0])
            notes = [
                declared.note if isinstance(declared.note, str) else declared.note(rows),
                host_bound(rows, names),
            ]
            note = "; ".join(filter(None, notes))
            yield table(declared.id, declared.title, rows, *names, note=note, num_shown=declared.num_shown)
    elif isinstance(declared, LinesOf):
        rows = stored.rows(declared.of).where(**declared.where).needed()
        yield lines(declared.id, declared.title, rows, declared.x, declared.y, declared.by.split())
    elif isinstance(declared, BarsOf):
        yield bars(declared, stored.rows(declared.of).ok.needed())
    else:
        assert isinstance(declared, Drawn)
        yield replace(declared.draw(stored), id=declared.id, title=declared.title)


def host_bound(rows: Rows, names: Collection[str]) -> str:
    """Return how many rows are host-bound, if the table shows how busy the GPU is; else ""."""
    shares = [row["gpu_busy_share"] for row in rows if row.get("gpu_busy_share") is not None]
    num_bound = sum(share < HOST_PACED for share in shares)
    if "gpu_busy_share" not in names or not num_bound:
        return ""
    return f"{num_bound} of {len(shares)} rows are host-bound (GPU busy under {whole_percent(HOST_PACED)})"


def _checked(part: Any) -> Any:
    """Return the part if it can be written."""
    if not isinstance(part, (Chart, Facts, Findings, Missing, Table, Text)):
        raise TypeError(
            f"an answer yields parts of stepscope.document.model, such as Text, not {type(part).__name__}"
        )
    if isinstance(part, (Chart, Table)) and not _FILE_NAME.fullmatch(part.id):
        raise ValueError(f"the id {part.id!r} must be a file name: letters, digits, - + _ and .")
    return part


def _facts(study: Study, stored: Stored) -> Facts:
    facts = stored.facts
    commands = dict.fromkeys(safe(str(command), 500) for command in facts.get("commands") or ())
    rows = [
        Fact("study", study.name, study.about),
        Fact("mode", stored.mode, f"on {safe(str(facts.get('device')))}"),
        *(Fact("made by", command, f"stepscope {safe(str(facts.get('stepscope')))}") for command in commands),
        *(Fact("ran on", text) for text in dict.fromkeys(_environments(study, stored))),
    ]
    return Facts(tuple(rows), "The study")


def _environments(study: Study, stored: Stored) -> Iterator[str]:
    for measure in study.measures:
        try:
            environments = stored.sweep(measure.id).environments
        except Unavailable:
            continue
        for environment in environments.values():
            said = [f"{environment.get('device_name')}", f"torch {environment.get('torch')}"]
            said += [f"{name} {environment[name]}" for name in ("cuda", "driver", "python") if environment.get(name)]
            yield safe(", ".join(said), 300)


def _measured(study: Study, stored: Stored) -> Iterator[Table]:
    """Yield what was run, and the points without a result."""
    planned = stored.facts.get("num_points")
    measures: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for measure in study.measures:
        try:
            summary = stored.summary(measure.id)
        except Unavailable:
            continue
        how = "stepscope run" if isinstance(measure, Recordings) else "stepscope bench"
        row: dict[str, Any] = {"measure": measure.id, "what": f"{measure.about} ({how} of {measure.workload})"}
        row["num_planned"] = planned.get(measure.id) if isinstance(planned, dict) else None
        row["num_points"] = len(summary.points)
        row["statuses"] = ", ".join(f"{number} {status}" for status, number in summary.num_by_status.items())
        measures.append(row | {"num_noisy": sum(point.is_noisy for point in summary.points)})
        for point in summary.points:
            if point.status != OK:
                knobs = " ".join(f"{name}={point.axes.get(name)}" for name in summary.varying)
                row = {"measure": measure.id, "point": safe(knobs, 300), "status": point.status}
                failures.append(row | {"reason": safe(without_folders(point.reason), 300)})
    note = f"noisy: p90 − p10 of the samples is over {whole_percent(NOISY_SHARE)} of their median"
    yield table("measures", "What was measured", measures, *(measures[0] if measures else ("measure",)), note=note)
    if failures:
        yield table("failures", f"{plural(len(failures), 'point')} without a result", failures, *failures[0])

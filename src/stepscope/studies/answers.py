"""Turns a declared question into parts of a report. A part that cannot be made costs only itself."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.document.model import Bars, Chart, Facts, Findings, Missing, Series, Table, Text
from stepscope.errors import RecordingError, TraceError, Unavailable
from stepscope.formatting import safe, title_of, whole_percent
from stepscope.studies.figures import HOST_PACED, known, lines, table
from stepscope.studies.stored import Rows, Stored
from stepscope.studies.study import BarsOf, ChartOf, Drawn, LinesOf, Question, TableOf

_FILE_NAME = re.compile(r"[\w+-][\w.+-]*")


def answer_of(question: Question, stored: Stored) -> tuple[Any, ...]:
    """Return the parts that answer a question: the sentence, the charts, the tables. Computed once."""
    return stored.once(("answer", question.title), lambda: tuple(_parts(question, stored)))


def _parts(question: Question, stored: Stored) -> Iterator[Any]:
    if question.answer is not None:
        yield from _free(question.answer, stored)
        return
    tables = LazyTables(question.parts, stored)
    missing: set[str] = set()
    if question.sentence is not None:
        sentence = question.sentence
        yield from _guarded(lambda: Text(sentence(tables)), missing)
    for part in question.parts:
        yield from _guarded(partial(_made, part, stored), missing)


def _made(part: TableOf | ChartOf, stored: Stored) -> Table | Chart | None:
    return _table(part, stored) if isinstance(part, TableOf) else _chart(part, stored)


def _guarded(make: Callable[[], Any], missing: set[str]) -> Iterator[Any]:
    """Yield the part, or why it cannot be made; one reason once."""
    try:
        part = make()
        if part is not None:
            yield _checked(part)
    except (Exception, SystemExit) as error:
        reason = reason_of(error)
        if reason not in missing:
            missing.add(reason)
            yield Missing(reason)


def _free(answer: Callable[[Stored], Any], stored: Stored) -> Iterator[Any]:
    """Yield the parts of an answer that is a generator, up to what it cannot make."""
    try:
        for part in answer(stored):
            yield _checked(part)
    except (Exception, SystemExit) as error:
        yield Missing(reason_of(error))


def reason_of(error: BaseException) -> str:
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


def _table(declared: TableOf, stored: Stored) -> Table | None:
    rows = stored.rows(declared)
    if not len(rows):
        if declared.is_optional:
            return None
        raise Unavailable(f"nothing was measured for {declared.title!r}")
    names = declared.columns.split() or list(rows[0])
    notes = [declared.note if isinstance(declared.note, str) else declared.note(rows), host_bound(rows, names)]
    note = "; ".join(filter(None, notes))
    return table(declared.id, declared.title, rows, *known(rows, *names), note=note, num_shown=declared.num_shown)


def host_bound(rows: Rows, names: Collection[str]) -> str:
    """Return how many rows are host-bound, if the table shows how busy the GPU is; else ""."""
    shares = [row["gpu_busy_share"] for row in rows if row.get("gpu_busy_share") is not None]
    num_bound = sum(share < HOST_PACED for share in shares)
    if "gpu_busy_share" not in names or not num_bound:
        return ""
    return f"{num_bound} of {len(shares)} rows are host-bound (GPU busy under {whole_percent(HOST_PACED)})"


def _chart(declared: ChartOf, stored: Stored) -> Chart:
    if isinstance(declared, LinesOf):
        rows = stored.rows(declared.of).where(**declared.where).needed()
        return lines(declared.id, declared.title, rows, declared.x, declared.y, declared.by.split())
    if isinstance(declared, BarsOf):
        rows = stored.rows(declared.of).ok.needed()
        ordered = sorted(rows, key=lambda row: -(row[declared.sort] or 0)) if declared.sort else list(rows)
        shown, names = ordered[: declared.num_shown], declared.values.split()
        return Bars(
            id=declared.id,
            title=declared.title,
            unit=names[0],
            labels=[", ".join(str(row[name]) for name in declared.label.split()) for row in shown],
            series=tuple(Series(title_of(name), [row.get(name) for row in shown]) for name in names),
            caption=f"The first {len(shown)} of {len(ordered)}." if len(shown) < len(ordered) else "",
        )
    assert isinstance(declared, Drawn)
    return declared.draw(stored)


def _checked(part: Any) -> Any:
    """Return the part if it can be written."""
    if not isinstance(part, (Chart, Facts, Findings, Missing, Table, Text)):
        raise TypeError(
            f"an answer yields parts of stepscope.document.model, such as Text, not {type(part).__name__}"
        )
    if isinstance(part, (Chart, Table)) and not _FILE_NAME.fullmatch(part.id):
        raise ValueError(f"the id {part.id!r} must be a file name: letters, digits, - + _ and .")
    return part

"""A study, declared: points to measure, questions, and the tables, charts and sentence that answer each.

    from stepscope.studies import LinesOf, Question, Study, Sweep, TableOf

    TIMES = TableOf("times", "Time per step", "lengths", "seq_len time_median_ns")
    STUDY = Study(
        name="lengths",
        title="How does my model scale?",
        about="Time and memory of my model by length.",
        measures=(Sweep("lengths", "model.py:build", "one step", quick=[…], full=[…]),),
        questions=(Question("Is it linear in the length?", linear, (TIMES,)),),
    )

docs/studies.md has a complete one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.document.model import Chart
    from stepscope.studies.stored import Rows, Stored

Record = Mapping[str, Any]
Records = Iterable[dict[str, Any]]  # what a function of Stored returns for a table: a list or a generator
Axes = Mapping[str, Any]  # Knob, or `preset` → one value or a list of values. The lists of one mapping multiply.
FileContent = str | bytes | Mapping[str, str | bytes]


@dataclass(frozen=True)
class Measure:
    """Points of one workload, all measured the same way."""

    id: str  # folder of its rows inside the study's folder: letters, digits, - and _
    workload: str  # a name, hf:path/to/config.json, my.module:build or path/to/file.py:build
    about: str  # one line
    quick: Sequence[Axes] | Axes  # grids of --quick: seconds per point on a CPU
    full: Sequence[Axes] | Axes  # Grids of --full. () leaves the measure out.


@dataclass(frozen=True)
class Sweep(Measure):
    """Points measured as `stepscope bench` does: clean times, peaks, proofs and correctness."""

    trace: bool = False  # keep a trace of each point
    layers: bool = False
    """Time every layer in the first call and once warm (`layers` of a row). Skips the correctness check."""


@dataclass(frozen=True)
class Recordings(Measure):
    """Points trained under `stepscope run`: one recording each."""

    options: tuple[str, ...] = ()  # options of `stepscope run`
    loop: tuple[str, ...] = ()
    """Options of the training loop. ("--data", "text", "--workers", "2") reads a text with a DataLoader."""


@dataclass(frozen=True)
class TableOf:
    """A table of an answer, made from rows. Columns without any value are left out."""

    id: str  # name of its CSV file
    title: str
    rows: Any  # a measure's id, another table, or a function of Stored that returns records
    columns: str = ""  # Names separated by spaces. "" shows every field of the first record.
    note: str | Callable[[Rows], str] = ""
    num_shown: int = 40
    is_optional: bool = False  # left out if it has no rows
    if_empty: str = ""  # what the report says if it has no rows


def table_of(id: str, title: str, columns: str = "", **options: Any) -> Callable[[RowsOf], TableOf]:
    """Return a decorator that turns a function of Stored, which returns records, into a table."""
    return lambda rows: TableOf(id, title, rows, columns, **options)


@dataclass(frozen=True)
class ChartOf:
    id: str  # name of its PNG file
    title: str


@dataclass(frozen=True)
class Drawn(ChartOf):
    """A chart drawn by a function of Stored, shown under this id and title."""

    draw: Callable[[Stored], Chart]


@dataclass(frozen=True)
class LinesOf(ChartOf):
    """y over x from the records of a table, one line per value of `by`."""

    of: Any
    x: str
    y: str
    by: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BarsOf(ChartOf):
    """One bar per record of a table, one part per column."""

    of: Any
    label: str  # columns whose values name a bar, separated by spaces
    values: str
    sort: str = ""  # sort by this column, largest first
    num_shown: int = 12


@dataclass(frozen=True)
class Question:
    """A question, and the sentence, charts and tables that answer it."""

    title: str
    sentence: Callable[[Tables], str] | None = None
    """Makes one sentence from the records of the tables: `tables["id"]` are Rows."""
    parts: tuple[TableOf | ChartOf, ...] = ()
    claim: str = ""  # what the original note said, to show beside the answer
    answer: Callable[[Stored], Iterable[Any]] | None = None
    """For anything else: yields parts of stepscope.document.model, the answering Text first."""

    @property
    def id(self) -> str:
        """Its name in the page's address.

        >>> Question("Is bf16 slower? Why?").id
        'is-bf16-slower-why'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


Tables = Mapping[str, "Rows"]
RowsOf = Callable[["Stored"], Iterable[Record]]
REPORT = None


def question(title: str, *parts: TableOf | ChartOf, claim: str = "") -> Callable[[Callable[[Tables], str]], Question]:
    """Return a decorator that turns a function of the tables, which returns the sentence, into a question."""
    return lambda sentence: Question(title, sentence, parts, claim)


@dataclass(frozen=True, kw_only=True)
class Study:
    name: str
    title: str
    about: str  # what it is about, in a line or two
    measures: tuple[Measure, ...]
    questions: tuple[Question, ...]
    files: Mapping[str, str | Callable[[Stored], FileContent] | None] = field(default_factory=dict)
    """Further files to leave, by path inside the study's folder. The value is the id of a table (.csv, .md), of a
    chart (.png) or of a measure (.json); REPORT for the report as Markdown; or a function of Stored that returns the
    content, or several contents by name if the path is a folder."""

"""What a study is: points to measure, questions to answer from them, files to leave. Declared, it measures nothing.

    from stepscope.studies import Question, Study, Sweep

    STUDY = Study(
        name="lengths",
        title="How does my model grow?",
        about="Time and memory of my model over lengths.",
        measures=(Sweep(id="lengths", workload="model.py:build", about="a step", quick=[…], full=[…]),),
        questions=(Question(title="Is it linear in the length?", answer=answer),),
    )

docs/studies.md has a whole one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.studies.stored import Stored

Axes = Mapping[str, Any]
"""A knob's name, or `preset` → a value, or a list of values; those of one mapping multiply."""
FileContent = str | bytes | Mapping[str, str | bytes]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Points of one workload, measured in one way."""

    id: str
    """The folder of its rows, inside the study's: letters, digits, - and _."""
    workload: str
    """A name, hf:path/to/config.json, my.module:build or path/to/file.py:build."""
    about: str
    """One line."""
    quick: Sequence[Axes] | Axes
    """The grids of --quick, or the one: seconds a point, also on a CPU."""
    full: Sequence[Axes] | Axes
    """Those of --full; () leaves the measure out."""


@dataclass(frozen=True, kw_only=True)
class Sweep(Measure):
    """Points as `stepscope bench` measures them: clean times, peaks, proof and correctness."""

    trace: bool = False
    """Keep a trace of each."""
    layers: bool = False
    """Time every layer in the first call and once warm: `layers` of a row. No variant is held against another."""


@dataclass(frozen=True, kw_only=True)
class Recordings(Measure):
    """Points trained under `stepscope run`: a recording each, with phases, a trace and the memory of a step."""

    options: tuple[str, ...] = ()
    """Of `stepscope run`."""
    loop: tuple[str, ...] = ()
    """Of the training loop: ("--data", "text", "--workers", "2") trains on a text that a DataLoader reads."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Something to find out, and how the answer follows from what was measured."""

    title: str
    """As it is asked."""
    answer: Callable[[Stored], Iterable[Any]]
    """Parts of a report: first a Text, which answers; then the tables and charts it is made from. Where something
    was not measured it raises Unavailable, which says what."""

    @property
    def id(self) -> str:
        """Its name in the page's address.

        >>> Question(title="Is bf16 slower? Why?", answer=list).id
        'is-bf16-slower-why'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class Study:
    """A whole investigation."""

    name: str
    title: str
    about: str
    """What it is about, in a line or two."""
    measures: tuple[Measure, ...]
    questions: tuple[Question, ...]
    files: Mapping[str, Callable[[Stored], FileContent] | None] = field(default_factory=dict)
    """Path inside the study's folder → its content, besides the report; of a folder, the files in it by name; REPORT:
    the report itself, as Markdown."""


REPORT = None

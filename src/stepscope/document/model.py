"""What a report is made of: sections of facts, tables, charts and findings. Every format is drawn from these alone.

A figure is kept as it was measured, under a name that ends in its unit (`total_ns`, `peak_bytes`, `busy_share`,
`num_calls`, `flops_per_s`); `document/cells.py` knows how each is written for people.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from stepscope.findings.diagnose import Diagnosis

Value = float | int | str | bool | None


@dataclass(frozen=True)
class Fact:
    """One thing to know: its name, what it is, how it was come by."""

    title: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Facts:
    """Facts, one below the other."""

    rows: tuple[Fact, ...]
    title: str = ""
    """Of all of them; "" where the section's says it."""


@dataclass(frozen=True)
class Text:
    """A paragraph, made from figures."""

    text: str


@dataclass(frozen=True)
class Missing:
    """What the source does not have, and what to run to get it."""

    text: str


@dataclass(frozen=True)
class Findings:
    """What is wrong, with what each costs; those with a place lead to it on the timeline."""

    diagnosis: Diagnosis
    verify: str | None = None
    """The recording that `stepscope verify` can run again; None of a bare trace."""


@dataclass(frozen=True)
class Table:
    """Rows under named columns. All of them are in CSV and JSON; a page and Markdown show the first and say so."""

    id: str
    """The name of its CSV file."""
    title: str
    columns: Mapping[str, Sequence[Value]]
    """By name, the unit at its end."""
    num_shown: int = 12
    """Rows of Markdown."""
    note: str = ""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values()), ()))


@dataclass(frozen=True)
class Series:
    """One line, or one part of every bar."""

    name: str
    y: Sequence[float | None]
    x: Sequence[float] = ()
    """Of a line; bars have the chart's labels."""
    color: str | None = None
    """A name of `render/colors.py` (a phase, a class of kernels, an owner of memory); None: the next one free."""
    low: Sequence[float | None] = ()
    """One a y: the lower end of its interval, for an error bar; () where there are none."""
    high: Sequence[float | None] = ()
    gaps: Sequence[str] = ()
    """One a y: of a y that is None, why it has none (`oom`), else "". Written at the edge, never drawn as one."""


@dataclass(frozen=True)
class Mark:
    """A place on the x axis that is worth a line across the chart, with its name."""

    x: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What every chart has."""

    id: str
    """The name of its PNG file."""
    title: str
    caption: str = ""
    """What is seen on it, in a sentence made from its figures."""


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Horizontal bars, the parts of each beside one another in one line."""

    labels: Sequence[str]
    series: tuple[Series, ...]
    unit: str
    """A column's name, for its unit: `total_ns`."""


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """Lines over x, or areas on top of one another."""

    x: str
    """What x is, as a column's name: `time_ns`, `num_tokens`."""
    y: str
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    style: Literal["lines", "steps", "areas", "dots"] = "lines"
    """`steps`: a level lasts until the next; `areas`: levels on top of one another; `dots`: with nothing between."""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, kw_only=True)
class Scatter(Chart):
    """Dots of different sizes between limits: a roofline."""

    x: str
    y: str
    points: tuple[Dot, ...]
    limits: tuple[Series, ...] = ()
    """Lines that nothing can be above."""
    log_x: bool = True
    log_y: bool = True


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    weight: float
    """Its area: a share of all; 0 of all dots: they have none, and are of one size."""
    name: str
    group: str
    """For its color."""


@dataclass(frozen=True, kw_only=True)
class Tree(Chart):
    """Parts of parts: an icicle from the top down, or a treemap."""

    shape: Literal["icicle", "treemap"]
    unit: str
    nodes: tuple[Node, ...]
    """A parent comes before its children; the first is the whole."""


@dataclass(frozen=True)
class Node:
    id: str
    parent: str
    """"" of the first."""
    name: str
    value: float
    """With everything in it: no less than what its children have together."""
    color: str | None = None


@dataclass(frozen=True, kw_only=True)
class Heat(Chart):
    """A figure over two axes; a cell without one says why (`oom`)."""

    x_title: str
    y_title: str
    x_labels: Sequence[str]
    y_labels: Sequence[str]
    unit: str
    values: Sequence[Sequence[float | None]]
    """By row of y, then x."""
    texts: Sequence[Sequence[str]]
    """What stands in each cell: the figure, or its status."""


@dataclass(frozen=True)
class Section:
    """One page of the report."""

    id: str
    title: str
    parts: tuple[Any, ...]
    """Facts, Text, Missing, Findings, Table, Chart, or what only one format can show: Timeline, Explorer."""


@dataclass(frozen=True)
class Report:
    """The whole."""

    title: str
    """What was looked at."""
    verdict: str
    sections: tuple[Section, ...]
    facts: Mapping[str, Value] = field(default_factory=dict)
    """Of the report itself: its source's path, the version that made it."""

    def parts(self, kind: type | tuple[type, ...]) -> list[Any]:
        """Every part of a kind, in order."""
        return [part for section in self.sections for part in section.parts if isinstance(part, kind)]

    def save(self, target: str | os.PathLike[str], force: bool = False) -> Path:
        """Write it as .html, .md, .json or a folder with all of them, every table as CSV and every chart as PNG."""
        from stepscope.render.write import check_target, write_report

        return write_report(self, check_target(Path(target), force))

    def _repr_html_(self) -> str:
        from stepscope.render.notebook import html_of

        return html_of(self)

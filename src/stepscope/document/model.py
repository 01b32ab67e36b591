"""What a document is made of: sections of facts, text, tables, charts and findings. Renderers compute nothing.

Figures stay as they were measured, under names that end in their unit (`total_ns`, `peak_bytes`, `busy_share`,
`num_calls`, `flops_per_s`); `formatting.py` writes each for people. Standard library only: the terminal renderer must
work where nothing but torch is installed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stepscope.display import Shown
from stepscope.findings.finding import Finding

Value = float | int | str | bool | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """What every part of a section has."""

    page_only: bool = False  # left out of the terminal and the notebook: too long, or only worth a look on the page


@dataclass(frozen=True)
class Fact:
    """One line: a name, its value, and how it was obtained."""

    title: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Facts(Part):
    """Facts, one line each."""

    rows: tuple[Fact, ...]
    title: str = ""  # a heading for all of them; empty if the section's title is enough


@dataclass(frozen=True)
class Text(Part):
    """A paragraph made from figures."""

    text: str


@dataclass(frozen=True)
class Notes(Part):
    """What needs a look now, a sentence each."""

    rows: tuple[str, ...]


@dataclass(frozen=True)
class Missing(Part):
    """What the source does not have, and what to run to get it."""

    text: str


@dataclass(frozen=True)
class Table(Part):
    """Rows under named columns. CSV and JSON have all rows; other renderers show the first and say how many more."""

    id: str  # the name of its CSV file
    title: str
    columns: Mapping[str, Sequence[Value]]  # values by column name; the name ends in the unit
    num_shown: int = 12  # rows shown in Markdown and on a terminal
    note: str = ""
    screen: tuple[str, ...] = ()
    """Columns shown on a terminal, most important first: the last are dropped on a narrow one. Empty: all columns."""
    below: tuple[str, ...] = ()
    """Columns of long text: a terminal writes them in full below their row, other renderers as any column."""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values()), ()))


@dataclass(frozen=True, repr=False, kw_only=True)
class FindingCard(Finding):
    """A finding as people read it."""

    saving: str  # what the fix saves: `up to 3.43 ms`, `1.20 GiB`, `unknown`
    saving_of: str  # what that is of: `per step (5.1 %) and 1.20 GiB of the peak`, `of the peak`
    shared: str | None  # findings with the same fix, and what it saves in total
    prove: str | None  # the command that tries the fix, or compares after a change by hand; None without a recording
    tables: tuple[Table, ...]  # the evidence


@dataclass(frozen=True)
class Findings(Part):
    """Everything that a diagnosis found, and what it could not check."""

    headline: str  # how long a step takes and what limits it; what the verdict of the document does not say already
    cards: tuple[FindingCard, ...]  # those that save most first
    summary: str  # `No problems found. 35 checks passed, 1 could not run.`
    passed: tuple[str, ...]
    unchecked: tuple[tuple[str, tuple[str, ...]], ...]
    """Reasons, each with the ids of the rules that could not run for it."""
    suppressed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)  # the diagnosis as `diagnose --json` prints it


@dataclass(frozen=True)
class Series:
    """One line, or one part of every bar."""

    name: str
    y: Sequence[float | None]
    x: Sequence[float] = ()  # of a line; bars have the chart's labels
    color: str | None = None
    """A name of `document/colors.py` (a phase, a class of kernels, an owner of memory); None: the next one free."""
    low: Sequence[float | None] = ()
    """One a y: the lower end of its interval, for an error bar; () where there are none."""
    high: Sequence[float | None] = ()
    gaps: Sequence[str] = ()
    """One a y: of a y that is None, why it has none (`oom`), else "". Written at the edge, never drawn as one."""


@dataclass(frozen=True)
class Trend:
    """A figure now, and what it was before."""

    title: str
    value: str  # now
    y: Sequence[float | None]  # over equal spans of time, the oldest first; None: unknown
    name: str  # as of a column, for the unit of `y`: `tokens_per_s`
    detail: str = ""
    from_zero: bool = True  # how it is drawn: from zero up, else from the smallest value


@dataclass(frozen=True)
class Trends(Part):
    """Figures of a run over the same span of time, one line each on a terminal."""

    rows: tuple[Trend, ...]
    span: str  # how long that is: `2 h 10 min`
    title: str = ""


@dataclass(frozen=True)
class Mark:
    """A place on the x axis that is worth a line across the chart, with its name."""

    x: float
    name: str


@dataclass(frozen=True)
class Chart(Part):
    """What every chart has."""

    id: str  # the name of its PNG file
    title: str
    caption: str = field(default="", kw_only=True)  # what is seen on it, in a sentence made from its figures


@dataclass(frozen=True)
class Bars(Chart):
    """Horizontal bars, the parts of each beside one another in one line."""

    labels: Sequence[str]
    series: tuple[Series, ...]
    unit: str  # a column's name, for its unit: `total_ns`
    whole: float | None = None  # what shares on a terminal are of; None: the sum of all values
    starts: Sequence[float] = ()  # where each bar begins, as in a waterfall; empty: at zero


@dataclass(frozen=True)
class Lines(Chart):
    """Lines over x, or areas on top of one another."""

    x: str  # what x is, as a column's name: `time_ns`, `num_tokens`
    y: str
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    style: Literal["lines", "steps", "areas", "dots"] = "lines"
    """`steps`: a level lasts until the next; `areas`: levels on top of one another; `dots`: with nothing between."""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Dot:
    """A dot of a scatter chart."""

    x: float
    y: float
    weight: float  # its area: a share of all; 0 of all dots: they have none, and are of one size
    name: str
    group: str  # for its color


@dataclass(frozen=True)
class Scatter(Chart):
    """Dots of different sizes between limits: a roofline."""

    x: str
    y: str
    points: tuple[Dot, ...]
    limits: tuple[Series, ...] = ()  # lines that nothing can be above
    log_x: bool = True
    log_y: bool = True


@dataclass(frozen=True)
class Node:
    """A rectangle of a tree map."""

    id: str
    parent: str  # "" of the first
    name: str
    value: float  # with everything in it: no less than what its children have together
    color: str | None = None


@dataclass(frozen=True)
class Tree(Chart):
    """Parts of parts: an icicle from the top down, or a treemap."""

    shape: Literal["icicle", "treemap"]
    unit: str
    nodes: tuple[Node, ...]  # a parent comes before its children; the first is the whole


@dataclass(frozen=True)
class Heat(Chart):
    """A figure over two axes; a cell without one says why (`oom`)."""

    x_title: str
    y_title: str
    x_labels: Sequence[str]
    y_labels: Sequence[str]
    unit: str
    values: Sequence[Sequence[float | None]]  # by row of y, then x
    texts: Sequence[Sequence[str]]  # what stands in each cell: the figure, or its status


@dataclass(frozen=True)
class Axis:
    """One knob that differs between points."""

    name: str
    values: tuple[Value, ...]
    """Each once: numbers from the smallest, else in the order of the sweep. None: the knob does not apply."""
    is_numeric: bool  # all values are numbers: it can be an x of its own scale, else its values stand side by side
    is_log: bool  # numbers that grow by factors (128, 256, 512): an x axis of it is logarithmic


@dataclass(frozen=True)
class Figure:
    """One figure that may be drawn."""

    name: str  # a key of `Explorer.figures`, the unit at its end: `formatting.py` writes it
    is_log: bool
    """The largest is ten times the smallest or more: its axis is logarithmic unless the reader says otherwise."""
    low: str | None = None  # the figure that is the lower end of its 95 % interval; None where it has no interval
    high: str | None = None


@dataclass(frozen=True)
class Explorer(Part):
    """The points of a sweep as columns: entry `p` of every column is of point `p`.

    To draw figure `f` over axis `x` with axis `s` as series and every other axis held at one value each (`others`):
    take the points with `places[a][p] == others[a]` for all other axes `a`; a point stands at
    `axes[x].values[places[x][p]]` in the series `axes[s].values[places[s][p]]`; its height is `figures[f][p]`, from
    `figures[low][p]` to `figures[high][p]` where the figure has an interval. A heat map is the same, `s` downwards. A
    point whose `statuses[p]` is not `ok` has None in every figure: its place is marked by the status (`oom`) and
    `reasons[p]` says more. A place where no point stands was not in the sweep.
    """

    id: str
    title: str
    axes: tuple[Axis, ...]
    places: tuple[tuple[int, ...], ...]  # by axis, then by point: which of the axis' values the point has
    figures: Mapping[str, Sequence[float | None]]  # by name; also the ends of intervals, which are not in `shown`
    shown: tuple[Figure, ...]  # what the reader may choose, the time first
    statuses: tuple[str, ...]
    reasons: tuple[str, ...]  # "" of an `ok` point
    names: tuple[str, ...]  # what tells a point from the others: `seq_len=128 attention=sdpa`
    marks: tuple[str, ...]
    """`best`, `tied` or "": of the rows that compute the same thing. Only `ok` points have one."""
    is_noisy: tuple[bool, ...]
    x: int | None  # the axis to begin with on x; None where nothing varies
    series: int | None  # the axis to begin with as series; None where only one axis varies


@dataclass(frozen=True)
class Timeline(Part):
    """Every event of a trace at every zoom; only a page can draw it."""

    meta: Mapping[str, Any]  # plain JSON: tracks, colors, where each column is in the blob, and what was left out
    blob: bytes  # columns of numbers (`sections/timeline.py`), gzip


@dataclass(frozen=True)
class Section:
    """A part of a document with a title of its own."""

    id: str
    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, repr=False)
class Document(Shown):
    """Everything there is to show about one result, whatever shows it."""

    title: str  # what was looked at
    verdict: str  # the answer in one or two sentences
    sections: tuple[Section, ...]
    facts: Mapping[str, Value] = field(default_factory=dict)
    """About the document itself: its source's path, the version that made it."""

    def parts(self, kind: type | tuple[type, ...]) -> list[Any]:
        """Return every part of a kind, in order."""
        return [part for section in self.sections for part in section.parts if isinstance(part, kind)]


def itself(document: Document) -> Document:
    return document

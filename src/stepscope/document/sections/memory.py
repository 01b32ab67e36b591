"""The section `memory` of a report: whose it was over the step, what is alive at the peak, what is largest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.memory.account import BEFORE_THE_WINDOW, REMAINDER, Account, Part
from stepscope.analysis.memory.by_owner import Alive, LevelsBy, alive_at_peak, known_split, levels_by
from stepscope.analysis.memory.module_tree import ModuleBytes
from stepscope.document.memory_facts import facts, in_words
from stepscope.document.model import Bars, Fact, Facts, Lines, Mark, Missing, Series, Table, Text, Tree
from stepscope.document.sections.trees import Branch
from stepscope.document.text.memory_text import leak_sentence, memory_verdict
from stepscope.formatting import percent, plural, safe, size
from stepscope.session.memory_view import TRACE, MemoryReport
from stepscope.session.source import Source

LEAST_STAGE = 0.04
"""Of the chart's width: a shorter stage is not named on it."""
NOT_KNOWN = "not known"
OUTSIDE = "outside every module"
_NO_TENSOR = "in no tensor"
_BY = {"owner": "owner", "phase": "the phase that allocated it"}


def parts(source: Source) -> tuple[Any, ...]:
    """The verdict, leaks, memory over the step, what is alive at the peak, the largest allocations, the allocator."""
    report, memory = source.memory, source.allocations
    found, split = report.account, known_split(memory)
    if not found.num_allocations:
        return (
            Missing(f"not one allocation on {safe(found.device, 20)} was recorded: nothing is known of its memory"),
        )
    leaks = (Text(leak_sentence(found)),) if found.left_alive else ()
    return (
        *leaks,
        Text(memory_verdict(report)),
        timeline(found, levels_by(memory, split)),
        _owners(found, split),
        *_treemap(found, alive_at_peak(memory), split),
        *_not_owned(report),
        largest(found),
        *_stages(found),
        *_kept(found),
        *_ops(found),
        Facts(tuple(Fact(title, text) for title, text in facts(report))),
        *_left_alive(found),
    )


# -- over the step ----------------------------------------------------------------------------------------------


def timeline(found: Account, levels: LevelsBy) -> Lines:
    """Levels on top of one another: at the peak they are `peak_tracked_bytes`."""
    x, name = _places(levels)
    peak = f"peak {size(found.peak_tracked_bytes)}"
    owners = [
        f"{in_words(owner)} {size(levels.levels[owner][levels.peak_index])}"
        for owner in levels.names[:3]
        if levels.levels[owner][levels.peak_index] > 0
    ]
    text = f"At the peak {size(found.peak_tracked_bytes)} are allocated: {', '.join(owners)}."
    if found.remainder_bytes:
        text += f" The allocator's own peak is {size(found.peak_bytes)}"
        more, less = "are in no tensor, and not in this chart.", ", less: it does not count all of these tensors."
        text += f": {size(found.remainder_bytes)} {more}" if found.remainder_bytes > 0 else less
    # What stays is at the bottom, so that what comes and goes is seen.
    order = sorted(levels.names, key=lambda owner: -min(levels.levels[owner]))
    return Lines(
        id="memory_timeline",
        title=f"Allocated memory of {safe(found.device, 20)}, by {_BY[levels.by]}",
        caption=text,
        x=name,
        y="allocated_bytes",
        series=tuple(Series(in_words(owner), levels.levels[owner], x, owner or "unattributed") for owner in order),
        marks=(Mark(x[levels.peak_index], peak), *_stage_marks(found, levels, x)),
        style="areas",
    )


def _places(levels: LevelsBy) -> tuple[list[float], str]:
    """The x of each point: its time, or its place in the order where some time is not known."""
    times = levels.times_ns[1:]
    if times and all(time is not None for time in times):
        known = [float(time) for time in times if time is not None]
        return [min(0.0, known[0]), *known], "time_ns"
    return [float(event) for event in levels.events], "num_allocations_and_releases"


def _stage_marks(found: Account, levels: LevelsBy, x: Sequence[float]) -> Iterator[Mark]:
    """Where stages begin that are long enough to have a name on the chart."""
    begins = []
    for stage in found.stages[1:]:
        place = next((i for i, event in enumerate(levels.events) if event >= stage.first_event), None)
        if place is not None:
            begins.append((x[place], stage.name))
    ends = [*(begin for begin, _ in begins[1:]), x[-1]]
    for (begin, name), end in zip(begins, ends):
        if name != "other" and end - begin >= LEAST_STAGE * (x[-1] - x[0]):
            yield Mark(begin, in_words(name))


# -- at the peak ------------------------------------------------------------------------------------------------


def _owners(found: Account, split: str) -> Bars:
    """One bar: every owner, and what is in no tensor; together the peak."""
    at_peak = _split(found, split)
    texts = [f"{_name(part.name)} {percent(part.share)}" for part in at_peak if part.share >= 0.01]
    return Bars(
        id="memory_at_peak",
        title=f"At the peak, by {_BY[split]}",
        caption=f"Of {size(found.peak_bytes)}: {', '.join(texts)}.",
        labels=["at the peak"],
        series=tuple(
            Series(_name(part.name), [part.bytes], color=_color(part.name)) for part in at_peak if part.bytes > 0
        ),
        unit="peak_bytes",
    )


def _split(found: Account, split: str) -> Sequence[Part]:
    return found.live_at_peak.by_owner if split == "owner" else found.live_at_peak.by_phase


def _name(name: str | None) -> str:
    return _NO_TENSOR if name == REMAINDER else in_words(name)


def _color(name: str | None) -> str:
    return "unattributed" if name is None or name == REMAINDER else name


def _treemap(found: Account, alive: Sequence[Alive], split: str) -> Iterator[Tree]:
    """By owner, then modules alike, then op and shape; the whole is the peak."""
    if not alive:
        return
    root = Branch()
    has_modules = any(each.module is not None for each in alive)
    for each in alive:
        first = each.owner if split == "owner" else each.phase
        inner = [*([each.module or _of_none(each.module)] if has_modules else []), _what(each)]
        is_known = each.op != BEFORE_THE_WINDOW or each.shape is not None
        root.add([in_words(first), *(inner if is_known else ())], each.bytes, _color(first))
    if (found.remainder_bytes or 0) > 0:
        root.add([_NO_TENSOR], found.remainder_bytes or 0, _color(None))
    first_alive = alive[0]
    module = f" in {safe(first_alive.module, 80)}" if first_alive.module else ""
    number = plural(first_alive.num_allocations, "allocation")
    levels = f"By {_BY[split]}, {'then by module, ' if has_modules else ''}then by what made it."
    yield Tree(
        id="memory_tree",
        title="What is alive at the peak",
        caption=f"{levels} The most that is alike is {number} of {safe(_what(first_alive), 80)}{module}: "
        f"{size(first_alive.bytes)}.",
        shape="treemap",
        unit="peak_bytes",
        nodes=root.nodes("at the peak"),
    )


def _of_none(module: str | None) -> str:
    return OUTSIDE if module is None else "the model itself"


def _what(each: Alive) -> str:
    """The op that made it, the shape and the dtype, as far as they are known; of what was there before, no op did."""
    op = "" if each.op == BEFORE_THE_WINDOW and each.shape is not None else each.op or NOT_KNOWN
    shape = "" if each.shape is None else "×".join(map(str, each.shape)) or "scalar"
    return " ".join(word for word in (op, shape, each.dtype) if word)


def _not_owned(report: MemoryReport) -> Iterator[Missing]:
    if report.source == TRACE:
        yield Missing(
            "a trace does not know whose memory it is: parameters, gradients, activations. `stepscope run train.py` "
            "records it"
        )


# -- tables -----------------------------------------------------------------------------------------------------


def largest(found: Account, most: int | None = None) -> Table:
    """The places that make the largest allocations, all of them or so many."""
    rows = found.largest[:most]
    columns: dict[str, Sequence[Any]] = {
        "op": [large.op for large in rows],
        "module": [large.module for large in rows],
        "each_bytes": [large.bytes for large in rows],
        "num_allocations": [large.num_allocations for large in rows],
        "num_at_peak": [large.num_at_peak for large in rows],
        "formula": [large.formula for large in rows],
        "shape": [None if large.shape is None else "×".join(map(str, large.shape)) for large in rows],
        "dtype": [large.dtype for large in rows],
        "phase": [large.phase for large in rows],
        "owner": [large.owner for large in rows],
        "called_at": [large.caller for large in rows],
    }
    return Table("largest_allocations", "Largest allocations, by the place that makes them", _known(columns))


def _stages(found: Account) -> Iterator[Table]:
    if len(found.stages) < 2:
        return
    highest = max(stage.peak_bytes for stage in found.stages)
    columns: dict[str, Sequence[Any]] = {
        "stage": [in_words(stage.name) for stage in found.stages],
        "when_it_ended_bytes": [stage.after_bytes for stage in found.stages],
        "at_most_bytes": [stage.peak_bytes for stage in found.stages],
        "has_the_peak": [stage.peak_bytes == highest for stage in found.stages],
    }
    yield Table("memory_stages", "Memory by stage", columns, num_shown=24)


def _kept(found: Account) -> Iterator[Table]:
    """Activations and what autograd saved, side by side."""
    if not found.activations and not found.saved:
        return
    rows = {row.module: row for row in found.activations}
    saved = {row.module: row for row in found.saved}
    names = list(dict.fromkeys([*rows, *saved]))
    nothing = ModuleBytes(None, 0, 0, 0)
    columns: dict[str, Sequence[Any]] = {
        "module": [name or _of_none(name) for name in names],
        "activations_bytes": [rows.get(name, nothing).bytes for name in names],
        "activations_with_inner_bytes": [rows.get(name, nothing).total_bytes for name in names],
    }
    note = "activations: the most at one time"
    if saved:  # a recording may not have it, and a trace never has
        columns["saved_bytes"] = [saved.get(name, nothing).bytes for name in names]
        columns["saved_with_inner_bytes"] = [saved.get(name, nothing).total_bytes for name in names]
        note += "; saved: what autograd packed, parameters excluded"
    yield Table("kept_for_backward", "Kept for backward, by module", columns, note=note)


def _ops(found: Account) -> Iterator[Table]:
    for name, rows in {"op": found.live_at_peak.by_op, "called_at": found.live_at_peak.by_caller}.items():
        known = [part for part in rows if part.name != REMAINDER]
        if not [part for part in known if part.name is not None]:
            continue
        columns: Mapping[str, Sequence[Any]] = {
            name: [in_words(part.name) if part.name is None else part.name for part in known],
            "live_bytes": [part.bytes for part in known],
            "share": [part.share for part in known],
            "num_allocations": [part.num_allocations for part in known],
        }
        yield Table(f"live_by_{name}", f"Alive at the peak, by {name.replace('called_at', 'place')}", columns)


def _left_alive(found: Account) -> Iterator[Table]:
    if not found.left_alive:
        return
    rows = found.left_alive
    columns: dict[str, Sequence[Any]] = {
        "op": [left.op for left in rows],
        "module": [left.module for left in rows],
        "left_bytes": [left.bytes for left in rows],
        "num_tensors": [left.num_tensors for left in rows],
        "held_at": [left.frame for left in rows],
    }
    yield Table("left_alive", "Graphs of earlier steps that are still alive", _known(columns))


def _known(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Columns without those of which nothing is known."""
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}

"""Charts of an account of memory: over the step, at the peak by owner, and down to op and shape."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.memory.account import BEFORE_THE_WINDOW, REMAINDER, Account
from stepscope.analysis.memory.by_owner import Alive, LevelsBy, alive_at_peak, known_split, levels_by
from stepscope.analysis.memory.timeline import on_device
from stepscope.document.model import Bars, Lines, Mark, Series, Tree
from stepscope.document.sections.trees import Branch
from stepscope.formatting import percent, plural, safe, size

LEAST_STAGE = 0.04  # share of the chart's width: a shorter stage has no name on it
OUTSIDE = "outside every module"
NO_TENSOR = "in no tensor"
IN_ORDER = "num_allocations_and_releases"
_BY = {"owner": "owner", "phase": "the phase that allocated it"}


def memory_charts(found: Account, memory: Mapping[str, Any]) -> Iterator[Lines | Bars | Tree]:
    """Yield memory over the step, what is alive at the peak as a bar, and as a treemap."""
    split, known = known_split(memory), on_device(memory)
    yield timeline(found, levels_by(memory, split, known=known))
    yield _at_peak(found, split)
    yield from _treemap(found, alive_at_peak(memory, known), split)


def timeline(found: Account, levels: LevelsBy) -> Lines:
    """Return the levels of every owner on top of one another: at the peak they add up to `peak_tracked_bytes`."""
    x, name = _places(levels)
    at_peak = {owner: levels.levels[owner][levels.peak_index] for owner in levels.names[:3]}
    owners = [f"{in_words(owner)} {size(num_bytes)}" for owner, num_bytes in at_peak.items() if num_bytes > 0]
    text = f"{size(found.peak_tracked_bytes)} is allocated at the peak: {', '.join(owners)}."
    if found.remainder_bytes:
        text += f" The allocator's own peak is {size(found.peak_bytes)}"
        more, less = "is in no tensor, and not in this chart.", ", less: it does not count all of these tensors."
        text += f": {size(found.remainder_bytes)} {more}" if found.remainder_bytes > 0 else less
    # What stays is at the bottom, so that what comes and goes can be seen.
    order = sorted(levels.names, key=lambda owner: -min(levels.levels[owner]))
    series = tuple(Series(in_words(owner), levels.levels[owner], x, owner or "unattributed") for owner in order)
    marks = tuple(_marks(found, x[levels.peak_index], levels.events, x))
    id, title = "memory_timeline", f"Allocated memory of {safe(found.device, 20)}, by {_BY[levels.by]}"
    return Lines(id, title, name, "allocated_bytes", series, marks, "areas", caption=text, page_only=True)


def allocator_timeline(found: Account) -> Lines:
    """Return what the allocator had allocated and reserved after each allocation and release."""
    points = found.timeline
    x = [float(point.event) for point in points]
    peak_index = max(range(len(points)), key=lambda i: points[i].allocated_bytes)
    series = [Series("allocated", [point.allocated_bytes for point in points], x)]
    levels = {}
    if any(point.reserved_bytes is not None for point in points):
        series.append(Series("reserved", [point.reserved_bytes for point in points], x))
    elif found.peak_reserved_bytes:
        levels[f"reserved at most, {size(found.peak_reserved_bytes)}"] = found.peak_reserved_bytes
    if found.remainder_bytes:
        levels[f"the allocator's own peak, {size(found.peak_bytes)}"] = found.peak_bytes
    series += [Series(name, [num_bytes] * 2, [x[0], x[-1]]) for name, num_bytes in levels.items()]
    marks = tuple(_marks(found, x[peak_index], [point.event for point in points], x))
    title = f"Memory of {safe(found.device, 20)} over a step: peak {size(found.peak_bytes)}"
    return Lines("allocator_timeline", title, IN_ORDER, "allocated_bytes", tuple(series), marks, "steps")


def _places(levels: LevelsBy) -> tuple[list[float], str]:
    """Return the x of each point: its time, or its place in the order if some time is unknown."""
    times = [float(time) for time in levels.times_ns[1:] if time is not None]
    if times and len(times) == len(levels.times_ns) - 1:
        return [min(0.0, times[0]), *times], "time_ns"
    return [float(event) for event in levels.events], IN_ORDER


def _marks(found: Account, peak: float, events: Sequence[int], x: Sequence[float]) -> Iterator[Mark]:
    """Yield the peak, and the begin of every stage that is long enough to have a name on the chart."""
    yield Mark(peak, f"peak {size(found.peak_tracked_bytes)}{' in tensors' if found.remainder_bytes else ''}")
    places = ((bisect_left(events, stage.first_event), stage.name) for stage in found.stages[1:])
    begins = [(x[place], name) for place, name in places if place < len(events)]
    ends = [*(begin for begin, _ in begins[1:]), x[-1]]
    for (begin, name), end in zip(begins, ends):
        if name != "other" and end - begin >= LEAST_STAGE * (x[-1] - x[0]):
            yield Mark(begin, in_words(name))


def _at_peak(found: Account, split: str) -> Bars:
    """Return one bar: every owner, and what is in no tensor; together they are the peak."""
    live = found.live_at_peak.by_owner if split == "owner" else found.live_at_peak.by_phase
    texts = [f"{in_words(part.name)} {percent(part.share)}" for part in live if part.share >= 0.01]
    parts = [part for part in live if part.bytes > 0]
    series = tuple(Series(in_words(part.name), [part.bytes], color=_color(part.name)) for part in parts)
    title, caption = f"At the peak, by {_BY[split]}", f"Of {size(found.peak_bytes)}: {', '.join(texts)}."
    return Bars("memory_at_peak", title, ["at the peak"], series, "peak_bytes", caption=caption, page_only=True)


def _color(name: str | None) -> str:
    return "unattributed" if name is None or name == REMAINDER else name


def _treemap(found: Account, alive: Sequence[Alive], split: str) -> Iterator[Tree]:
    if not alive:
        return
    root = Branch()
    has_modules = any(each.module is not None for each in alive)
    for each in alive:
        first = each.owner if split == "owner" else each.phase
        inner = [*([module_title(each.module)] if has_modules else []), _what(each)]
        is_known = each.op != BEFORE_THE_WINDOW or each.shape is not None
        root.add([in_words(first), *(inner if is_known else ())], each.bytes, _color(first))
    if (found.remainder_bytes or 0) > 0:
        root.add([NO_TENSOR], found.remainder_bytes or 0, _color(None))
    most = alive[0]
    module = f" in {safe(most.module, 80)}" if most.module else ""
    levels = f"By {_BY[split]}, {'then by module, ' if has_modules else ''}then by op, shape and dtype."
    caption = (
        f"{levels} The largest group is {plural(most.num_allocations, 'allocation')} of "
        f"{safe(_what(most), 80)}{module}: {size(most.bytes)}."
    )
    title, nodes = "What is alive at the peak", root.nodes("at the peak")
    yield Tree("memory_tree", title, "treemap", "peak_bytes", nodes, caption=caption, page_only=True)


def module_title(module: str | None) -> str:
    return OUTSIDE if module is None else module or "the model itself"


def _what(each: Alive) -> str:
    """Return the op that made it, the shape and the dtype, as far as known; what was there before has no op."""
    op = "" if each.op == BEFORE_THE_WINDOW and each.shape is not None else each.op or "unknown"
    shape = "" if each.shape is None else "×".join(map(str, each.shape)) or "scalar"
    return " ".join(word for word in (op, shape, each.dtype) if word)


def in_words(name: str | None) -> str:
    if name is None or name == REMAINDER:
        return "unknown" if name is None else NO_TENSOR
    return safe(name if name == BEFORE_THE_WINDOW else name.replace("_", " "))

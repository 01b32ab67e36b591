"""The section `memory`: what filled the memory at the peak, what is largest, how it grows with the shape, leaks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.analysis.memory.account import BEFORE_THE_WINDOW, REMAINDER, Account
from stepscope.analysis.memory.account import Part as Live
from stepscope.analysis.memory.module_tree import ModuleBytes, alike, ancestors, frontier
from stepscope.analysis.memory.scaling import Growth
from stepscope.analysis.memory.size_formulas import SYMBOLS
from stepscope.analysis.memory.snapshot import SnapshotEnd
from stepscope.document.memory_charts import NO_TENSOR, in_words, memory_charts, module_title
from stepscope.document.model import Document, Fact, Facts, Missing, Part, Section, Table, Text, Value
from stepscope.document.tables import columns_of, without_empty
from stepscope.formatting import percent, plural, safe, size
from stepscope.session import Session
from stepscope.session.memory import SNAPSHOT, TRACE, MemoryReport
from stepscope.session.memory_scaling import MemoryAnalysis

NUM_MODULES = 8
MOST_STAGES = 12  # stages that a terminal shows: those around the peak
OTHERS = "other modules"
MOST_HELD = 3
_LARGEST = (
    "op", "each_bytes", "num_allocations", "formula", "module", "owner", "shape", "phase", "called_at", "dtype",
)  # fmt: skip
Columns = dict[str, Sequence[Value]]


def parts(session: Session) -> tuple[Part, ...]:
    """Return the verdict, leaks, charts over the step and at the peak, tables and facts."""
    report = session.memory
    if not report.account.num_allocations:
        return tuple(_tables(report))
    texts = (Text(text) for text in _sentences(report))
    return (*texts, *memory_charts(report.account, session.allocations), *_tables(report))


def memory_document(analysis: MemoryAnalysis, num_rows: int = NUM_MODULES) -> Document:
    """Return the memory of the first source; of two recordings, also how memory grows from one to the other."""
    report = analysis.reports[0]
    tables = tuple(_tables(report, num_rows, MOST_STAGES))
    sections = [Section("memory", f"Memory of {Path(report.path).name}", tables)]
    if analysis.growth is not None:
        sections.append(_growth(analysis.growth, [Path(each.path).name for each in analysis.reports], num_rows))
    return Document(f"Memory of {report.path}", " ".join(_sentences(report)), tuple(sections))


def _tables(report: MemoryReport, num_rows: int = NUM_MODULES, most_stages: int | None = None) -> Iterator[Part]:
    found, live = report.account, report.account.live_at_peak
    if not found.num_allocations:
        yield Missing(f"memory of {safe(found.device, 20)}. No allocation on it was recorded")
        return
    if report.source == TRACE:
        text = "which memory is parameters, gradients or activations. `stepscope run train.py` records it"
        yield Missing(text, page_only=True)
    at_peak = f"alive at the peak of {size(found.peak_bytes)}"
    if any(part.name not in (None, REMAINDER) for part in live.by_owner):  # a trace has no owners
        owners = [replace(part, name=in_words(part.name)) for part in live.by_owner]
        inside = "in no tensor: allocator rounding, workspaces and temporaries inside kernels"
        note = inside if found.remainder_bytes else ""
        yield from live_table("owner", f"{at_peak}, by owner", owners, 20, note=note)
    yield from _stages(found, most_stages)
    yield from _modules(found, num_rows)
    by_op, by_line = ([part for part in of if part.name != REMAINDER] for of in (live.by_op, live.by_caller))
    yield from live_table("op", f"{at_peak}, by op", by_op, num_rows)
    title = f"{at_peak}, by line of Python"
    yield from live_table("called_at", title, by_line, num_rows, page_only=report.source != SNAPSHOT)
    yield from _kept(found, num_rows)
    yield largest(found, num_shown=num_rows)
    if report.snapshot_end:
        title, at_end = "alive at the end, by line of Python", report.snapshot_end.live_by_caller
        yield from live_table("called_at", title, at_end, num_rows, id="live_at_end")
    yield Facts(tuple(_facts(report)))
    if found.left_alive:
        columns = columns_of(found.left_alive, "op module left_bytes:bytes num_tensors held_at:frame")
        title = "Graphs of earlier steps that are still alive"
        yield Table("left_alive", title, without_empty(columns), below=("held_at",))


def live_table(
    name: str, title: str, parts: Sequence[Live], num_shown: int, id: str = "", **more: Any
) -> Iterator[Table]:
    """Yield parts of what is alive as a table, if the name of any is known; `more` are other fields of the table."""
    if any(part.name not in (None, REMAINDER) for part in parts):
        names = [in_words(part.name) if part.name in (None, REMAINDER) else part.name for part in parts]
        columns = columns_of(parts, "live_bytes:bytes share num_allocations")
        yield Table(id or f"live_by_{name}", title, {name: names, **columns}, num_shown, **more)


def largest(found: Account, most: int | None = None, num_shown: int = 12) -> Table:
    """Return the places that make the largest allocations, all of them or the first `most`."""
    columns = columns_of(
        found.largest[:most],
        "op module each_bytes:bytes num_allocations num_at_peak formula shape dtype phase owner called_at:caller",
        shape=lambda large: None if large.shape is None else "×".join(map(str, large.shape)),
    )
    title = "Largest allocations, by the place that makes them"
    return Table("largest_allocations", title, without_empty(columns), num_shown, screen=_LARGEST)


def _stages(found: Account, most: int | None) -> Iterator[Table]:
    """Yield the stages of the step, or the `most` of them around the peak."""
    if len(found.stages) < 2:
        return
    highest, num = max(stage.peak_bytes for stage in found.stages), len(found.stages)
    place, most = sum(stage.first_event <= found.peak_event for stage in found.stages), most or num
    first = max(0, min(place - most // 2, num - most))
    stages = found.stages[first : first + most]
    columns = columns_of(
        stages,
        "stage when_it_ended_bytes:after_bytes at_most_bytes:peak_bytes has_the_peak",
        stage=lambda stage: in_words(stage.name),
        has_the_peak=lambda stage: stage.peak_bytes == highest,
    )
    note = f"{len(stages)} of {num} stages, around the peak" if len(stages) < num else ""
    yield Table("memory_stages", "Memory by stage", columns, 24, note)


def _modules(found: Account, num_rows: int) -> Iterator[Table]:
    """Yield the modules that together hold what is alive at the peak, in about `num_rows` rows."""
    sizes = {part.name: part.bytes for part in found.live_at_peak.by_module if part.name != REMAINDER}
    if not any(name is not None for name in sizes):
        return
    rows = frontier(sizes, num_rows)
    columns: Columns = {
        "module": [module_title(name) for name, _ in rows],
        "live_bytes": [num_bytes for _, num_bytes in rows],
        "share": [num_bytes / max(1, found.peak_bytes) for _, num_bytes in rows],
    }
    note = "including submodules; * stands for every number"
    yield Table("live_by_module", "Alive at the peak, by module", columns, num_rows, note)


def _kept(found: Account, num_rows: int) -> Iterator[Table]:
    """Yield activations and what autograd saved: in about `num_rows` groups of modules, and by every module."""
    kinds = {"activations": found.activations, "saved": found.saved}
    by_kind = {kind: {row.module: row for row in rows} for kind, rows in kinds.items() if rows}
    if not by_kind:
        return
    names = list(dict.fromkeys(name for rows in by_kind.values() for name in rows))
    most = {name: max(rows[name].bytes for rows in by_kind.values() if name in rows) for name in names}
    groups = alike(held := {name: num_bytes for name, num_bytes in most.items() if num_bytes})
    shown: list[str | None] = [name for name, _ in frontier(held, num_rows)][:num_rows]
    sums: dict[str, Counter[str | None]] = {kind: Counter() for kind in by_kind}
    for kind, rows in by_kind.items():
        for name, row in rows.items():
            around = ancestors(groups.get(name, name))
            sums[kind][next((each for each in around if each in shown), OTHERS)] += row.bytes
    shown += [OTHERS] if any(table[OTHERS] for table in sums.values()) else []
    title, note = "Kept for backward, by module", "activations: the most at one time"
    note += "; saved: what autograd packed, parameters excluded" if found.saved else ""
    columns: Columns = {"module": [module_title(name) for name in shown]}
    columns |= {f"{kind}_bytes": [table[name] for name in shown] for kind, table in sums.items()}
    yield Table("kept_by_module", title, columns, len(shown), note)
    nothing = ModuleBytes(None, 0, 0, 0)
    columns = {"module": [module_title(name) for name in names]}
    for kind in ("activations", *(["saved"] if found.saved else [])):
        every = [by_kind.get(kind, {}).get(name, nothing) for name in names]
        columns[f"{kind}_bytes"] = [row.bytes for row in every]
        columns[f"{kind}_with_inner_bytes"] = [row.total_bytes for row in every]
    yield Table("kept_for_backward", "Kept for backward, every module", columns, note=note, page_only=True)


def _growth(found: Growth, names: Sequence[str], num_rows: int) -> Section:
    sides = [f"{found.symbol}={value:,}" for value in found.values]
    where = ", ".join(f"{side} in {safe(name, 40)}" for side, name in zip(sides, names))
    text = f"{where}. The peaks are {' and '.join(size(num_bytes) for num_bytes in found.peak_bytes)}."
    if any(found.num_unmatched):
        counts = " and ".join(f"{number:,}" for number in found.num_unmatched)
        text += f" {counts} allocations have no counterpart in the other recording."
    at_peak: Columns = {"growth": [row.growth for row in found.at_peak], **_sides(sides, found.at_peak)}
    grown = [row for row in found.rows if row.growth != "constant"]
    rows = columns_of(grown, "op module owner phase num_allocations") | _sides(sides, grown)
    rows["growth"] = [row.growth if row.growth != "other" else f"^{row.exponent:.2f}" for row in grown]
    rows["formula"] = [row.formula for row in grown]
    screen = ("op", *_sides(sides, ()), "growth", "module", "formula", "num_allocations", "phase", "owner")
    tables = (
        Table("growth_at_peak", f"Alive at the peak of {sides[0]}, in both", at_peak),
        Table("growth", "What grows", without_empty(rows), num_rows, screen=screen),
    )
    return Section("growth", f"How memory grows with {SYMBOLS[found.symbol]}", (Text(text), *tables))


def _sides(names: Sequence[str], rows: Sequence[Any]) -> dict[str, list[Any]]:
    return {f"{name}_bytes": [row.bytes[side] for row in rows] for side, name in enumerate(names)}


def _sentences(report: MemoryReport) -> Iterator[str]:
    if report.account.left_alive:
        yield _leak(report.account)
    yield _peak(report)


def _peak(report: MemoryReport) -> str:
    found, live = report.account, report.account.live_at_peak
    where = f", in {safe(found.peak_stage)}" if found.peak_stage and found.peak_stage != "start" else ""
    since = ", all of it from before the step" if found.peak_event < 0 else ""
    groups = {TRACE: live.by_phase, SNAPSHOT: live.by_caller}.get(report.source, live.by_owner)
    largest = [f"{in_words(part.name)} {percent(part.share)}" for part in groups[:3] if part.bytes > 0]
    text = f"{size(found.peak_bytes)} is allocated at the peak{where}{since}"
    return f"{text}: {', '.join(largest)}." if largest else f"{text}."


def _leak(found: Account) -> str:
    first = found.left_alive[0]
    share = sum(part.share for part in found.live_at_peak.by_owner if part.name == "left_alive")
    of_peak = f" ({percent(share)} of the peak)" if share else ""
    num_bytes = sum(left.bytes for left in found.left_alive)
    text = f"Leak: {size(num_bytes)} of earlier steps' graphs{of_peak} is still alive when this step starts."
    what = f"{size(first.bytes)} in {plural(first.num_tensors, 'tensor')} and everything their graphs keep"
    if first.frame is None:
        return f"{text} No variable of the script holds the largest: {what}."
    where, _, name = safe(first.frame).partition(" ")
    return f"{text} {name} ({where}) holds {what}. Fix: store .item() or .detach() of them instead."


def _facts(report: MemoryReport) -> Iterator[Fact]:
    """Yield what no table has: shares by phase and dtype, formulas, the allocator, the end of a snapshot, notes."""
    found, live = report.account, report.account.live_at_peak
    for title, parts in (("by phase", live.by_phase), ("by dtype", live.by_dtype)):
        known = [part for part in parts if part.name != REMAINDER]
        if any(part.name is not None for part in known) and report.source != SNAPSHOT:
            yield Fact(title, ", ".join(f"{in_words(part.name)} {percent(part.share)}" for part in known))
    if found.symbols:
        yield Fact("formulas", _symbols(found))
    owned = [large for large in found.largest_by_owner if large.owner is not None]
    held = [f" ({one.caller})" if one.op == BEFORE_THE_WINDOW and one.caller else "" for one in owned]
    if texts := [f"{in_words(one.owner)} {size(one.bytes)}{by}" for one, by in zip(owned, held)]:
        yield Fact("largest tensor of", ", ".join(texts))
    yield from _allocator(found)
    if report.snapshot_end:
        yield from _end(report.snapshot_end)
    for part in [part for part in found.held if part.num_allocations > 1][:MOST_HELD]:
        yield Fact("held", f"{size(part.bytes)} in {plural(part.num_allocations, 'tensor')} at {part.name}")
    others = found.other_devices.items()
    yield from (Fact("other device", f"{size(num_bytes)} at most on {device}") for device, num_bytes in others)
    yield Fact("recorded", f"{plural(found.num_allocations, 'allocation')} on {safe(found.device, 20)}")
    yield from (Fact("note", note) for note in report.notes)


def _symbols(found: Account) -> str:
    text = ", ".join(f"{name} = {value:,} ({SYMBOLS[name]})" for name, value in found.symbols.items())
    names: dict[int, list[str]] = {}
    for name, value in found.symbols.items():
        names.setdefault(value, []).append(name)
    same = [" = ".join(alike) for alike in names.values() if len(alike) > 1]
    return f"{text}. Here {', '.join(same)}, so formulas cannot tell them apart" if same else text


def _allocator(found: Account) -> Iterator[Fact]:
    if found.peak_reserved_bytes is not None:
        text = f"{size(found.peak_reserved_bytes)} reserved at most"
        if found.fragmentation_bytes is not None:
            text += f", {size(found.fragmentation_bytes)} of it not allocated"
        retries = "" if found.num_retries is None else f"retries after releasing the cache: {found.num_retries:,}"
        yield Fact("allocator", text, retries)
    if found.remainder_bytes and found.remainder_at_start_bytes:
        before = f"{size(found.remainder_at_start_bytes)} of it from before the step"
        yield Fact(NO_TENSOR, size(found.remainder_bytes), before)


def _end(end: SnapshotEnd) -> Iterator[Fact]:
    yield Fact(
        "at the end",
        f"{size(end.reserved_bytes)} reserved in {plural(end.num_segments, 'segment')}, {size(end.allocated_bytes)} "
        f"allocated ({size(end.requested_bytes)} requested), {size(end.inactive_bytes)} inactive in "
        f"{plural(end.num_inactive_blocks, 'block')}, the largest {size(end.largest_inactive_bytes)}; "
        f"{size(end.releasable_bytes)} in unused segments",
    )
    if end.awaiting_free_bytes:
        yield Fact("", f"{size(end.awaiting_free_bytes)} freed but still in use by another stream")
    for oom in end.ooms:
        where = f" at {oom.caller}" if oom.caller else ""
        free = f"CUDA had {size(oom.free_bytes)} free, " if oom.free_bytes is not None else ""
        unused = max(0, oom.reserved_bytes - oom.allocated_bytes)
        yield Fact(
            "out of memory",
            f"{size(oom.asked_bytes)} requested{where}: {free}tensors held {size(oom.allocated_bytes)}, and "
            f"{size(unused)} more was reserved in pieces too small",
        )

"""What an account of memory says in sentences, below its tables."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.analysis.memory.account import BEFORE_THE_WINDOW, REMAINDER, Account
from stepscope.analysis.memory.size_formulas import SYMBOLS
from stepscope.analysis.memory.snapshot import SnapshotEnd
from stepscope.formatting import percent, plural, safe, size
from stepscope.session.memory_view import SNAPSHOT, MemoryReport

MOST_HELD = 3


def facts(report: MemoryReport) -> Iterator[tuple[str, str]]:
    """What each is about, and the sentence."""
    found, live = report.account, report.account.live_at_peak
    for title, parts in (("by phase", live.by_phase), ("by dtype", live.by_dtype)):
        known = [part for part in parts if part.name != REMAINDER]
        if [part for part in known if part.name is not None] and report.source != SNAPSHOT:
            yield title, ", ".join(f"{in_words(part.name)} {percent(part.share)}" for part in known)
    if found.symbols:
        yield "formulas", _symbols(found)
    yield from _categories(found)
    yield from _allocator(found)
    if report.snapshot_end:
        yield from _end_facts(report.snapshot_end)
    for left in found.left_alive:
        where = f" at {left.frame}" if left.frame else ""
        what = left.op or "a graph"
        yield (
            "still alive",
            f"{size(left.bytes)} in {plural(left.num_tensors, 'tensor')} of an earlier step: {what} held{where}",
        )
    for part in [part for part in found.held if part.num_allocations > 1][:MOST_HELD]:
        yield "held", f"{size(part.bytes)} in {plural(part.num_allocations, 'tensor')} at {part.name}"
    for device, num_bytes in found.other_devices.items():
        yield "elsewhere", f"{size(num_bytes)} at most on {device}"
    for note in report.notes:
        yield "note", note


def _symbols(found: Account) -> str:
    text = ", ".join(f"{name} = {value:,} ({SYMBOLS[name]})" for name, value in found.symbols.items())
    names: dict[int, list[str]] = {}
    for name, value in found.symbols.items():
        names.setdefault(value, []).append(name)
    same = [" = ".join(alike) for alike in names.values() if len(alike) > 1]
    return f"{text}; {', '.join(same)} here: they cannot be told apart" if same else text


def _categories(found: Account) -> Iterator[tuple[str, str]]:
    known = [large for large in found.largest_by_owner if large.owner is not None]
    if known:
        holders = [f" ({large.caller})" if large.caller and large.op == BEFORE_THE_WINDOW else "" for large in known]
        texts = [f"{in_words(large.owner)} {size(large.bytes)}{where}" for large, where in zip(known, holders)]
        yield "largest of", ", ".join(texts)


def _allocator(found: Account) -> Iterator[tuple[str, str]]:
    if found.peak_reserved_bytes is not None:
        text = f"{size(found.peak_reserved_bytes)} reserved at most"
        if found.fragmentation_bytes is not None:
            text += f", {size(found.fragmentation_bytes)} of it not allocated"
        if found.num_retries is not None:
            text += f"; {plural(found.num_retries, 'retry').replace('retrys', 'retries')} after giving the cache back"
        yield "allocator", text
    if found.remainder_bytes and found.remainder_at_start_bytes:
        yield (
            "",
            f"of the {size(found.remainder_bytes)} in no tensor, {size(found.remainder_at_start_bytes)} were "
            "there before the step",
        )


def _end_facts(end: SnapshotEnd) -> Iterator[tuple[str, str]]:
    yield (
        "at the end",
        f"{size(end.reserved_bytes)} reserved in {plural(end.num_segments, 'segment')}, {size(end.allocated_bytes)} "
        f"allocated ({size(end.requested_bytes)} asked for), {size(end.inactive_bytes)} inactive in "
        f"{plural(end.num_inactive_blocks, 'block')}, the largest {size(end.largest_inactive_bytes)}; "
        f"{size(end.releasable_bytes)} in segments that nothing uses",
    )
    if end.awaiting_free_bytes:
        yield "", f"{size(end.awaiting_free_bytes)} released and waiting for another stream"
    for oom in end.ooms:
        where = f" at {oom.caller}" if oom.caller else ""
        free = f"; CUDA had {size(oom.free_bytes)} free" if oom.free_bytes is not None else ""
        unused = max(0, oom.reserved_bytes - oom.allocated_bytes)
        yield (
            "out of memory",
            f"asked for {size(oom.asked_bytes)}{where}{free}, tensors had {size(oom.allocated_bytes)}, and "
            f"{size(unused)} more were reserved in pieces too small",
        )


def in_words(name: str | None) -> str:
    """An owner, a phase or a place, for people."""
    if name is None:
        return "not known"
    return safe(name if name in (REMAINDER, BEFORE_THE_WINDOW) else name.replace("_", " "))

"""What an account of memory says in sentences: the verdict, leaks, and facts below its tables."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.analysis.memory.account import BEFORE_THE_WINDOW, REMAINDER, Account
from stepscope.analysis.memory.size_formulas import SYMBOLS
from stepscope.analysis.memory.snapshot import SnapshotEnd
from stepscope.document.model import Fact
from stepscope.formatting import percent, plural, safe, size
from stepscope.session.memory import SNAPSHOT, TRACE, MemoryReport

MOST_HELD = 3
NO_TENSOR = "in no tensor"


def memory_sentences(report: MemoryReport) -> Iterator[str]:
    """Yield the leak, if there is one, and what the peak consists of."""
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


def memory_facts(report: MemoryReport) -> Iterator[Fact]:
    """Yield what no table has: shares by phase and dtype, formulas, the allocator, the end of a snapshot, notes."""
    found, live = report.account, report.account.live_at_peak
    for title, parts in (("by phase", live.by_phase), ("by dtype", live.by_dtype)):
        known = [part for part in parts if part.name != REMAINDER]
        if [part for part in known if part.name is not None] and report.source != SNAPSHOT:
            yield Fact(title, ", ".join(f"{in_words(part.name)} {percent(part.share)}" for part in known))
    if found.symbols:
        yield Fact("formulas", _symbols(found))
    if known_owners := [large for large in found.largest_by_owner if large.owner is not None]:
        texts = [f"{in_words(large.owner)} {size(large.bytes)}" for large in known_owners]
        held = [large.caller if large.op == BEFORE_THE_WINDOW else None for large in known_owners]
        largest = ", ".join(f"{text} ({name})" if name else text for text, name in zip(texts, held))
        yield Fact("largest tensor of", largest)
    yield from _allocator(found)
    if report.snapshot_end:
        yield from _end(report.snapshot_end)
    for part in [part for part in found.held if part.num_allocations > 1][:MOST_HELD]:
        yield Fact("held", f"{size(part.bytes)} in {plural(part.num_allocations, 'tensor')} at {part.name}")
    for device, num_bytes in found.other_devices.items():
        yield Fact("other device", f"{size(num_bytes)} at most on {device}")
    yield Fact("recorded", f"{plural(found.num_allocations, 'allocation')} on {safe(found.device, 20)}")
    for note in report.notes:
        yield Fact("note", note)


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


def in_words(name: str | None) -> str:
    """Return an owner, a phase or a place for people."""
    if name is None or name == REMAINDER:
        return "unknown" if name is None else NO_TENSOR
    return safe(name if name == BEFORE_THE_WINDOW else name.replace("_", " "))

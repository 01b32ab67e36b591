"""An account of memory on one screen."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepscope.analysis.memory.account import BEFORE_THE_WINDOW, REMAINDER, Account, Large, Part
from stepscope.analysis.memory.growth import Grown, Growth
from stepscope.analysis.memory.module_tree import alike, ancestors, frontier
from stepscope.analysis.memory.size_formulas import SYMBOLS
from stepscope.analysis.memory.snapshot import SnapshotEnd
from stepscope.document.memory_facts import facts, in_words
from stepscope.document.text.trace_tables import Column, table_lines
from stepscope.formatting import percent, plural, safe, shortened, size
from stepscope.session.memory_view import SNAPSHOT, TRACE, MemoryAnalysis, MemoryReport

BAR_WIDTH = 20
MOST_STAGES = 12
_COLUMN = 15
_OWNER = 22
OTHERS = "other modules"
_GLUE = "\N{NO-BREAK SPACE}"


def memory_text(analysis: MemoryAnalysis, most: int, width: int = 100) -> str:
    """The screen: the first path in full; of two recordings, then how memory grows."""
    lines = list(_report(analysis.reports[0], most, width))
    if analysis.growth is not None:
        lines += ["", *_growth(analysis, analysis.growth, most, width)]
    return "\n".join(line.rstrip() for line in lines).rstrip("\n")


def _report(report: MemoryReport, most: int, width: int) -> Iterator[str]:
    found = report.account
    name = safe(Path(report.path).name or report.path)
    head = f"{name}   {safe(found.device, 20)}   {plural(found.num_allocations, 'allocation')}"
    yield shortened(head, width)
    yield ""
    if found.left_alive:
        yield from _wrapped(leak_sentence(found), width)
        yield ""
    yield from _wrapped(memory_verdict(report), width)
    sections = [
        _callers(found, most, width) if report.source == SNAPSHOT else _owners(found, width),
        _stages(found, width),
        _modules(found, most, width),
        _parts("ops at the peak", found.live_at_peak.by_op, most, width),
        _kept(found, most, width),
        _largest(report, most, width),
        _at_end(report.snapshot_end, most, width) if report.snapshot_end else iter(()),
        (line for title, text in facts(report) for line in _fact(title, text, width)),
    ]
    for section in sections:
        lines = list(section)
        if lines:
            yield ""
            yield from lines


def memory_verdict(report: MemoryReport) -> str:
    """How much is allocated at the peak, when, and whose most of it is."""
    found = report.account
    where = f", in {safe(found.peak_stage)}" if found.peak_stage and found.peak_stage != "start" else ""
    text = f"{size(found.peak_bytes)} are allocated at the peak{where}"
    if found.peak_event < 0:
        text += ", all of it there from the start"
    groups = found.live_at_peak.by_owner
    if report.source == TRACE:
        groups = found.live_at_peak.by_phase
    elif report.source == SNAPSHOT:
        groups = found.live_at_peak.by_caller
    largest = [f"{in_words(part.name)} {percent(part.share)}" for part in groups[:3] if part.bytes > 0]
    return f"{text}: {', '.join(largest)}." if largest else f"{text}."


def leak_sentence(found: Account) -> str:
    """How much earlier steps left alive, who holds most of it, and what to do about it."""
    first = found.left_alive[0]
    num_bytes = sum(left.bytes for left in found.left_alive)
    share = sum(part.share for part in found.live_at_peak.by_owner if part.name == "left_alive")
    text = f"Leak: {size(num_bytes)} of earlier steps' graphs are still alive when this step starts"
    text += f", {percent(share)} of the peak." if share else "."
    what = f"{size(first.bytes)}: {plural(first.num_tensors, 'tensor')} with all that their graphs keep"
    if first.frame is None:
        return f"{text} No variable of the script was found to hold the largest, {what}."
    where, _, name = safe(first.frame).partition(" ")
    return f"{text} {name} ({where}) holds {what}. Keep .item() or .detach() of them there instead."


def _owners(found: Account, width: int) -> Iterator[str]:
    parts = found.live_at_peak.by_owner
    if [part.name for part in parts if part.name != REMAINDER] == [None]:
        return
    yield f"live at the peak (of {size(found.peak_bytes)})"
    for part in parts:
        yield _bar_line(in_words(part.name), part, width)


def _bar_line(title: str, part: Part, width: int) -> str:
    most = max(0, min(BAR_WIDTH, width - 64))
    figures = f"{size(part.bytes):>10} {percent(part.share):>8}  {'█' * round(most * max(0.0, part.share)):<{most}}"
    if most and part.num_allocations:
        figures += f"  {plural(part.num_allocations, 'tensor'):>14}"
    if len(title) <= _OWNER:
        return f"  {title:<{_OWNER}}{figures}"
    return f"  {shortened(title, width - 2)}\n  {'':<{_OWNER}}{figures}"


def _stages(found: Account, width: int) -> Iterator[str]:
    """The stages, of many those around the peak."""
    stages = [stage for stage in found.stages if len(found.stages) > 1]
    place = next((i for i, stage in enumerate(stages) if stage.first_event > found.peak_event), len(stages))
    first = max(0, min(place - MOST_STAGES // 2, len(stages) - MOST_STAGES))
    shown = stages[first : first + MOST_STAGES]
    if not shown:
        return
    highest = max(stage.peak_bytes for stage in stages)
    marks = ["← the peak" if stage.peak_bytes == highest else "" for stage in shown]
    columns = [
        Column("when it ended", [size(stage.after_bytes) for stage in shown]),
        Column("at most", [size(stage.peak_bytes) for stage in shown]),
    ]
    lines = table_lines("memory by stage", [in_words(stage.name) for stage in shown], columns, width - 12)
    yield lines[0]
    yield from (f"{line}  {mark}" for line, mark in zip(lines[1:], marks))
    if len(shown) < len(stages):
        yield f"  {len(shown)} of {plural(len(stages), 'stage')}, around the peak"


def _modules(found: Account, most: int, width: int) -> Iterator[str]:
    parts = [part for part in found.live_at_peak.by_module if part.name != REMAINDER]
    if not [part for part in parts if part.name is not None]:
        return
    rows = frontier({part.name: part.bytes for part in parts}, most)
    whole = max(1, found.peak_bytes)
    shown = [Part(name, num_bytes, num_bytes / whole, 0) for name, num_bytes in rows]
    yield from _parts("modules at the peak", shown, most, width)
    if any("*" in (part.name or "") for part in shown[:most]):
        yield "  with all modules inside; * stands for every number"


def _parts(title: str, parts: Sequence[Part], most: int, width: int) -> Iterator[str]:
    known = [part for part in parts if part.name != REMAINDER]
    if not [part for part in known if part.name is not None]:
        return
    rows = [(_module_title(part.name, title), part.bytes, part.share) for part in known[:most]]
    rest = known[most:]
    if rest:
        rows.append((f"{len(rest):,} more", sum(p.bytes for p in rest), sum(p.share for p in rest)))
    columns = [
        Column("bytes", [size(num_bytes) for _, num_bytes, _ in rows]),
        Column("of the peak", [percent(share) for _, _, share in rows]),
    ]
    yield from table_lines(title, [name for name, _, _ in rows], columns, width)


def _callers(found: Account, most: int, width: int) -> Iterator[str]:
    parts = [
        Part(part.name or "no Python frame known", part.bytes, part.share, part.num_allocations)
        for part in found.live_at_peak.by_caller
    ]
    return _parts("live at the peak, by the place in Python", parts, most, width)


def _kept(found: Account, most: int, width: int) -> Iterator[str]:
    """Activations and what autograd saved, side by side."""
    tables = [("activations", found.activations), ("saved for backward", found.saved)]
    tables = [(title, rows) for title, rows in tables if rows]
    if not tables:
        return
    most_of: dict[str | None, int] = {}
    for _, rows in tables:
        for row in rows:
            most_of[row.module] = max(most_of.get(row.module, 0), row.bytes)
    held = {name: num_bytes for name, num_bytes in most_of.items() if num_bytes}
    names, together = [name for name, _ in frontier(held, most)][:most], alike(held)
    sums: list[Counter[str | None]] = [Counter() for _ in tables]
    for table, (_, rows) in zip(sums, tables):
        for row in rows:
            around = ancestors(together.get(row.module, row.module))
            table[next((name for name in around if name in names), OTHERS)] += row.bytes
    if any(table[OTHERS] for table in sums):
        names.append(OTHERS)
    columns = [Column(title, [size(table[name]) for name in names]) for table, (title, _) in zip(sums, tables)]
    titles = [_module_title(name, "modules") for name in names]
    yield from table_lines("kept for backward, by module", titles, columns, width)


def _largest(report: MemoryReport, most: int, width: int) -> Iterator[str]:
    found = report.account.largest[:most]
    if not found or (report.source == SNAPSHOT and not found[0].caller):
        return
    columns = [
        Column("each", [size(large.bytes) for large in found]),
        Column("number", [f"{large.num_allocations:,}" for large in found], rank=1),
    ]
    if any(large.phase for large in found):
        columns.insert(0, Column("phase", [safe(large.phase or "before", 20) for large in found], rank=1))
    if any(large.shape for large in found):
        shapes = ["×".join(map(str, large.shape or ())) for large in found]
        dtypes = [safe(large.dtype or "", 20) for large in found]
        columns += [
            Column("shape", [safe(shape, 26) for shape in shapes], rank=2),
            Column("dtype", dtypes, rank=4),
            Column("formula", [large.formula or "none" for large in found]),
        ]
    if any(large.caller for large in found) and report.source != SNAPSHOT:
        columns.append(Column("called at", [safe(large.caller or "", 32) for large in found], rank=3))
    yield from table_lines("largest allocations", [_place(large) for large in found], columns, width)


def _place(large: Large) -> str:
    if large.op is None:
        return safe(large.caller or large.phase or "not known", 1000)
    module = f" in {large.module}" if large.module else ""
    return safe(f"{_op(large)}{module}", 1000)


def _op(made: Large | Grown) -> str:
    """The op that made it; of what was there before, whose it is."""
    return in_words(made.owner) if made.op == BEFORE_THE_WINDOW and made.owner else made.op or "?"


def _at_end(end: SnapshotEnd, most: int, width: int) -> Iterator[str]:
    parts = [Part(p.name or "no Python frame known", p.bytes, p.share, p.num_allocations) for p in end.live_by_caller]
    lines = list(_parts("live at the end, by the place in Python", parts, most, width))
    yield from (line.replace("of the peak", " of the end", 1) for line in lines)


def _growth(analysis: MemoryAnalysis, found: Growth, most: int, width: int) -> Iterator[str]:
    one, other = (safe(Path(report.path).name, 40) for report in analysis.reports)
    first, second = (f"{found.symbol} = {value:,}" for value in found.values)
    yield from _wrapped(
        f"how memory grows with {SYMBOLS[found.symbol]}: {first} in {one}, {second} in {other}", width
    )
    rows = [*found.at_peak]
    columns = [
        Column(first, [size(row.bytes[0]) for row in rows]),
        Column(second, [size(row.bytes[1]) for row in rows]),
    ]
    yield from table_lines(f"live at the peak of {first}", [row.growth for row in rows], columns, width)
    peaks = " and ".join(size(num_bytes) for num_bytes in found.peak_bytes)
    yield f"  the peaks themselves are {peaks}"
    grown = [row for row in found.rows if row.growth != "constant"][:most]
    if grown:
        yield ""
        columns = [
            Column("phase", [safe(row.phase or "before", 20) for row in grown], rank=1),
            Column("number", [f"{row.num_allocations:,}" for row in grown], rank=3),
            Column(first, [size(row.bytes[0]) for row in grown]),
            Column(second, [size(row.bytes[1]) for row in grown]),
            Column("grows", [row.growth if row.growth != "other" else f"^{row.exponent:.2f}" for row in grown]),
            Column("formula", [row.formula or "none" for row in grown], rank=2),
        ]
        names = [safe(f"{_op(row)}{f' in {row.module}' if row.module else ''}", 1000) for row in grown]
        yield from table_lines("what grows", names, columns, width)
    if any(found.num_unmatched):
        counts = " and ".join(f"{number:,}" for number in found.num_unmatched)
        yield f"  {counts} allocations have no counterpart in the other recording"


def _module_title(name: str | None, title: str) -> str:
    if name is None:
        return "outside every module" if title.startswith("modules") else "not known"
    return safe(name, 1000) if name else "the model itself"


def _fact(title: str, text: str, width: int) -> list[str]:
    wrapped = list(_wrapped(safe(text, 600), width - _COLUMN))
    return [f"{title if not i else '':<{_COLUMN}}{line}" for i, line in enumerate(wrapped)]


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Lines in which no number is parted from its unit."""
    glued = re.sub(r"(?<=\d) (?=%|(?:B|[KMG]iB)\b)", _GLUE, text)
    for line in textwrap.wrap(glued, width, break_on_hyphens=False) or [""]:
        yield line.replace(_GLUE, " ")

"""The compiler's report on one screen: what was compiled, what broke, what was compiled again, what it cost."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.analysis.compiler.compile_summary import CompilerSummary, Recompiled
from stepscope.document.text.trace_tables import Column, table_lines
from stepscope.formatting import average, count, duration, percent, plural, safe, shortened, significant
from stepscope.trace.compile_file import count_of

if TYPE_CHECKING:
    from stepscope.session.compiler_view import CompilerReport

STAGES = {
    "dynamo": "reading Python",
    "autograd": "the backward's graph",
    "inductor": "fusing, writing code",
    "kernels": "Triton or C++",
}
_LEAST_SECONDS = 0.01


def compiler_text(report: CompilerReport, most: int, width: int = 100) -> str:
    """The screen of `stepscope analyze --compiler`."""
    lines = [shortened(safe(Path(report.path).name or report.path), width)]
    if report.summary is not None:
        lines += ["", *compiler_lines(report.summary, most, width)]
    if report.regions:
        names = [safe(region.name) for region in report.regions[:most]]
        shown = report.regions[:most]
        columns = [
            Column("calls/step", [average(region.num_calls) for region in shown]),
            Column("host/step", [duration(region.host_ns, 3) for region in shown]),
            Column("nested", ["yes" if region.is_nested else "" for region in shown], rank=1),
        ]
        lines += ["", *table_lines("compiled regions in the trace", names, columns, width)]
    for note in report.notes:
        lines += ["", *_wrapped(note, width)]
    return "\n".join(line.rstrip() for line in lines)


def compiler_lines(summary: CompilerSummary, most: int, width: int) -> list[str]:
    """What the compiler did, as lines of at most so many characters."""
    lines = _wrapped(_head(summary), width) + _wrapped(_seconds(summary), width)
    lines += [line for text in _facts(summary) for line in _wrapped(text, width)]
    for title, rows in (
        ("graph breaks", [(_place(e), _break(e)) for e in summary.graph_breaks]),
        ("recompiles", [(_recompile_place(e), _recompile(e)) for e in summary.recompiles]),
        ("recompile limit hit", [(safe(e.get("frame")), _limit(e)) for e in summary.limit_hits]),
        ("could not be compiled", [(_place(e), _times(safe(e.get("reason")), e)) for e in summary.failures]),
        ("dynamic sizes", [(safe(e.get("source")), _dynamic(e)) for e in summary.dynamic_dimensions]),
        ("CUDA graphs left out", [("", _times(safe(e.get("reason")), e)) for e in summary.cuda_graph_skips]),
    ):
        lines += _list(title, rows, most, width)
    for text in summary.untold:
        lines += ["", *_wrapped(f"Not told: {text}.", width)]
    return lines


def _head(summary: CompilerSummary) -> str:
    graphs = f", {plural(summary.num_graphs, 'graph')}" if summary.num_graphs is not None else ""
    ops = f" of {plural(summary.num_ops, 'op')}" if graphs and summary.num_ops else ""
    breaks, again = plural(summary.num_graph_breaks, "graph break"), plural(summary.num_recompiles, "recompile")
    return f"{plural(summary.num_compiles, 'compile')}{graphs}{ops}, {breaks}, {again}."


def _seconds(summary: CompilerSummary) -> str:
    stages = [
        f"{name} {significant(seconds)} s ({STAGES[name]})"
        for name, seconds in summary.seconds_by_stage.items()
        if seconds >= _LEAST_SECONDS
    ]
    text = f"Compiling took {significant(summary.seconds)} s"
    return f"{text}: {', '.join(stages)}." if stages else f"{text}."


def break_even_words(summary: CompilerSummary) -> str | None:
    """What compiling costs against what it gains; None where a step's times are not known."""
    if not summary.compiled_ns:
        return None
    taken = duration(summary.compiled_ns, 3)
    if summary.break_even is None or summary.eager_ns is None:
        same = count(round(summary.seconds * 1e9 / summary.compiled_ns))
        return f"A step takes {taken}: compiling took as long as {same} of them; an eager step's time is not known."
    step = f"A compiled step takes {taken}"
    if math.isinf(summary.break_even):
        return f"{step}, an eager one {duration(summary.eager_ns, 3)}: compiling never pays here."
    steps = plural(max(1, math.ceil(summary.break_even)), "step")
    return f"{step}, an eager one {duration(summary.eager_ns, 3)}: compiling pays after {steps}."


def _facts(summary: CompilerSummary) -> Iterator[str]:
    if (words := break_even_words(summary)) is not None:
        yield words
    caches = [
        f"{name} {', '.join(f'{num} {outcome}' for outcome, num in counts.items())}"
        for name, counts in summary.caches.items()
    ]
    if caches:
        yield f"Caches: {'; '.join(caches)}."
    graphs = summary.cuda_graphs
    if graphs:
        yield (
            f"CUDA graphs: {graphs.get('num_recorded')} recorded for "
            f"{plural(int(graphs.get('num_compiled_functions', 0)), 'compiled function')}, of one function for "
            f"{plural(int(graphs.get('num_distinct_sizes', 0)), 'set')} of sizes at most."
        )
    else:
        yield "CUDA graphs: none recorded."
    if summary.num_calls:
        known = f"the module of {percent(summary.num_placed_calls / summary.num_calls)} of them is known"
        others = (
            "" if summary.num_placed_calls == summary.num_calls else "; the others count as their compiled region's"
        )
        yield f"Compiled code makes {plural(summary.num_calls, 'call')} of kernels and library ops: {known}{others}."


def _list(title: str, rows: list[tuple[str, str]], most: int, width: int) -> list[str]:
    if not rows:
        return []
    lines = ["", title]
    for place, text in rows[:most]:
        if place:
            lines.append(f"  {shortened(place, width - 2, 0.3)}")
        lines += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    if len(rows) > most:
        lines.append(f"  and {len(rows) - most} more: --top shows them, --json has all")
    return lines


def _place(entry: Mapping[str, Any]) -> str:
    return safe(entry.get("place") or "unknown place")


def _times(text: str, entry: Mapping[str, Any]) -> str:
    times = count_of(entry)
    return text if times == 1 else f"{text} ({times} times)"


def _break(entry: Mapping[str, Any]) -> str:
    text = _times(safe(entry.get("reason"), 400).rstrip("."), entry)
    return f"{text}; the whole function runs eagerly" if entry.get("runs_eagerly") else text


def _limit(entry: Mapping[str, Any]) -> str:
    return _times("compiled again too often: it runs eagerly from then on", entry)


def _recompile_place(entry: Recompiled) -> str:
    return safe(entry.place or entry.frame)


def _recompile(entry: Recompiled) -> str:
    what = f"{safe(entry.guard, 300)} changed" if entry.values else safe(entry.guard, 300)
    seen = ", ".join(safe(value, 40) for value in entry.values[:12])
    more = ", …" if len(entry.values) > 12 else ""
    values = f"; seen: {seen}{more}" if seen else ""
    where = f", in {safe(entry.frame)}" if entry.place else ""
    return f"{plural(entry.count, 'recompile')}: {what}{values}{where}"


def _dynamic(entry: Mapping[str, Any]) -> str:
    sizes = entry.get("sizes")
    seen = ", ".join(safe(value, 20) for value in sizes) if isinstance(sizes, list) else ""
    place = f"; first used at {safe(entry['place'])}" if entry.get("place") else ""
    return f"compiled for any size{f'; when compiling it was {seen}' if seen else ''}{place}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)

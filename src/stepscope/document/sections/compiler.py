"""The section `compiler`: what torch.compile did, where graphs broke, what was recompiled, and what it cost."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.compiler.compile_summary import CompilerSummary
from stepscope.document.model import Document, Fact, Facts, Missing, Part, Section, Table, Text, Value
from stepscope.errors import Unavailable
from stepscope.findings.compile_log import compile_entries, count_of
from stepscope.findings.compiler_report import TRACE_ALONE, CompilerReport, compiler_report
from stepscope.formatting import average, count, duration, percent, plural, significant
from stepscope.session import Session

STAGES = {
    "dynamo": "reading Python",
    "autograd": "the backward graph",
    "inductor": "fusing, writing code",
    "kernels": "Triton or C++",
}
_LISTS: dict[str, tuple[str, dict[str, str], bool]] = {
    "graph_breaks": (
        "graph breaks",
        {"place": "place", "reason": "reason", "runs_eagerly": "whole_function_runs_eagerly"},
        True,
    ),
    "recompile_limit_hits": (
        "functions that hit the recompile limit and now run eagerly",
        {"frame": "function"},
        True,
    ),
    "dynamic_dimensions": (
        "sizes compiled for any value",
        {"source": "size", "sizes": "seen_when_compiling", "place": "first_used_at"},
        False,
    ),
    "cuda_graph_skips": ("skipped CUDA graphs", {"reason": "reason"}, True),
    "failures": ("failed compiles", {"place": "place", "reason": "reason"}, True),
}
"""Lists of a summary: title, fields under the names of a table's columns, and whether entries are counted."""
_BELOW = ("reason", "first_used_at")


def parts(session: Session) -> tuple[Part, ...]:
    """Return what `compile.json` has, and the regions of compiled code that the trace shows."""
    report = compiler_report(session.case)
    if report.summary is not None:
        verdict = Text(summary_verdict(report.summary))
        return (verdict, *summary_parts(report.summary), *_recorded(session), *_regions(report), *_entering(session))
    if report.regions:
        notes = [Missing(note) if note == TRACE_ALONE else Text(note) for note in report.notes]
        return (*_regions(report), *_entering(session), *([] if session.is_recording else notes))
    if session.is_recording:
        path = shlex.quote(str(session.path))
        raise Unavailable(
            "torch.compile compiled nothing in this run. "
            f"`stepscope verify {path} --fix compile` measures what it would save"
        )
    raise Unavailable("the trace shows no compiled code. Call torch.compile(model) and record again")


def compiler_document(report: CompilerReport) -> Document:
    """Return what torch.compile did in a session."""
    verdict = summary_verdict(report.summary) if report.summary else ""
    told = summary_parts(report.summary) if report.summary else ()
    section = Section("compiler", "Compiler", (*told, *_regions(report), *map(Text, report.notes)))
    return Document(f"Compiler of {report.path}", verdict, (section,))


def summary_verdict(summary: CompilerSummary) -> str:
    """Return how long compiling took, and when that pays off."""
    return f"Compiling took {significant(summary.seconds)} s. {break_even_text(summary)}".rstrip()


def break_even_text(summary: CompilerSummary) -> str:
    """Return what compiling costs against what it gains; "" if the step times are unknown."""
    if not summary.compiled_ns:
        return ""
    taken = duration(summary.compiled_ns, 3)
    if summary.break_even is None or summary.eager_ns is None:
        same = count(round(summary.seconds * 1e9 / summary.compiled_ns))
        return f"That is as long as {same} steps of {taken}. The time of an eager step is unknown."
    step = f"A compiled step takes {taken}, an eager one {duration(summary.eager_ns, 3)}"
    if math.isinf(summary.break_even):
        return f"{step}: compiling never pays off here."
    return f"{step}: compiling pays off after {plural(max(1, math.ceil(summary.break_even)), 'step')}."


def summary_parts(summary: CompilerSummary) -> Iterator[Part]:
    """Yield the figures of a summary, its stages, what was recompiled, and its lists."""
    yield Facts(tuple(_figures(summary)))
    if stages := summary.seconds_by_stage:
        columns: dict[str, Sequence[Value]] = {
            "stage": list(stages),
            "is": [STAGES[name] for name in stages],
            "seconds": [round(seconds, 3) for seconds in stages.values()],
        }
        yield Table("compile_stages", "compile time by stage", columns)
    if summary.recompiles:
        columns = {
            "place": [entry.place or entry.frame for entry in summary.recompiles],
            "num_recompiles": [entry.count for entry in summary.recompiles],
            "what_changed": [entry.guard for entry in summary.recompiles],
            "seen": [", ".join(entry.values) for entry in summary.recompiles],
            "function": [entry.frame if entry.place else None for entry in summary.recompiles],
        }
        below = ("what_changed", "seen", "function")
        yield Table("recompiled_for", "what was recompiled, and the values seen", columns, below=below)
    entries: dict[str, tuple[Mapping[str, Any], ...]] = {
        "graph_breaks": summary.graph_breaks,
        "recompile_limit_hits": summary.limit_hits,
        "dynamic_dimensions": summary.dynamic_dimensions,
        "cuda_graph_skips": summary.cuda_graph_skips,
        "failures": summary.failures,
    }
    for name, (title, fields, is_counted) in _LISTS.items():
        yield from _list(name, title, entries[name], fields, "num_times" if is_counted else None)
    none = [title for name, (title, _, _) in _LISTS.items() if not entries[name]]
    if none:
        yield Text(f"None seen: {', '.join(none)}.")
    yield from map(Missing, summary.untold)
    functions = {"frame": "function", "num_compiles": "num_compiles"}
    yield from _list("compiled_functions", "compiled functions", summary.frames, functions, None, page_only=True)


def _figures(summary: CompilerSummary) -> Iterator[Fact]:
    graphs = f"{plural(summary.num_graphs, 'graph')}" if summary.num_graphs is not None else ""
    ops = f" of {plural(summary.num_ops, 'op')}" if graphs and summary.num_ops else ""
    yield Fact("compiles", f"{summary.num_compiles:,}", f"{graphs}{ops}")
    yield Fact("compile time", f"{significant(summary.seconds)} s", "of all compiles")
    breaks = summary.graph_breaks
    yield Fact(
        "graph breaks", f"{summary.num_graph_breaks:,}", f"at {plural(len(breaks), 'place')}" if breaks else ""
    )
    yield Fact("recompiles", f"{summary.num_recompiles:,}")
    if cuda := summary.cuda_graphs:
        functions, sizes = cuda.get("num_compiled_functions"), cuda.get("num_distinct_sizes")
        detail = f"for {functions} compiled functions; at most {sizes} sets of sizes for one function"
        yield Fact("CUDA graphs", f"{cuda.get('num_recorded')} recorded", detail)
    else:
        yield Fact("CUDA graphs", "none recorded")
    for name, counts in summary.caches.items():
        yield Fact(f"cache of {name}", ", ".join(f"{num} {outcome}" for outcome, num in counts.items()))
    if summary.num_calls:
        share = percent(1 - summary.num_placed_calls / summary.num_calls)
        yield Fact("calls in compiled code", f"{summary.num_calls:,}", f"{share} could not be attributed to a module")


def _list(
    id: str,
    title: str,
    entries: Sequence[Mapping[str, Any]],
    fields: Mapping[str, str],
    counted: str | None,
    page_only: bool = False,
) -> Iterator[Table]:
    """Yield entries of `compile.json` as a table of the fields that at least one of them has."""
    cells = {shown: [_cell(entry.get(field)) for entry in entries] for field, shown in fields.items()}
    known: dict[str, Sequence[Value]] = {
        shown: values for shown, values in cells.items() if any(value is not None for value in values)
    }
    if known:
        counts = {counted: [count_of(entry) for entry in entries]} if counted else {}
        below = _BELOW if len(known) > 1 else ()
        yield Table(id, title, {**known, **counts}, below=below, page_only=page_only)


def _cell(value: Any) -> Value:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return value if value is None or isinstance(value, (bool, int)) else str(value)


def _recorded(session: Session) -> Iterator[Table]:
    """Yield every recompile with its guards, and the steps in which something was compiled."""
    fields = {"place": "place", "frame": "function", "failed_guards": "guards_that_failed"}
    entries = compile_entries(session.case, "recompiles")
    yield from _list("recompiles", "recompiles", entries, fields, None, page_only=True)
    compiling = [sample for sample in session.recording.samples if sample.num_compiles]
    if compiling:
        columns: dict[str, Sequence[Value]] = {
            "step": [sample.step for sample in compiling],
            "window": [sample.window for sample in compiling],
            "host_ns": [sample.wall_ns for sample in compiling],
            "num_compiles": [sample.num_compiles for sample in compiling],
        }
        note = "left out of the clean steps' figures"
        yield Table("compiling_steps", "steps that compiled something", columns, note=note, page_only=True)


def _regions(report: CompilerReport) -> Iterator[Table]:
    if regions := report.regions:
        columns: dict[str, Sequence[Value]] = {
            "region": [region.name for region in regions],
            "is_called_by_another": [region.is_nested for region in regions],
            "num_calls": [region.num_calls for region in regions],
            "host_ns": [region.host_ns for region in regions],
        }
        screen = ("region", "num_calls", "host_ns", "is_called_by_another")
        note = "per typical traced step; host: with everything that a region calls"
        yield Table("compiled_regions", "compiled regions in the trace", columns, note=note, screen=screen)


def _entering(session: Session) -> Iterator[Facts]:
    """Yield how often compiled code is entered, and what broken graphs cost."""
    try:
        case = session.case
        regions, num_steps = case.compiled_regions, case.num_steps
    except Unavailable:
        return
    if regions.is_empty():
        return
    rows = [Fact("compiled regions", f"{average(regions.height / num_steps)} calls per step")]
    if num_nested := int(regions["is_nested"].sum()):
        entering = case.region_entries(all_but_first=False)
        entering_ns = float((entering["end_ns"] - entering["start_ns"]).sum()) / num_steps
        breaks = f"{average(num_nested / num_steps)} calls per step come from another region: the graph broke there"
        rows.append(Fact("broken graphs", breaks, f"{duration(entering_ns, 3)} host time per step to enter them"))
    yield Facts(tuple(rows), "in the trace", page_only=True)

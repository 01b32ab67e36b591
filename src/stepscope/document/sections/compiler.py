"""What torch.compile did: graphs that broke, what was compiled again, seconds, CUDA graphs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.compiler.compile_summary import CompilerSummary, compiler_summary
from stepscope.analysis.compiler.compiled_regions import regions_by_name
from stepscope.document.model import Fact, Facts, Missing, Table, Text, Value
from stepscope.document.sections.shared import mapping, plain, table_of
from stepscope.document.text.compiler_text import STAGES, break_even_words
from stepscope.errors import Unavailable
from stepscope.findings.compile_log import compile_entries, compile_report, count_of
from stepscope.findings.compiler_report import TRACE_ALONE, seen_planning
from stepscope.formatting import average, duration, percent, plural, significant
from stepscope.session import Session

_LISTS = {
    "graph_breaks": (
        "graph breaks",
        {"place": "place", "reason": "reason", "runs_eagerly": "whole_function_runs_eagerly"},
        "num_times",
    ),
    "recompiles": (
        "recompiles",
        {"place": "place", "frame": "function", "failed_guards": "guards_that_failed"},
        None,
    ),
    "recompile_limit_hits": ("functions given up at the recompile limit", {"frame": "function"}, "num_times"),
    "dynamic_dimensions": (
        "sizes compiled for any value",
        {"source": "size", "sizes": "seen_when_compiling", "place": "first_used_at"},
        None,
    ),
    "cuda_graph_skips": ("CUDA graphs left out", {"reason": "reason"}, "num_times"),
    "failures": ("compiles that failed", {"place": "place", "reason": "reason"}, "num_times"),
}
"""Lists of `compile.json`: what each is, its fields under the names of a table's columns, and its count's."""


def parts(session: Session) -> tuple[Any, ...]:
    """From `compile.json`, and from the regions of compiled code that the trace shows."""
    report = compile_report(session.case)
    regions = tuple(_regions(session))
    if report:
        return (*_told(session, report), *regions)
    if regions:
        if session.is_recording:
            return regions
        return (*regions, *map(Text, seen_planning(session.case)), Missing(TRACE_ALONE))
    if session.is_recording:
        path = shlex.quote(str(session.path))
        raise Unavailable(
            "torch.compile compiled nothing in this run; "
            f"`stepscope verify {path} --fix compile` measures what it would bring"
        )
    raise Unavailable("the trace shows no compiled code: torch.compile(model), then record again")


def _told(session: Session, report: Mapping[str, Any]) -> Iterator[Any]:
    summary = compiler_summary(report, session.case.clean_ns)
    entries = {name: compile_entries(session.case, name) for name in _LISTS} | {"failures": [*summary.failures]}
    yield Facts((*_figures(report, entries), *_costs(summary)))
    if summary.seconds_by_stage:
        stages = summary.seconds_by_stage
        columns: dict[str, Sequence[Value]] = {
            "stage": list(stages),
            "is": [STAGES[name] for name in stages],
            "seconds": [round(seconds, 3) for seconds in stages.values()],
        }
        yield Table("compile_stages", "compile time by stage", columns)
    if summary.recompiles:
        yield Table(
            "recompiled_for",
            "what was compiled again, and the values seen",
            {
                "place": [entry.place or entry.frame for entry in summary.recompiles],
                "what_changed": [entry.guard for entry in summary.recompiles],
                "seen": [", ".join(entry.values) for entry in summary.recompiles],
                "num_recompiles": [entry.count for entry in summary.recompiles],
            },
        )
    quiet = [title for name, (title, _, _) in _LISTS.items() if not entries[name]]
    said = [f"Not seen: {', '.join(quiet)}."] if quiet else []
    if said or summary.untold:
        yield Text(" ".join([*said, *(f"Not told: {text}." for text in summary.untold)]))
    for name, (title, fields, count) in _LISTS.items():
        cells = {shown: [_cell(entry.get(field)) for entry in entries[name]] for field, shown in fields.items()}
        told: dict[str, Sequence[Value]] = {
            shown: values for shown, values in cells.items() if any(value is not None for value in values)
        }
        if told:
            counts = {count: [count_of(entry) for entry in entries[name]]} if count else {}
            yield Table(name, title, {**told, **counts})
    frames = compile_entries(session.case, "frames")
    if frames:
        names = [_cell(frame.get("frame")) for frame in frames]
        nums = [plain(frame.get("num_compiles")) for frame in frames]
        yield Table("compiled_functions", "what was compiled", {"function": names, "num_compiles": nums})
    compiling = [sample for sample in session.recording.samples if sample.num_compiles]
    if compiling:
        yield Table(
            "compiling_steps",
            "steps that compiled something",
            {
                "step": [sample.step for sample in compiling],
                "window": [sample.window for sample in compiling],
                "host_ns": [sample.wall_ns for sample in compiling],
                "num_compiles": [sample.num_compiles for sample in compiling],
            },
            note="left out of the clean steps' figures",
        )


def _figures(report: Mapping[str, Any], entries: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Fact]:
    num, seconds = report.get("num_compiles"), report.get("compile_seconds")
    if isinstance(num, int):
        yield Fact("compiles", f"{num:,}")
    if isinstance(seconds, (int, float)):
        yield Fact("compile time", f"{significant(seconds)} s", "of all compiles")
    breaks = entries["graph_breaks"]
    where = f"at {plural(len(breaks), 'place')}" if breaks else ""
    yield Fact("graph breaks", f"{sum(map(count_of, breaks)):,}", where)
    yield Fact("recompiles", f"{len(entries['recompiles']):,}")
    graphs = mapping(report.get("cuda_graphs"))
    if graphs:
        num, num_sizes = graphs.get("num_compiled_functions"), graphs.get("num_distinct_sizes")
        detail = f"compiled functions: {num}; most sizes of one: {num_sizes}"
        yield Fact("CUDA graphs", f"{graphs.get('num_recorded')} recorded", detail)
    else:
        yield Fact("CUDA graphs", "none recorded")


def _costs(summary: CompilerSummary) -> Iterator[Fact]:
    if summary.num_graphs is not None:
        ops = f"of {plural(summary.num_ops, 'op')}" if summary.num_ops else ""
        yield Fact("graphs", f"{summary.num_graphs:,}", ops)
    for name, counts in summary.caches.items():
        yield Fact(f"cache of {name}", ", ".join(f"{num} {outcome}" for outcome, num in counts.items()))
    if (words := break_even_words(summary)) is not None:
        yield Fact("what it cost", words)
    if summary.num_calls:
        share = percent(summary.num_placed_calls / summary.num_calls)
        yield Fact("modules of compiled code", f"known of {share} of its calls", f"{summary.num_calls:,} calls")


def _cell(value: Any) -> str | bool | None:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return value if value is None or isinstance(value, bool) else str(value)


def _regions(session: Session) -> Iterator[Any]:
    """Calls of compiled code in the trace's typical steps."""
    try:
        case = session.case
        regions, num_steps = case.compiled_regions, case.num_steps
    except Unavailable:
        return
    if regions.is_empty():
        return
    entering = case.region_entries(all_but_first=False)
    entering_ns = float((entering["end_ns"] - entering["start_ns"]).sum()) / num_steps
    num_nested = int(regions["is_nested"].sum())
    per_step = regions.height / num_steps
    rows = [Fact("compiled regions", f"{average(per_step)} call{'' if per_step == 1 else 's'} a step")]
    if num_nested:
        breaks = f"{average(num_nested / num_steps)} a step are called by another one: the graph broke there"
        rows.append(Fact("broken graphs", breaks, f"{duration(entering_ns, 3)} of the host a step to enter them"))
    yield Facts(tuple(rows), "in the trace")
    table = regions_by_name(regions, num_steps, compile_report(case))
    names = {"name": "region", "is_nested": "is_called_by_another", "num_calls": "num_calls", "host_ns": "host_ns"}
    note = "of a typical traced step; host: with all that a region calls"
    yield table_of(table, "compiled_regions", "compiled regions", names, note=note)

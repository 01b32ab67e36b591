"""The section `compiler`: what torch.compile did, where graphs broke, what was recompiled, its cost and checks."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.comparison.sweeps import varying_axes
from stepscope.analysis.compiler.compile_summary import CompilerSummary, compiler_summary
from stepscope.analysis.compiler.compiled_regions import entering
from stepscope.document.model import Document, Fact, Facts, Missing, Part, Section, Table, Text, Value
from stepscope.document.tables import columns_of, without_empty
from stepscope.errors import Unavailable
from stepscope.findings.compiler_report import TRACE_ALONE, CompilerReport, compiler_report
from stepscope.formatting import average, count, duration, percent, plural, safe, significant
from stepscope.session import Session
from stepscope.trace.compile_file import count_of, entries

STAGES = {"dynamo": "reading Python", "autograd": "the backward graph", "inductor": "fusing, writing code",
          "kernels": "Triton or C++"}  # fmt: skip
_LISTS = {
    "graph_breaks": ("graph breaks", "place reason whole_function_runs_eagerly:runs_eagerly num_times"),
    "recompile_limit_hits": (
        "functions that hit the recompile limit and now run eagerly", "function:frame num_times",
    ),
    "dynamic_dimensions": (
        "sizes compiled for any value", "size:source seen_when_compiling:sizes first_used_at:place",
    ),
    "cuda_graph_skips": ("skipped CUDA graphs", "reason num_times"),
    "failures": ("failed compiles", "place reason num_times"),
}  # fmt: skip
"""Lists of a summary: title, and the columns of its table."""
VERDICTS = {"ok": "same", "wrong": "differs"}


def parts(session: Session) -> tuple[Part, ...]:
    """Return what `compile.json` has, and the regions of compiled code that the trace shows."""
    report = compiler_report(session.case)
    in_trace = (*_regions(report), *_entering(session))
    if report.summary is not None:
        return (*_with_verdict(report.summary), *_recorded(session), *in_trace)
    if report.regions:
        notes = [Missing(note) if note == TRACE_ALONE else Text(note) for note in report.notes]
        return (*in_trace, *([] if session.is_recording else notes))
    if session.is_recording:
        path = shlex.quote(str(session.path))
        raise Unavailable(
            "torch.compile compiled nothing in this run. "
            f"`stepscope verify {path} --fix compile` measures what it would save"
        )
    raise Unavailable("the trace shows no compiled code. Call torch.compile(model) and record again")


def _with_verdict(summary: CompilerSummary) -> Iterator[Part]:
    yield Text(summary_verdict(summary))
    yield from summary_parts(summary)


def compiler_document(report: CompilerReport) -> Document:
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
        columns: dict[str, list[Any]] = {"stage": list(stages), "is": [STAGES[name] for name in stages]}
        columns["seconds"] = [round(seconds, 3) for seconds in stages.values()]
        yield Table("compile_stages", "compile time by stage", columns)
    if summary.recompiles:
        columns = columns_of(
            summary.recompiles,
            "place num_recompiles:count what_changed:guard seen function",
            place=lambda entry: entry.place or entry.frame,
            seen=lambda entry: ", ".join(entry.values),
            function=lambda entry: entry.frame if entry.place else None,
        )
        below = ("what_changed", "seen", "function")
        yield Table("recompiled_for", "what was recompiled, and the values seen", columns, below=below)
    entries = {id: getattr(summary, id.removeprefix("recompile_")) for id in _LISTS}
    for id, (title, names) in _LISTS.items():
        yield from _list(id, title, entries[id], names)
    if none := [title for id, (title, _) in _LISTS.items() if not entries[id]]:
        yield Text(f"None seen: {', '.join(none)}.")
    yield from map(Missing, summary.untold)
    names = "function:frame num_compiles"
    yield from _list("compiled_functions", "compiled functions", summary.frames, names, page_only=True)


def _figures(summary: CompilerSummary) -> Iterator[Fact]:
    graphs = plural(summary.num_graphs, "graph") if summary.num_graphs is not None else ""
    ops = f" of {plural(summary.num_ops, 'op')}" if graphs and summary.num_ops else ""
    yield Fact("compiles", f"{summary.num_compiles:,}", f"{graphs}{ops}")
    yield Fact("compile time", f"{significant(summary.seconds)} s", "of all compiles")
    places = f"at {plural(len(summary.graph_breaks), 'place')}" if summary.graph_breaks else ""
    yield Fact("graph breaks", f"{summary.num_graph_breaks:,}", places)
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
    id: str, title: str, entries: Sequence[Mapping[str, Any]], names: str, page_only: bool = False
) -> Iterator[Table]:
    """Yield entries of `compile.json` as a table of the fields that at least one of them has."""
    columns = columns_of(entries, names, num_times=count_of)
    known = without_empty({name: [_cell(value) for value in values] for name, values in columns.items()})
    if texts := known.keys() - {"num_times"}:
        below = ("reason", "first_used_at") if len(texts) > 1 else ()
        yield Table(id, title, known, below=below, page_only=page_only)


def _cell(value: Any) -> Value:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return value if value is None or isinstance(value, (bool, int)) else str(value)


def _recorded(session: Session) -> Iterator[Table]:
    names, found = "place function:frame guards_that_failed:failed_guards", session.case.compile_report
    yield from _list("recompiles", "recompiles", entries(found, "recompiles"), names, page_only=True)
    if compiling := [sample for sample in session.recording.samples if sample.num_compiles]:
        columns = columns_of(compiling, "step window host_ns:wall_ns num_compiles")
        note = "left out of the clean steps' figures"
        yield Table("compiling_steps", "steps that compiled something", columns, note=note, page_only=True)


def _regions(report: CompilerReport) -> Iterator[Table]:
    if report.regions:
        columns = columns_of(report.regions, "region:name is_called_by_another:is_nested num_calls host_ns")
        screen = ("region", "num_calls", "host_ns", "is_called_by_another")
        note = "per typical traced step; host: with everything that a region calls"
        yield Table("compiled_regions", "compiled regions in the trace", columns, note=note, screen=screen)


def _entering(session: Session) -> Iterator[Facts]:
    try:
        case = session.case
        regions, num_steps = case.compiled_regions, case.num_steps
    except Unavailable:
        return
    if regions.is_empty():
        return
    rows = [Fact("compiled regions", f"{average(regions.height / num_steps)} calls per step")]
    if num_nested := int(regions["is_nested"].sum()):
        entered = case.within(entering(case.linked, regions, all_but_first=False))
        entering_ns = float((entered["end_ns"] - entered["start_ns"]).sum()) / num_steps
        breaks = f"{average(num_nested / num_steps)} calls per step come from another region: the graph broke there"
        rows.append(Fact("broken graphs", breaks, f"{duration(entering_ns, 3)} host time per step to enter them"))
    yield Facts(tuple(rows), "in the trace", page_only=True)


def check_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a check as JSON values: the row as it was written, and the compiler's figures."""
    summary = _check_summary(row)
    kept = {name: value for name, value in row.items() if name not in ("compiler_report", "stage")}
    return {**kept, "verdict": _check_verdict(row), "compiler": None if summary is None else summary.to_json()}


def checks_document(rows: Sequence[Mapping[str, Any]]) -> Document:
    axes = [{"preset": row["preset"], **row["config"], **row["run"]} for row in rows]
    varying = list(varying_axes(axes)[0])
    titles = []
    for row, values in zip(rows, axes):
        run = row["run"]
        named = ", ".join(f"{name}={safe(values[name])}" for name in varying if values.get(name) is not None)
        how = named or f"compile={run['compile']}, {run['mode']}, {run['dtype']}, {run['device']}"
        titles.append(f"{safe(row['workload'])}, {how}: {_check_verdict(row)}")
    sections = [Section("check", title, tuple(_check_parts(row))) for title, row in zip(titles, rows)]
    counts = ", ".join(f"{number} {verdict}" for verdict, number in Counter(map(_check_verdict, rows)).items())
    verdict = titles[0] if len(rows) == 1 else f"{len(rows)} checks: {counts}"
    return Document("Compile checks", verdict, tuple(sections))


def _check_verdict(row: Mapping[str, Any]) -> str:
    """Return `same`, `differs`, `does not compile`, or the status of a check that did not finish."""
    if row.get("compiles") is False:
        return "does not compile"
    return VERDICTS.get(str(row["status"]), str(row["status"]))


def _check_summary(row: Mapping[str, Any]) -> CompilerSummary | None:
    """Return the compiler's figures with the times of the first shape; None if nothing was compiled."""
    report = row.get("compiler_report")
    if not isinstance(report, dict) or not report.get("num_compiles"):
        return None
    first: Mapping[str, Any] = next(iter(row.get("shapes") or ()), {})
    return compiler_summary(report, first.get("compiled_ns"), first.get("eager_ns"))


def _check_parts(row: Mapping[str, Any]) -> Iterator[Part]:
    if row.get("reason"):
        yield Text(safe(row["reason"], 600))
    shapes = [shape for shape in row.get("shapes") or () if "first_call_ns" in shape]
    columns = columns_of(
        shapes,
        "shape first_call_ns compiled_ns eager_ns output_deviation gradient_deviation is_same",
        shape=lambda one: ", ".join(f"{name}={value}" for name, value in one["shape"].items()) or "as built",
        output_deviation=lambda one: _deviation(one, "outputs"),
        gradient_deviation=lambda one: _deviation(one, "gradients"),
        is_same=lambda one: bool(one["passed"]),
    )
    yield Table("check_shapes", "Compiled against eager code", without_empty(columns))
    if (summary := _check_summary(row)) is not None:
        yield from _with_verdict(summary)
    if len(row.get("shapes") or ()) == 1 and row["status"] == "ok":
        yield Text("Only one shape was checked. Name a knob with two values, such as --shapes batch=4,6.")


def _deviation(shape: Mapping[str, Any], kind: str) -> str | None:
    if kind not in shape["deviations"]:
        return None
    value = shape["deviations"][kind]
    return "not a number" if value is None else f"{value:.1e}" if value else "0"

"""The document of `stepscope analyze`: where the time in a trace goes, the first rank in full."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stepscope.analysis.ranks.all_ranks import NUM_ROWS, Analysis
from stepscope.document.model import Document, Fact, Facts, Part, Section, Text
from stepscope.document.sections import kernels, modules, ranks
from stepscope.document.sections.time import STEP_SOURCES, gpu_time_parts, step_parts_of_trace
from stepscope.document.trace_facts import caveats, trace_facts
from stepscope.document.verdict import trace_verdict
from stepscope.formatting import duration, plural


def analysis_document(analysis: Analysis, num_rows: int = NUM_ROWS) -> Document:
    """Return where the time goes, in parts that the report has too; `num_rows` limits the lists of names."""
    first = analysis.ranks[0]
    has_gpu = bool(first.gpu_time.window_ns)
    parts: list[Part] = [Facts(tuple(_source(analysis))), *gpu_time_parts(first), *step_parts_of_trace(first)]
    if has_gpu:
        parts += [replace(kernels.kernel_table(first), num_shown=num_rows), Text(kernels.work_text(first))]
    if modules.say_more_than_ops(first):
        names = modules.group_table(first)
    else:
        names = replace(kernels.op_table(first), title="ops (the trace names no modules)")
    parts.append(replace(names, num_shown=num_rows))
    if analysis.across is not None:
        parts.append(ranks.rank_table(analysis.across))
    if facts := (*trace_facts(analysis), *caveats(analysis)):
        parts.append(Facts(facts))
    return Document(first.path, trace_verdict(first), (Section("time", "Time", tuple(parts)),))


def _source(analysis: Analysis) -> Iterator[Fact]:
    first, num_ranks = analysis.ranks[0], len(analysis.ranks)
    name = Path(first.path).name if num_ranks == 1 else f"{num_ranks} ranks"
    yield Fact("trace", name, plural(sum(rank.num_events for rank in analysis.ranks), "event"))
    yield Fact("device", first.device_name or ("unnamed GPU" if first.gpu_time.window_ns else "no GPU"))
    if num := first.steps.height:
        mean = f"{plural(num, 'step')} of {duration(int(first.steps['duration_ns'].sum()) / num)}"
        how = STEP_SOURCES[first.step_source]
        how = f"on average, {how}" if num > 1 else how.replace("each", "it")
        yield Fact("steps", mean, f"{how}; includes profiler overhead")
    else:
        yield Fact("steps", "none found", "nothing in the trace marks the end of a step")
    if num_ranks > 1:
        yield Fact("rank", f"{first.rank}", "tables without a rank are of this one; --rank selects another")

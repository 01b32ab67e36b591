"""Where the GPU time goes, why the GPU was idle, where a step goes: for `analyze` and the overview of a report."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.analysis.ranks.rank_account import NUM_ROWS, Analysis, RankAccount
from stepscope.analysis.time.idle_causes import CAUSES
from stepscope.analysis.time.phases import IDLE, UNATTRIBUTED, Row
from stepscope.analysis.time.step_parts import gpu_rows_of_trace, gpu_split, host_rows, host_rows_of_trace, waiting_ns
from stepscope.analysis.time.summary import Summary
from stepscope.document.card import how_split
from stepscope.document.model import Bars, Document, Fact, Facts, Missing, Part, Section, Series, Table, Text
from stepscope.document.sections import kernels, modules, ranks
from stepscope.document.tables import columns_of, plain, table_of
from stepscope.document.trace_facts import not_attributed, trace_facts, warnings
from stepscope.document.verdict import trace_verdict
from stepscope.formatting import duration, plural

STEP_SOURCES = {
    "ProfilerStep": "labeled by the profiler",
    "range": "labeled by ranges in your code",
    "optimizer": "each ends with an optimizer step",
    "backward": "each ends with a backward",
}
_PHASE_SOURCES = {
    "labels": "phases from Stepscope's labels",
    "annotations": "phases from the labels in the trace and from autograd",
    "autograd": "phases from autograd",
}
_WHERE = "where_a_step_goes"


def gpu_time_parts(account: RankAccount) -> Iterator[Part]:
    """Yield the GPU's window by what it did, then its idle time by cause; nothing without GPU work."""
    time, split = account.gpu_time, gpu_split(account.gpu_time)
    if not split:
        return
    title = f"where the GPU time goes ({duration(time.window_ns)}, first to last event)"
    shown = [row for row in split if row.ns or row.name in ("compute", IDLE)]
    series = (Series("GPU time", [row.ns for row in shown]),)
    yield Bars("gpu_time", title, [row.name for row in shown], series, "time_ns")
    note = "communication and copies: what no compute overlapped"
    yield Table("gpu_time", "GPU time", columns_of(split, "part:name total_ns:ns share"), note=note, page_only=True)
    if not time.idle_ns:
        yield Text("The GPU was never idle between its first and its last event.")
        return
    causes = account.idle_causes.filter(pl.col("total_ns") > 0).sort("total_ns", descending=True)
    title = f"why the GPU was idle ({duration(time.idle_ns)})"
    counts = causes.select("cause", "num_gaps").rows()
    labels = [f"{cause.replace('_', ' ')}, {plural(num, 'gap')}" for cause, num in counts]
    yield Bars("idle_causes", title, labels, (Series("idle", causes["total_ns"].to_list()),), "total_ns")
    meant = causes.with_columns(pl.Series("what_it_is", [CAUSES[cause] for cause in causes["cause"]]))
    yield table_of(meant, "idle_causes", "idle time by cause", page_only=True)
    steps, gaps = account.steps, kernels.with_titles(account, account.longest_gaps, "next_kernel")
    zero = "the first step" if steps.height else "the first of them"
    first_ns = steps["start_ns"].min() if steps.height else gaps["start_ns"].min()
    names = "begin_ns duration_ns cause step host next_kernel:title begin_on_trace_clock:start_ns"
    note = f"begin: since {zero}; host: what the launching thread was in, outermost first"
    gaps = gaps.with_columns((pl.col("start_ns") - pl.lit(first_ns)).alias("begin_ns"))
    yield table_of(gaps, "longest_gaps", "longest idle gaps", names, note=note, page_only=True)


def step_parts_of_summary(summary: Summary) -> Iterator[Part]:
    """Yield where a recorded step goes, on the GPU and on the host."""
    if not summary.rows:
        yield Missing("where a step goes: there are no clean steps; run longer, or lower --warmup")
        return
    rows = {"host": [*summary.rows]}
    if summary.clock == "device":
        rows = {"GPU": [*summary.rows], "host": host_rows(summary.phases)}
    waits = {phase.name: waiting_ns(phase) for phase in summary.phases}
    more = {"gpu_waiting_ns": waits} if any(row.name == IDLE for row in summary.rows) else {}
    note = f"{how_split(summary)}; mean of the middle half of {plural(summary.num_clean, 'clean step')}"
    yield from _step_parts("where a step goes", rows, more, note)


def step_parts_of_trace(account: RankAccount) -> Iterator[Part]:
    """Yield where a traced step goes, on the GPU and on the host; the whole trace if it has no steps."""
    num_steps = account.steps.height
    gpu, host = gpu_rows_of_trace(account), host_rows_of_trace(account)
    rows = {name: found for name, found in (("GPU", gpu), ("host", host)) if any(row.ns for row in found)}
    if not rows:
        why = "the trace has neither ops nor GPU work; record the steps of a training loop"
        yield Missing(f"where the time goes: {why}")
        return
    notes = [_PHASE_SOURCES[account.phase_source]]
    notes += ["GPU work belongs to the phase that launched it"] if gpu else []
    notes += [f"mean of {num_steps} traced steps"] if num_steps > 1 else []
    counts = dict(account.phases.select("phase", pl.col("num_kernels") / max(1, num_steps)).iter_rows())
    title = "where a step goes" if num_steps else "where the time goes"
    yield from _step_parts(title, rows, {"num_kernels": counts} if gpu else {}, "; ".join(notes))


def _step_parts(
    title: str, rows: dict[str, list[Row]], more: dict[str, dict[str, Any]], note: str
) -> Iterator[Bars | Table]:
    """Yield a chart of shares and a table: phases first, then idle time and what belongs to no phase."""
    every = dict.fromkeys(row.name for found in rows.values() for row in found)
    names = [name for name in every if name not in (IDLE, UNATTRIBUTED)]
    names += [*([IDLE] if IDLE in every else []), UNATTRIBUTED]
    by_name = {whose: {row.name: row for row in found} for whose, found in rows.items()}
    shares = {name: [of[name].share if name in of else 0.0 for of in by_name.values()] for name in names}
    caption = f"{note[:1].upper()}{note[1:]}."
    series = tuple(Series(name, values, color=name) for name, values in shares.items() if any(values))
    yield Bars(_WHERE, title, list(rows), series, "share", caption=caption, page_only=True)
    columns: dict[str, Sequence[Any]] = {"part": names}
    for whose, of in by_name.items():
        of.setdefault(UNATTRIBUTED, Row(UNATTRIBUTED, 0.0, 0.0))
        columns[f"{whose.lower()}_ns"] = [of[name].ns if name in of else None for name in names]
        columns[f"{whose.lower()}_share"] = [of[name].share if name in of else None for name in names]
    columns |= {column: [plain(of.get(name)) for name in names] for column, of in more.items()}
    screen = ("part", "host_ns", "host_share", "gpu_ns", "num_kernels", "gpu_share")
    yield Table(_WHERE, title, columns, note=note, screen=tuple(name for name in screen if name in columns))


def analysis_document(analysis: Analysis, num_rows: int = NUM_ROWS) -> Document:
    """Return where the time goes, in parts that the report has too; `num_rows` limits the lists of names."""
    first = analysis.ranks[0]
    has_gpu = bool(first.gpu_time.window_ns)
    parts: list[Part] = [Facts(tuple(_source(analysis))), *gpu_time_parts(first), *step_parts_of_trace(first)]
    if has_gpu:
        parts += [replace(kernels.kernel_table(first), num_shown=num_rows), Text(kernels.work_text(first))]
    if modules.say_more_than_ops(first):
        parts.append(replace(modules.group_table(first), num_shown=num_rows))
    else:
        parts.append(replace(kernels.op_table(first), title="ops (the trace names no modules)", num_shown=num_rows))
    if analysis.across is not None and int(analysis.across.table["window_ns"].sum()):
        parts.append(ranks.rank_table(analysis.across))
    if facts := (*trace_facts(analysis), *not_attributed(analysis)):
        parts.append(Facts(facts))
    return Document(first.path, trace_verdict(first), (Section("time", "Time", tuple(parts)),))


def _source(analysis: Analysis) -> Iterator[Fact]:
    first, num_ranks = analysis.ranks[0], len(analysis.ranks)
    name = Path(first.path).name if num_ranks == 1 else f"{num_ranks} ranks"
    yield Fact("trace", name, plural(sum(rank.num_events for rank in analysis.summaries), "event"))
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
    yield from warnings(analysis)

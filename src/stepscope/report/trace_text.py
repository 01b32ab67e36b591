"""An analysis on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from stepscope.analysis.ops import module_groups
from stepscope.analysis.rank import RankAccount
from stepscope.analysis.traces import Analysis
from stepscope.report.kernel_names import short_name
from stepscope.report.text import microseconds, milliseconds, percent, plural, safe, significant
from stepscope.report.trace_facts import fact_lines
from stepscope.report.trace_verdict import trace_verdict

BAR_WIDTH = 20
_SPLIT = (
    ("compute", "compute_ns"),
    ("communication", "exposed_communication_ns"),
    ("copies, fills", "exposed_memory_ns"),
    ("idle", "idle_ns"),
)
_STEP_SOURCES = {
    "ProfilerStep": "as labelled by the profiler",
    "optimizer": "each ends with an optimizer step",
    "backward": "each ends with a backward",
}
_MODULE_SOURCES = {"ranges": "from Stepscope's labels", "stacks": "from the Python stacks in the trace"}


def analysis_text(analysis: Analysis, most: int, width: int = 100) -> str:
    """The screen: the first rank in full, the others side by side."""
    first = analysis.ranks[0]
    lines = [*_head(analysis), "", *_wrapped(trace_verdict(first), width), ""]
    if first.gpu_time.window_ns:
        lines += [*_gpu(first), "", *_idle(first), *_gaps(first, width)]
    lines += [*_phases(first), ""]
    if first.gpu_time.window_ns:
        lines += [*_kernels(first, most, width), "", *_classes(first, width), ""]
    lines += [*_modules(first, most, width), *_ranks(analysis)]
    lines += [*fact_lines(analysis)]
    return "\n".join(line for long in lines for line in _fitted(long.rstrip(), width))


def _head(analysis: Analysis) -> Iterator[str]:
    first = analysis.ranks[0]
    names = Path(first.path).name if len(analysis.ranks) == 1 else f"{len(analysis.ranks)} ranks"
    events = sum(rank.num_events for rank in analysis.ranks)
    yield f"{safe(names)}   {safe(first.device_name or 'no GPU')}   {events:,} events"
    if first.steps.height:
        total = int(first.steps["duration_ns"].sum())
        yield (
            f"{plural(first.steps.height, 'step')} of {milliseconds(total / first.steps.height)} on average, "
            f"{_STEP_SOURCES[first.step_source]}; traced steps are slower than clean ones"
        )
    else:
        yield "no steps found: nothing in the trace says where one ends"
    if len(analysis.ranks) > 1:
        yield f"below: rank {first.rank}; --rank chooses another"


def _gpu(account: RankAccount) -> Iterator[str]:
    time = account.gpu_time
    yield f"where the GPU's time goes ({milliseconds(time.window_ns)} from its first event to its last)"
    for title, name in _SPLIT:
        ns = getattr(time, name)
        if ns or title in ("compute", "idle"):
            yield _bar_line(title, ns, ns / time.window_ns)
    if time.communication_ns:
        hidden = time.overlapped_communication_ns / time.communication_ns
        whole = milliseconds(time.communication_ns)
        yield f"  {'':<16}{percent(hidden)} of {whole} communication hides behind compute"
    for index, other in account.gpu_time_by_device.items():
        busy = other.busy_ns / max(1, other.window_ns)
        yield f"  {f'device {index}':<16}{milliseconds(other.window_ns):>11}   busy {percent(busy)}"


def _idle(account: RankAccount) -> Iterator[str]:
    if not account.gpu_time.idle_ns:
        return
    yield f"why it was idle ({milliseconds(account.gpu_time.idle_ns)})"
    table = account.idle_causes.filter(account.idle_causes["total_ns"] > 0).sort("total_ns", descending=True)
    for row in table.iter_rows(named=True):
        yield f"{_bar_line(row['cause'], row['total_ns'], row['share'])}{'':<2}{plural(row['num_gaps'], 'gap')}"


def _gaps(account: RankAccount, width: int) -> Iterator[str]:
    for row in account.longest_gaps.head(1).iter_rows(named=True):
        inside = f" in {safe(row['host'])}" if row["host"] else ""
        text = (
            f"longest {milliseconds(row['duration_ns'])}{inside}, before {short_name(safe(row['next_kernel']), 40)}"
        )
        yield f"  {'':<16}{_cut(text, width - 18)}"
        yield ""


def _phases(account: RankAccount) -> Iterator[str]:
    steps = max(1, account.steps.height)
    per = "a step" if account.steps.height else "in all"
    title = f"where {'a step' if account.steps.height else 'the time'} goes"
    yield f"{title:<18}{'host':>15}{'':>9}   {'GPU work':>18}   kernels {per}"
    for row in account.phases.iter_rows(named=True):
        host, gpu = milliseconds(row["host_ns"] / steps), milliseconds(row["device_ns"] / steps)
        yield (
            f"  {row['phase']:<16}{host:>15}{percent(row['host_share']):>9}   {gpu:>18}   "
            f"{significant(row['num_kernels'] / steps, 4):>7}"
        )
    how = {
        "labels": "phases as Stepscope labelled them",
        "annotations": "phases from the labels in the trace, the rest found from autograd",
        "autograd": "phases found from autograd's ops",
    }
    yield f"  {how[account.phase_source]}; GPU work belongs to the phase that launched it"


def _kernels(account: RankAccount, most: int, width: int) -> Iterator[str]:
    room = max(12, width - 54)
    yield f"{'kernels':<{room + 2}} {'calls':>8} {'mean':>10} {'p99':>10} {'total':>11} {'share':>7}"
    for row in account.top_kernels.head(most).iter_rows(named=True):
        name = short_name(safe(row["name"], 1000), room)
        mean, slow = microseconds(row["mean_ns"]), microseconds(row["p99_ns"])
        total, share = milliseconds(row["total_ns"]), percent(row["share"])
        yield f"  {name:<{room}} {row['num_calls']:>8,} {mean:>10} {slow:>10} {total:>11} {share:>7}"


def _classes(account: RankAccount, width: int) -> Iterator[str]:
    shown = [
        f"{row['class']} {percent(row['share'])}"
        for row in account.kernel_classes.iter_rows(named=True)
        if row["share"] >= 0.001
    ]
    unknown = next((r["share"] for r in account.kernel_classes.iter_rows(named=True) if r["class"] == "other"), 0.0)
    yield "kernel time by class"
    yield from ("  " + line for line in _wrapped("   ".join(shown), width - 2, "   "))
    yield f"  unclassified {percent(unknown)}"


def _modules(account: RankAccount, most: int, width: int) -> Iterator[str]:
    if account.module_source == "none":
        yield from _ops(account, most, width)
        return
    room = max(12, width - 54)
    title = f"modules, {_MODULE_SOURCES[account.module_source]}"
    yield f"{title:<{room + 2}} {'forward':>13} {'backward':>13} {'total':>13} {'share':>7}"
    whole = max(1, int(account.modules["device_self_ns"].sum()))
    for row in module_groups(account.modules).head(most).iter_rows(named=True):
        times = f"{plural(row['num_modules'], 'module')} " if row["num_modules"] > 1 else ""
        name = _cut(safe(row["module"] or "outside every module"), room - len(times) - 1)
        forward, backward = milliseconds(row["device_forward_ns"]), milliseconds(row["device_backward_ns"])
        total, share = milliseconds(row["device_total_ns"]), percent(row["device_total_ns"] / whole)
        yield f"  {name:<{room - len(times)}}{times} {forward:>13} {backward:>13} {total:>13} {share:>7}"
    yield "  GPU work with all modules inside; * stands for every number"
    yield ""


def _ops(account: RankAccount, most: int, width: int) -> Iterator[str]:
    """What stands for modules in a trace that does not name them."""
    room = max(12, width - 54)
    title = "ops (the trace names no modules)"
    yield f"{title:<{room + 2}} {'calls':>8} {'host, own':>13} {'GPU, own':>13} {'share':>7}"
    named = account.ops.filter(account.ops["op"].is_not_null())
    column = "device_self_ns" if account.gpu_time.window_ns else "host_self_ns"
    whole = max(1, int(account.ops[column].sum()))
    for row in named.head(most).iter_rows(named=True):
        host, gpu = milliseconds(row["host_self_ns"]), milliseconds(row["device_self_ns"])
        share = percent(row[column] / whole)
        yield f"  {_cut(safe(row['op']), room):<{room}} {row['num_calls']:>8,} {host:>13} {gpu:>13} {share:>7}"
    yield ""


def _ranks(analysis: Analysis) -> Iterator[str]:
    if len(analysis.ranks) < 2:
        return
    titles = f"{'busy':>8} {'compute':>9} {'exposed comm.':>14} {'hidden comm.':>13} {'idle':>8}"
    yield f"{'ranks':<8}{'window':>12} {titles}"
    for rank in analysis.ranks:
        time = rank.gpu_time
        window = max(1, time.window_ns)
        hidden = percent(time.overlapped_communication_ns / time.communication_ns) if time.communication_ns else "–"
        yield (
            f"  {rank.rank:<6}{milliseconds(time.window_ns):>12} {percent(time.busy_ns / window):>8} "
            f"{percent(time.compute_ns / window):>9} {percent(time.exposed_communication_ns / window):>14} "
            f"{hidden:>13} {percent(time.idle_ns / window):>8}"
        )
    yield ""


def _bar_line(title: str, ns: int, share: float) -> str:
    bar = "█" * round(BAR_WIDTH * share)
    return f"  {title:<16}{milliseconds(ns):>11} {percent(share):>8}  {bar:<{BAR_WIDTH}}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _fitted(line: str, width: int) -> list[str]:
    """A line, and what is too long for the terminal below it, in the same column as its text."""
    if len(line) <= width:
        return [line]
    column = 13 if line[:13].strip() and line[12:13] == " " and not line.startswith(" ") else 2
    return textwrap.wrap(line, width, subsequent_indent=" " * column, break_on_hyphens=False)


def _wrapped(text: str, width: int, separator: str = " ") -> Iterable[str]:
    line: list[str] = []
    for word in text.split(separator):
        if line and len(separator.join([*line, word])) > width:
            yield separator.join(line)
            line = []
        line.append(word)
    yield separator.join(line)

"""An analysis on one screen."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from stepscope.analysis.kernels.ops import module_groups
from stepscope.analysis.ranks.all_ranks import Analysis
from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.analysis.time.phases import UNATTRIBUTED
from stepscope.document.kernel_names import kernel_titles, short_name
from stepscope.document.text.trace_tables import Column, table_lines
from stepscope.document.trace_facts import fact_lines
from stepscope.document.trace_verdict import trace_verdict
from stepscope.formatting import average, duration, percent, plural, safe, shortened

BAR_WIDTH = 20
_SPLIT = (
    ("compute", "compute_ns"),
    ("communication", "exposed_communication_ns"),
    ("copies, fills", "exposed_memory_ns"),
    ("idle", "idle_ns"),
)
STEP_SOURCES = {
    "ProfilerStep": "as labeled by the profiler",
    "optimizer": "each ends with an optimizer step",
    "backward": "each ends with a backward",
}
PHASE_SOURCES = {
    "labels": "phases as Stepscope labeled them",
    "annotations": "phases from the labels in the trace, the rest found from autograd",
    "autograd": "phases found from autograd's ops",
}
_GLUE = "\N{NO-BREAK SPACE}"
_LEAST_COMPILED_SHARE = 0.01
_MODULE_SOURCES = {
    "ranges": "from Stepscope's labels",
    "stacks": "from the Python stacks in the trace",
    "compiled": "from the regions of compiled code",
}


def analysis_text(analysis: Analysis, most: int, width: int = 100) -> str:
    """The screen: the first rank in full, the others side by side."""
    first = analysis.ranks[0]
    lines = [*_head(analysis), "", *_wrapped(trace_verdict(first), width), ""]
    if first.gpu_time.window_ns:
        lines += [*_gpu(first, width), "", *_idle(first, width), *_gaps(first, width)]
    lines += [*_phases(first, width), ""]
    if first.gpu_time.window_ns:
        lines += [*_kernels(first, most, width), "", *_classes(first, width), ""]
    modules = _modules if _shows_modules(first) else _ops
    lines += [*modules(first, most, width), "", *_ranks(analysis, width), *fact_lines(analysis)]
    return "\n".join(line for long in lines for line in _fitted(long.rstrip(), width)).rstrip("\n")


def _shows_modules(account: RankAccount) -> bool:
    """Whether modules say more than ops: compiled regions alone do where work of the step is in them."""
    if account.module_source != "compiled":
        return account.module_source != "none"
    inside = account.modules.filter(account.modules["module"].is_not_null())
    spent = "device_total_ns" if account.gpu_time.window_ns else "host_total_ns"
    return int(inside[spent].sum()) > _LEAST_COMPILED_SHARE * int(account.modules[spent].sum())


def _head(analysis: Analysis) -> Iterator[str]:
    first = analysis.ranks[0]
    names = Path(first.path).name if len(analysis.ranks) == 1 else f"{len(analysis.ranks)} ranks"
    events = plural(sum(rank.num_events for rank in analysis.ranks), "event")
    no_name = "GPU not named" if first.gpu_time.window_ns else "no GPU"
    yield f"{safe(names)}   {safe(first.device_name or no_name)}   {events}"
    whose = f"rank {first.rank}: " if len(analysis.ranks) > 1 else ""
    if num := first.steps.height:
        mean = duration(int(first.steps["duration_ns"].sum()) / num)
        how = STEP_SOURCES[first.step_source]
        many = f" on average, {how}" if num > 1 else f", {how.replace('each', 'it')}"
        yield f"{whose}{plural(num, 'step')} of {mean}{many}; traced steps are slower than clean ones"
    else:
        yield f"{whose}no steps found: nothing in the trace says where one ends"
    if whose:
        yield f"below: rank {first.rank}; --rank chooses another"


def _gpu(account: RankAccount, width: int) -> Iterator[str]:
    time = account.gpu_time
    yield f"where the GPU's time goes (of {duration(time.window_ns)}, from its first event to its last)"
    for title, name in _SPLIT:
        ns = getattr(time, name)
        if ns or title in ("compute", "idle"):
            yield _bar_line(title, ns, ns / time.window_ns, width)
    if time.communication_ns:
        hidden = time.overlapped_communication_ns / time.communication_ns
        whole = duration(time.communication_ns)
        yield f"  {'':<16}{percent(hidden)} of {whole} communication hides behind compute"
    for index, other in account.gpu_time_by_device.items():
        busy = other.busy_ns / max(1, other.window_ns)
        yield f"  {f'device {index}':<16}{duration(other.window_ns):>11}   busy {percent(busy)}"


def _idle(account: RankAccount, width: int) -> Iterator[str]:
    if not account.gpu_time.idle_ns:
        return
    yield f"why it was idle (of {duration(account.gpu_time.idle_ns)})"
    table = account.idle_causes.filter(account.idle_causes["total_ns"] > 0).sort("total_ns", descending=True)
    for row in table.iter_rows(named=True):
        yield f"{_bar_line(row['cause'], row['total_ns'], row['share'], width)}  {plural(row['num_gaps'], 'gap')}"


def _gaps(account: RankAccount, width: int) -> Iterator[str]:
    for row in account.longest_gaps.head(1).iter_rows(named=True):
        before = f", before {shortened(short_name(safe(row['next_kernel'] or '?', 1000), 1000), 24)}"
        text = f"longest {duration(row['duration_ns'])}"
        room = max(8, width - 22 - len(text) - len(before))
        inside = f" in {shortened(safe(row['host'], 1000), room, 0.25)}" if row["host"] else ""
        yield f"  {'':<16}{shortened(text + inside + before, width - 18, 1.0)}"
        yield ""


def _phases(account: RankAccount, width: int) -> Iterator[str]:
    num_steps = account.steps.height
    steps, has_gpu = max(1, num_steps), bool(account.gpu_time.window_ns)
    rows = [row for row in account.phases.iter_rows(named=True) if row["phase"] != UNATTRIBUTED]
    columns = [
        Column("host", [duration(row["host_ns"] / steps) for row in rows]),
        Column("of step" if num_steps else "of host", [percent(row["host_share"]) for row in rows], rank=1),
    ]
    if has_gpu:
        columns += [
            Column("GPU work", [duration(row["device_ns"] / steps) for row in rows]),
            Column("kernels", [average(row["num_kernels"] / steps) for row in rows]),
        ]
    title = "where a step goes" if num_steps else "where the time goes"
    yield from table_lines(title, [row["phase"] for row in rows], columns, width)
    whose = "; GPU work belongs to the phase that launched it" if has_gpu else ""
    yield f"  {PHASE_SOURCES[account.phase_source]}{whose}"
    yield from _unattributed(account)


def _unattributed(account: RankAccount) -> Iterator[str]:
    """GPU work of no phase, which is not in the figures of a step."""
    row = account.phases.filter(account.phases["phase"] == UNATTRIBUTED).row(0, named=True)
    if not row["device_ns"] and not row["num_kernels"]:
        return
    num_unlaunched = min(row["num_kernels"], int(account.launches["num_unlaunched_kernels"] or 0))
    reasons = []
    if num_unlaunched:
        reasons.append(f"{num_unlaunched:,} without a launch in the trace")
    if row["num_kernels"] > num_unlaunched:
        reasons.append(f"{row['num_kernels'] - num_unlaunched:,} launched outside the steps")
    why = f": {', '.join(reasons)}" if reasons else ""
    kernels = plural(row["num_kernels"], "kernel")
    yield f"  in none of these: {kernels}{why}; {duration(row['device_ns'])} of GPU work in all"


def _kernels(account: RankAccount, most: int, width: int) -> list[str]:
    rows = account.top_kernels.head(most).to_dicts()
    columns = [
        Column("calls", [f"{row['num_calls']:,}" for row in rows], rank=1),
        Column("mean", [duration(row["mean_ns"], 3) for row in rows], rank=2),
        Column("p99", [duration(row["p99_ns"], 3) for row in rows], rank=3),
        Column("total", [duration(row["total_ns"]) for row in rows]),
        Column("of GPU work", [percent(row["share"]) for row in rows]),
    ]
    return table_lines("kernels", kernel_titles([row["name"] or "" for row in rows]), columns, width, head=1.0)


def _classes(account: RankAccount, width: int) -> Iterator[str]:
    shares = {row["class"]: row["share"] for row in account.kernel_classes.iter_rows(named=True)}
    unknown = shares.pop("other", 0.0)
    shown = [f"{name} {percent(share)}" for name, share in shares.items() if share >= 0.001]
    yield f"GPU work by class (of {duration(_work_ns(account))}, the sum of all durations)"
    text = "   ".join([*shown, f"unclassified {percent(unknown)}"])
    yield from ("  " + line for line in _wrapped(text, width - 2, "   "))


def _work_ns(account: RankAccount) -> int:
    return int(account.kernel_classes["total_ns"].sum())


def _modules(account: RankAccount, most: int, width: int) -> Iterator[str]:
    groups = module_groups(account.modules)
    has_gpu = bool(account.gpu_time.window_ns)
    if not has_gpu:
        groups = groups.filter(groups["module"].is_not_null())
    rows = groups.head(most).to_dicts()
    device, host = "device_total_ns", "host_total_ns"
    whole = max(1, int(account.modules["device_self_ns" if has_gpu else "host_self_ns"].sum()))
    modules = Column("modules", [f"{row['num_modules']:,}" for row in rows], rank=3)
    if has_gpu:
        columns = [
            modules,
            Column("forward", [duration(row["device_forward_ns"]) for row in rows], rank=1),
            Column("backward", [duration(row["device_backward_ns"]) for row in rows], rank=2),
            Column("total", [duration(row[device]) for row in rows]),
            Column("of GPU work", [percent(row[device] / whole) for row in rows]),
        ]
    else:
        columns = [
            modules,
            Column("host, own", [duration(row["host_self_ns"]) for row in rows], rank=1),
            Column("host, total", [duration(row[host]) for row in rows]),
            Column("of modules' time", [percent(row[host] / whole) for row in rows]),
        ]
    names = [safe(row["module"] or "outside every module", 1000) for row in rows]
    yield from table_lines(f"modules, {_MODULE_SOURCES[account.module_source]}", names, columns, width)
    what = "GPU work" if has_gpu else "totals"
    yield f"  {what} with all modules inside; * stands for every number"


def _ops(account: RankAccount, most: int, width: int) -> list[str]:
    """What stands for modules in a trace that does not name them."""
    rows = account.ops.filter(account.ops["op"].is_not_null()).head(most).to_dicts()
    has_gpu = bool(account.gpu_time.window_ns)
    column, of = ("device_self_ns", "GPU work") if has_gpu else ("host_self_ns", "ops' time")
    whole = max(1, int(account.ops[column].sum()))
    columns = [
        Column("calls", [f"{row['num_calls']:,}" for row in rows], rank=2),
        Column("host, own", [duration(row["host_self_ns"]) for row in rows], rank=1 if has_gpu else 0),
    ]
    if has_gpu:
        columns.append(Column("GPU, own", [duration(row["device_self_ns"]) for row in rows]))
    columns.append(Column(f"of {of}", [percent(row[column] / whole) for row in rows]))
    return table_lines("ops (the trace names no modules)", [safe(row["op"], 1000) for row in rows], columns, width)


def _ranks(analysis: Analysis, width: int) -> list[str]:
    if len(analysis.ranks) < 2:
        return []
    times = [rank.gpu_time for rank in analysis.ranks]

    def shares(name: str, of: str = "window_ns") -> list[str]:
        return [percent(getattr(time, name) / getattr(time, of)) if getattr(time, of) else "–" for time in times]

    columns = [
        Column("window", [duration(time.window_ns) for time in times]),
        Column("busy", shares("busy_ns"), rank=2),
        Column("compute", shares("compute_ns"), rank=1),
        Column("exposed comm.", shares("exposed_communication_ns")),
        Column("hidden comm.", shares("overlapped_communication_ns", "communication_ns"), rank=3),
        Column("idle", shares("idle_ns")),
    ]
    names = [str(rank.rank) for rank in analysis.ranks]
    notes = ["  of the window; hidden comm. is of communication"] if any(c.communication_ns for c in times) else []
    return [*table_lines("ranks", names, columns, width), *notes, ""]


def _bar_line(title: str, ns: int, share: float, width: int) -> str:
    most = max(0, min(BAR_WIDTH, width - 54))
    return f"  {title:<16}{duration(ns):>11} {percent(share):>8}  {'█' * round(most * share):<{most}}"


def _fitted(line: str, width: int) -> list[str]:
    """A line, and what is too long for the terminal below it, in the same column as its text."""
    if len(line) <= width:
        return [line]
    column = 13 if line[:13].strip() and line[12:13] == " " and not line.startswith(" ") else 2
    lines = textwrap.wrap(_glued(line), width, subsequent_indent=" " * column, break_on_hyphens=False)
    return [part.replace(_GLUE, " ") for part in lines]


def _wrapped(text: str, width: int, separator: str = " ") -> Iterable[str]:
    line: list[str] = []
    for word in _glued(text).split(separator):
        if line and len(separator.join([*line, word])) > width:
            yield separator.join(line).replace(_GLUE, " ")
            line = []
        line.append(word)
    yield separator.join(line).replace(_GLUE, " ")


def _glued(text: str) -> str:
    """A text in which no line ends between a number and its unit."""
    return re.sub(r"(?<=\d) (?=%|(?:ns|µs|ms|s|[KMG]iB)\b)", _GLUE, text)

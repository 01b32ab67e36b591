"""The section `modules`: time and memory at the peak by module."""

from collections.abc import Iterator
from typing import Any

import polars as pl

from stepscope.analysis.kernels.ops import module_groups
from stepscope.analysis.memory.account import REMAINDER
from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.document.memory_charts import OUTSIDE
from stepscope.document.model import Missing, Part, Table, Text, Tree
from stepscope.document.sections.trees import Branch, module_path, own_of
from stepscope.document.tables import table_of
from stepscope.errors import Unavailable
from stepscope.formatting import duration, percent, plural, size
from stepscope.session import Session
from stepscope.session.memory import RECORDING, MemoryReport

_NO_NAMES = (
    "the trace names no modules: profile(with_stack=True) names them by class and number, `stepscope run train.py` "
    "by their full names"
)
_SOURCES = {
    "ranges": "from Stepscope's labels",
    "stacks": "from the Python stacks in the trace",
    "compiled": "from the regions of compiled code",
}
_LEAST_COMPILED_SHARE = 0.01


def parts(session: Session) -> tuple[Part, ...]:
    """Return time by module, of the GPU if there is one, else of the host; memory at the peak by module; tables."""
    found: list[Part]
    tables: list[Table] = []
    try:
        account = session.analysis.ranks[0]
        found = list(_time(account))
        note = "totals include the modules inside; backward work belongs to the module whose forward needed it"
        every = _table(account, account.modules, "modules", "all modules", "module", note=note)
        tables = [group_table(account), every]
    except Unavailable as reason:
        found = [Missing(str(reason))]
    try:
        found += _memory(session.memory)
    except Unavailable as reason:
        found += [Missing(f"memory by module: {reason}")] if tables else []
    return (*found, *tables)


def say_more_than_ops(account: RankAccount) -> bool:
    """Return whether modules say more than ops: compiled regions only do if work of the step is in them."""
    if account.module_source != "compiled":
        return account.module_source != "none"
    inside = account.modules.filter(pl.col("module").is_not_null())
    spent = "device_total_ns" if account.gpu_time.window_ns else "host_total_ns"
    return int(inside[spent].sum()) > _LEAST_COMPILED_SHARE * int(account.modules[spent].sum())


def _time(account: RankAccount) -> Iterator[Part]:
    if account.modules.is_empty():
        raise Unavailable(_NO_NAMES)
    inside = account.modules.filter(pl.col("module").is_not_null())
    over = plural(account.steps.height, "traced step") if account.steps.height else "the whole trace"
    text = f"{plural(inside.height, 'module')}, {_SOURCES[account.module_source]}; times are sums over {over}."
    lost = account.unlinked.get("kernel_to_module")
    if lost is not None and lost.num:
        text += f" {lost.num:,} of {lost.num_all:,} GPU events could not be attributed to a module."
    yield Text(text)
    yield _device_tree(account, inside) if account.gpu_time.window_ns else _host_tree(inside)


def _device_tree(account: RankAccount, inside: pl.DataFrame) -> Tree:
    """Return all GPU work by module, forward and backward apart."""
    root, sums = Branch(is_ordered=True), {}
    for phase in ("forward", "backward"):
        totals = dict(inside.select("module", f"device_{phase}_ns").iter_rows())
        for module, own_ns in own_of(totals).items():
            root.add([phase, *module_path(module)], own_ns, phase)
        sums[f"in the {phase} of modules"] = root.inner[phase].total if phase in root.inner else 0
    outside_ns = int(account.modules.filter(pl.col("module").is_null())["device_self_ns"].sum())
    root.add([OUTSIDE], outside_ns, "unattributed")
    sums[OUTSIDE] = outside_ns
    shares = [f"{duration(ns)} ({percent(ns / max(1, root.total))}) {where}" for where, ns in sums.items() if ns]
    caption = f"GPU work, {duration(root.total)}: {', '.join(shares)}."
    nodes = root.nodes("GPU work")
    return Tree("modules_device", "GPU time by module", "icicle", "device_total_ns", nodes, caption=caption)


def _host_tree(inside: pl.DataFrame) -> Tree:
    root = Branch()
    for module, own_ns in own_of(dict(inside.select("module", "host_total_ns").iter_rows())).items():
        root.add(module_path(module), own_ns)
    caption = f"{duration(root.total)} of host time in modules, backward included."
    nodes = root.nodes("host time in modules")
    return Tree("modules_host", "host time by module", "icicle", "host_total_ns", nodes, caption=caption)


def group_table(account: RankAccount) -> Table:
    """Return one row per group of modules whose names differ only in numbers."""
    has_gpu = bool(account.gpu_time.window_ns)
    what = "GPU work" if has_gpu else "host time in modules"
    note = f"*: every number; totals include the modules inside; share: of {what}"
    times = ("device_total_ns", "device_forward_ns", "device_backward_ns")
    screen = ("module", "share", *(times if has_gpu else ("host_total_ns", "host_self_ns")), "num_modules")
    title = f"modules, {_SOURCES.get(account.module_source, '')}"
    groups, names = module_groups(account.modules), "module num_modules"
    return _table(account, groups, "module_groups", title, names, note=note, screen=screen)


def _table(account: RankAccount, table: pl.DataFrame, id: str, title: str, names: str, **more: Any) -> Table:
    # Outside the modules, what is not backward is not forward either: it is unknown.
    forward = pl.when(pl.col("module").is_not_null()).then("device_forward_ns").alias("device_forward_ns")
    if account.gpu_time.window_ns:
        own, total = "device_self_ns", "device_total_ns"
        names += " num_calls device_self_ns device_forward_ns device_backward_ns device_total_ns"
    else:
        own, total, table = "host_self_ns", "host_total_ns", table.filter(pl.col("module").is_not_null())
        names += " num_calls"
    share = (pl.col(total) / max(1, int(account.modules[own].sum()))).alias("share")
    table = table.with_columns(forward, share, pl.col("module").fill_null(OUTSIDE))
    return table_of(table, id, title, f"{names} host_self_ns host_total_ns share", **more)


def _memory(report: MemoryReport) -> Iterator[Part]:
    found, root = report.account, Branch()
    known = {part.name: part.bytes for part in found.live_at_peak.by_module}
    if not [name for name in known if name not in (None, REMAINDER)]:
        if report.source == RECORDING:
            yield Missing("memory by module: no allocation at the peak was made inside a module")
        return
    remainder, outside = known.pop(REMAINDER, 0), known.pop(None, 0)
    for module, num_bytes in known.items():
        root.add(module_path(module or ""), num_bytes)
    whole, inside = max(1, found.peak_bytes), root.total
    root.add([OUTSIDE], outside, "unattributed")
    if remainder > 0:
        root.add([REMAINDER], remainder, "unattributed")
    places = {"in modules": inside, "outside of them": outside}
    if report.source != RECORDING:
        places = {"allocated in modules during the trace": inside, "outside of them or before": outside}
    texts = [f"{size(num_bytes)} ({percent(num_bytes / whole)}) {where}" for where, num_bytes in places.items()]
    texts += [f"{size(remainder)} in no tensor ({REMAINDER})"] if remainder else []
    caption = f"{size(found.peak_bytes)} at the peak: {', '.join(texts)}."
    title, nodes = "memory at the peak by module", root.nodes("at the peak")
    yield Tree("modules_memory", title, "icicle", "peak_bytes", nodes, caption=caption)

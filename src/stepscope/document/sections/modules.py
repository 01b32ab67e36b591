"""The section `modules` of a report: whose the time is, and whose the memory at the peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from stepscope.analysis.kernels.ops import module_groups
from stepscope.analysis.memory.account import REMAINDER
from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.document.model import Missing, Table, Text, Tree
from stepscope.document.sections.shared import table_of
from stepscope.document.sections.trees import Branch, module_path, own_of
from stepscope.errors import Unavailable
from stepscope.formatting import duration, percent, plural, safe, size
from stepscope.session import Session
from stepscope.session.memory import RECORDING, MemoryReport

OUTSIDE = "outside every module"
_NO_NAMES = (
    "the trace names no modules: profile(with_stack=True) names them by class and number, `stepscope run train.py` "
    "by their full names"
)
_SOURCES = {
    "ranges": "Stepscope's labels",
    "stacks": "the Python stacks in the trace",
    "compiled": "the regions of compiled code",
}


def parts(session: Session) -> tuple[Any, ...]:
    """Time by module, of the GPU where there is one, else of the host; memory at the peak by module; tables."""
    time: list[Any]
    memory: list[Any]
    try:
        time = list(_time(session.analysis.ranks[0]))
    except Unavailable as reason:
        time = [Missing(str(reason))]
    try:
        memory = list(_memory(session.memory))
    except Unavailable as reason:
        memory = [Missing(f"memory by module: {reason}")] if len(time) > 1 else []
    trees, tables = ([part for part in time if isinstance(part, Table) == wanted] for wanted in (False, True))
    return (*trees, *memory, *tables)


def _time(account: RankAccount) -> Iterator[Any]:
    if account.modules.is_empty():
        raise Unavailable(_NO_NAMES)
    has_gpu = bool(account.gpu_time.window_ns)
    yield Text(_said(account))
    yield _device_tree(account) if has_gpu else _host_tree(account)
    yield from _tables(account, has_gpu)


def _said(account: RankAccount) -> str:
    inside = account.modules.filter(pl.col("module").is_not_null())
    over = plural(account.steps.height, "traced step") if account.steps.height else "the whole trace"
    text = (
        f"{plural(inside.height, 'module')}, named by {_SOURCES[account.module_source]}; times are sums over {over}."
    )
    lost = account.unlinked.get("kernel_to_module")
    if lost is not None and lost.num:
        text += f" {lost.num:,} of {lost.num_all:,} pieces of GPU work belong to no module."
    return text


def _device_tree(account: RankAccount) -> Tree:
    """Forward and backward apart; the whole is all GPU work."""
    root, sums = Branch(is_ordered=True), {}
    table = account.modules.filter(pl.col("module").is_not_null())
    for phase in ("forward", "backward"):
        totals = dict(table.select("module", f"device_{phase}_ns").iter_rows())
        for module, own_ns in own_of(totals).items():
            root.add([phase, *module_path(module)], own_ns, phase)
        sums[phase] = root.inner[phase].total if phase in root.inner else 0
    outside_ns = int(account.modules.filter(pl.col("module").is_null())["device_self_ns"].sum())
    root.add([OUTSIDE], outside_ns, "unattributed")
    whole = max(1, root.total)
    shares = [f"{duration(ns)} ({percent(ns / whole)}) are the modules' {phase}" for phase, ns in sums.items() if ns]
    shares.append(f"{duration(outside_ns)} ({percent(outside_ns / whole)}) belong to no module")
    text = f"Of {duration(root.total)} of GPU work, {', '.join(shares)}. "
    return Tree(
        id="modules_device",
        title="GPU time by module",
        caption=text + _largest(module_groups(table), "device_total_ns", whole),
        shape="icicle",
        unit="device_total_ns",
        nodes=root.nodes("GPU work"),
    )


def _host_tree(account: RankAccount) -> Tree:
    root = Branch()
    table = account.modules.filter(pl.col("module").is_not_null())
    totals = dict(table.select("module", "host_total_ns").iter_rows())
    for module, own_ns in own_of(totals).items():
        root.add(module_path(module), own_ns)
    text = f"{duration(root.total)} of the host's time are inside modules, their backward included. "
    return Tree(
        id="modules_host",
        title="Host time by module",
        caption=text + _largest(module_groups(table), "host_total_ns", max(1, root.total)),
        shape="icicle",
        unit="host_total_ns",
        nodes=root.nodes("host time in modules"),
    )


def _largest(groups: pl.DataFrame, column: str, whole: int) -> str:
    """The group of modules with the most time, of those that hold not all of it."""
    inner = groups.filter(pl.col(column) > 0, pl.col(column) < 0.98 * whole)
    if inner.is_empty():
        return ""
    row = inner.sort(column, descending=True, maintain_order=True).row(0, named=True)
    name, share = safe(row["module"], 80), percent(row[column] / whole)
    many = f", {row['num_modules']:,} modules," if row["num_modules"] > 1 else ""
    return f"Most is in {name}{many} with {share}."


def _tables(account: RankAccount, has_gpu: bool) -> Iterator[Table]:
    note = "Totals include the modules inside. Work of the backward belongs to the module whose forward needed it."
    table = account.modules if has_gpu else account.modules.filter(pl.col("module").is_not_null())
    own = ("host_self_ns", "host_total_ns")
    device = ("device_self_ns", "device_forward_ns", "device_backward_ns", "device_total_ns")
    figures = ["num_calls", *(device if has_gpu else ()), *own]
    # Outside the modules, what is not the backward's is not a forward's: nobody says what it is.
    forward = pl.when(pl.col("module").is_not_null()).then("device_forward_ns").alias("device_forward_ns")
    named = (forward, pl.col("module").fill_null(OUTSIDE))
    groups = module_groups(table).with_columns(named)
    yield table_of(
        groups,
        "module_groups",
        "Modules alike",
        ["module", "num_modules", *figures],
        note=f"{note} * is every number.",
    )
    yield table_of(table.with_columns(named), "modules", "All modules", ["module", *figures], note=note)


def _memory(report: MemoryReport) -> Iterator[Any]:
    found, root = report.account, Branch()
    known = {part.name: part.bytes for part in found.live_at_peak.by_module}
    if not [name for name in known if name not in (None, REMAINDER)]:
        if report.source == RECORDING:
            yield Missing("memory by module: no allocation at the peak was made inside a module")
        return
    remainder = known.pop(REMAINDER, 0)
    outside = known.pop(None, 0)
    for module, num_bytes in known.items():
        root.add(module_path(module or ""), num_bytes)
    inside = root.total
    root.add([OUTSIDE], outside, "unattributed")
    if remainder > 0:
        root.add([REMAINDER], remainder, "unattributed")
    whole = max(1, found.peak_bytes)
    belong, outer = "belong to modules", "belong to none"
    if report.source != RECORDING:
        belong, outer = "were allocated inside modules while the trace ran", "outside them or before"
    text = (
        f"Of {size(found.peak_bytes)} at the peak, {size(inside)} ({percent(inside / whole)}) {belong}, "
        f"{size(outside)} ({percent(outside / whole)}) {outer}."
    )
    if remainder:
        text += f" {size(remainder)} are in no tensor: {REMAINDER}."
    yield Tree(
        id="modules_memory",
        title="Memory at the peak by module",
        caption=text,
        shape="icicle",
        unit="peak_bytes",
        nodes=root.nodes("at the peak"),
    )

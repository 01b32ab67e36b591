"""Does every step leave memory behind, or keep an earlier step's graph alive?"""

from __future__ import annotations

from stepscope.analysis.memory.account import Account
from stepscope.findings.rule import Case, Evidence, Finding, one_finding, plural, size

_PEAK_SHARE = 0.05
_MANY_STEPS = 1000  # growth that doubles the peak within so many steps is reported


def check(case: Case) -> list[Finding]:
    growth, memory = case.memory_growth, case.memory
    if growth is None:
        return _kept(memory)
    held = max(growth.held_bytes or 0, _in_graphs(memory))
    is_graph = any(left.num_tensors > 1 for left in memory.left_alive)
    is_much = held >= _PEAK_SHARE * memory.peak_bytes or growth.bytes_per_step * _MANY_STEPS >= memory.peak_bytes
    # A graph's tensors also keep its nodes alive in host memory, which is not measured: always a mistake.
    if not is_much and not is_graph:
        return []
    row = growth.rows[0]
    what = row["op"] or "something"
    shape = f" of shape {row['shape']}" if row["shape"] else ""
    frame = next((left.frame for left in memory.left_alive if left.frame), None)
    where = frame or next((row["holder"] for row in growth.rows if row["holder"]), None)
    so_far = f"This happens in {plural(growth.num_steps, 'step')} in a row, on top of"
    if growth.held_bytes is not None:
        num = max(row["num_held"] for row in growth.rows)
        so_far = f"Earlier steps left {size(held)}, up to {plural(num, 'tensor')} of the same kind, of"
    fix = "keep numbers, not tensors: losses.append(loss.item()); for tensors: .detach().cpu(), and clear the list"
    return one_finding(
        sentence=f"Every step leaves {size(growth.bytes_per_step)} of memory behind, mostly from {what}"
        f"{shape}{f', held by {where}' if where else ''}"
        f"{' in a graph that is never freed' if is_graph else ''}. {so_far} the "
        f"{size(memory.peak_bytes)} peak.",
        fix=fix if where else f"{fix}  # stepscope run --memory train.py names the variable",
        saving_bytes=held or growth.bytes_per_step,
        derived="memory held from earlier steps" if held else "memory left by one step",
        confidence="high" if is_much else "medium",
        falsified_by=f"train on; the finding is wrong if the peak is the same {_MANY_STEPS:,} steps later",
        places=() if growth.kept is None else case.host_places(growth.kept),
        evidence=(Evidence("memory left behind per step", growth.rows[:8]), *_graphs(memory)),
    )


def _kept(memory: Account) -> list[Finding]:
    """Return a finding for graphs of earlier steps that stay alive without growing in number."""
    num_bytes = _in_graphs(memory)
    if not memory.left_alive or num_bytes < _PEAK_SHARE * memory.peak_bytes:
        return []
    largest = memory.left_alive[0]
    by = f", held by {largest.frame}" if largest.frame else ""
    return one_finding(
        sentence=f"{plural(len(memory.left_alive), 'graph')} of earlier steps still "
        f"{'holds' if len(memory.left_alive) == 1 else 'hold'} {size(num_bytes)} of the {size(memory.peak_bytes)} "
        f"peak{by}; the last op is {largest.op or 'unnamed'}.",
        fix="with torch.no_grad(): around code that needs no backward; del loss, out  # before the next forward",
        saving_bytes=num_bytes,
        derived="memory that those graphs keep alive at the peak",
        falsified_by="delete that variable; the finding is wrong if the peak stays the same",
        evidence=_graphs(memory),
    )


def _in_graphs(memory: Account) -> int:
    """Return the bytes that graphs of earlier steps keep alive at the peak."""
    return sum(part.bytes for part in memory.live_at_peak.by_owner if part.name == "left_alive")


def _graphs(memory: Account) -> tuple[Evidence, ...]:
    rows = [
        {"bytes": left.bytes, "num_tensors": left.num_tensors, "op": left.op, "module": left.module,
         "holder": left.frame}
        for left in memory.left_alive[:8]
    ]  # fmt: skip
    return (Evidence("graphs of earlier steps", rows),) if rows else ()

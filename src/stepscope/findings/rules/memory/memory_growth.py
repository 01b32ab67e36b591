"""Does every step leave memory behind, or keep a graph of an earlier one alive?"""

from __future__ import annotations

from stepscope.analysis.memory.account import Account
from stepscope.analysis.memory.left_behind import MemoryGrowth
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import plural, size
from stepscope.session.case import Case

_PEAK_SHARE = 0.05
_MANY_STEPS = 1000
"""What becomes as much as the peak in so many steps is worth telling, however little it is now."""


def check(case: Case) -> list[Finding]:
    growth, memory = case.memory_growth, case.memory
    if growth is None:
        return _kept(memory)
    held = max(growth.held_bytes or 0, _in_graphs(memory))
    is_graph = any(left.num_tensors > 1 for left in memory.left_alive)
    is_much = held >= _PEAK_SHARE * memory.peak_bytes or growth.bytes_per_step * _MANY_STEPS >= memory.peak_bytes
    # Tensors of a graph keep its nodes alive too, on the host, where nobody counts them: always a slip.
    if not is_much and not is_graph:
        return []
    row = growth.rows[0]
    what = row["op"] or "something"
    shape = f" of shape {row['shape']}" if row["shape"] else ""
    where = _holder(memory, growth)
    fix = "keep numbers, not tensors: losses.append(loss.item()); of tensors: .detach().cpu(), and clear the list"
    return [
        Finding(
            sentence=f"Every step leaves {size(growth.bytes_per_step)} behind, most of it from {what}"
            f"{shape}{f', held by {where}' if where else ''}"
            f"{' in a graph that is never freed' if is_graph else ''}; {_so_far(growth, held)} the "
            f"{size(memory.peak_bytes)} at the peak.",
            fix=fix if where else f"{fix}  # stepscope run --memory train.py names the variable",
            saving_bytes=held or growth.bytes_per_step,
            derived="what is there from earlier steps" if held else "what one step leaves",
            confidence="high" if is_much else "medium",
            falsified_by=f"a peak that is the same {_MANY_STEPS:,} steps later",
            places=() if growth.kept is None else case.host_places(growth.kept),
            evidence=(Evidence("what a step leaves behind", growth.rows[:8]), *_graphs(memory)),
        )
    ]


def _kept(memory: Account) -> list[Finding]:
    """A graph of an earlier step that lives on, and of which there are no more each step."""
    num_bytes = _in_graphs(memory)
    if not memory.left_alive or num_bytes < _PEAK_SHARE * memory.peak_bytes:
        return []
    largest = memory.left_alive[0]
    by = f", held by {largest.frame}" if largest.frame else ""
    return [
        Finding(
            sentence=f"{plural(len(memory.left_alive), 'graph')} of earlier steps still "
            f"{'lives' if len(memory.left_alive) == 1 else 'live'}{by}, ending in {largest.op or 'no op of a name'}: "
            f"{size(num_bytes)} of the {size(memory.peak_bytes)} at the peak.",
            fix="with torch.no_grad(): around what needs no backward; del loss, out  # before the next forward",
            saving_bytes=num_bytes,
            derived="what those graphs keep alive at the peak",
            falsified_by="a peak that is the same without that variable",
            evidence=_graphs(memory),
        )
    ]


def _holder(memory: Account, growth: MemoryGrowth) -> str | None:
    graph = next((left.frame for left in memory.left_alive if left.frame), None)
    return graph or next((row["holder"] for row in growth.rows if row["holder"]), None)


def _in_graphs(memory: Account) -> int:
    """What graphs of earlier steps keep alive at the peak."""
    return sum(part.bytes for part in memory.live_at_peak.by_owner if part.name == "left_alive")


def _so_far(growth: MemoryGrowth, held: int) -> str:
    if growth.held_bytes is None:
        return f"seen in {plural(growth.num_steps, 'step')} in a row, beside"
    num = max(row["num_held"] for row in growth.rows)
    return f"earlier ones have left {size(held)}, up to {num} tensors of a kind, of"


def _graphs(memory: Account) -> tuple[Evidence, ...]:
    rows = [
        {"bytes": left.bytes, "num_tensors": left.num_tensors, "op": left.op, "module": left.module,
         "holder": left.frame}
        for left in memory.left_alive[:8]
    ]  # fmt: skip
    return (Evidence("graphs of earlier steps", rows),) if rows else ()

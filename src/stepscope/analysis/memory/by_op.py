"""Allocations of each op over a step: number, bytes, and bytes alive at the peak.

Works on the structure of `memory.json.gz` (docs/memory.md). Uses only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepscope.analysis.memory.timeline import on_device


@dataclass(frozen=True)
class OpBytes:
    """The allocations of one op on one device."""

    op: str
    num_allocations: int
    allocated_bytes: int  # total of all allocations
    largest_bytes: int
    at_peak_bytes: int  # of those alive at the peak


def memory_by_op(memory: Mapping[str, Any]) -> tuple[OpBytes, ...]:
    """Return allocations by op, the most bytes first, without memory from before the step.

    >>> made = {"device": "cpu", "op": "aten::mm", "born": 0, "died": None, "bytes": 12}
    >>> memory_by_op({"device": "cpu", "allocations": [made]})
    (OpBytes(op='aten::mm', num_allocations=1, allocated_bytes=12, largest_bytes=12, at_peak_bytes=12),)
    """
    mine, levels = on_device(memory)
    by_op: dict[str, list[Mapping[str, Any]]] = {}
    for each in mine:
        if each["born"] is not None:
            by_op.setdefault(str(each.get("op")), []).append(each)
    rows = [
        OpBytes(
            op=op,
            num_allocations=len(made),
            allocated_bytes=sum(each["bytes"] for each in made),
            largest_bytes=max(each["bytes"] for each in made),
            at_peak_bytes=sum(each["bytes"] for each in made if levels.is_alive_at_peak(each)),
        )
        for op, made in by_op.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.allocated_bytes, row.op)))

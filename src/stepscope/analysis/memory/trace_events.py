"""A trace's `[memory]` events in the structure that `account` reads."""

from __future__ import annotations

from typing import Any

import polars as pl

from stepscope.analysis.memory.account import BEFORE_THE_WINDOW
from stepscope.analysis.memory.allocator_events import (
    DEVICE_TYPES,
    MemorySummary,
    memory_devices,
    memory_lives,
    memory_summary,
)
from stepscope.analysis.structure.links import Linked
from stepscope.errors import Unavailable


def trace_memory(linked: Linked) -> dict[str, Any]:
    """Return the allocations of the device with the highest peak, preferring a GPU.

    A trace has op, module and phase of an allocation, but not its owner, dtype or shape.
    """
    summaries = memory_summary(linked)
    if not summaries:
        raise Unavailable("The trace has no [memory] events. Record it with profile(profile_memory=True).")
    chosen = max(summaries, key=lambda each: (each.device_type != "cpu", each.peak_allocated_bytes))
    (number,) = (n for n, i in memory_devices(linked) if (DEVICE_TYPES.get(n, str(n)), i) == _which(chosen))
    lives = memory_lives(linked, number, chosen.device)
    if lives["address"].null_count():
        raise Unavailable("The [memory] events of the trace have no addresses, so frees cannot be matched.")
    name = chosen.device_type if chosen.device < 0 else f"{chosen.device_type}:{chosen.device}"
    begin_ns = int(lives["time_ns"][0])
    times = lives["time_ns"] - begin_ns
    allocations = []
    for row in lives.filter((pl.col("bytes") > 0) | ~pl.col("is_seen")).iter_rows(named=True):
        is_birth = row["bytes"] > 0
        died = row["next_order"] if is_birth else row["order"]
        allocations.append(
            {
                "bytes": abs(row["bytes"]),
                "device": name,
                "op": row["op"] if is_birth else BEFORE_THE_WINDOW,
                "module": row["module"] if is_birth else None,
                "phase": row["phase"] if is_birth else BEFORE_THE_WINDOW,
                "born": row["order"] if is_birth else None,
                "born_ns": row["time_ns"] - begin_ns if is_birth else None,
                "died": died,
                "died_ns": None if died is None else times[died],
            }
        )
    unseen = chosen.start_bytes - sum(each["bytes"] for each in allocations if each["born"] is None)
    if unseen > 0:
        before = dict.fromkeys(("op", "phase"), BEFORE_THE_WINDOW)
        allocations.append({"bytes": unseen, "device": name, "born": None, "died": None, **before})
    return {
        "device": name,
        "allocations": allocations,
        "stages": _stages(lives),
        "reserved": _changes(lives),
        "allocator": {
            "start_allocated_bytes": chosen.start_bytes,
            "peak_allocated_bytes": chosen.peak_allocated_bytes,
            "peak_reserved_bytes": chosen.peak_reserved_bytes,
        }
        if chosen.is_start_known
        else None,
    }


def _which(summary: MemorySummary) -> tuple[str, int]:
    return summary.device_type, summary.device


def _stages(lives: pl.DataFrame) -> list[dict[str, Any]]:
    """Return where the phase changes."""
    known = lives.select(pl.col("order").cast(pl.Int64), pl.col("phase").cast(pl.String)).drop_nulls()
    changes = known.filter(pl.col("phase").ne_missing(pl.col("phase").shift(1)))
    return [{"name": phase, "event": order} for order, phase in changes.iter_rows()]


def _changes(lives: pl.DataFrame) -> list[tuple[int, int]]:
    known = lives.select(pl.col("order").cast(pl.Int64), "reserved_bytes").drop_nulls()
    changes = known.filter(pl.col("reserved_bytes").ne_missing(pl.col("reserved_bytes").shift(1)))
    return list(changes.iter_rows())

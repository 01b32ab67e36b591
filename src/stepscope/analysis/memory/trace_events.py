"""A trace's `[memory]` events in the structure that `account` reads."""

from __future__ import annotations

from typing import Any

import polars as pl

from stepscope.analysis.memory.account import BEFORE_THE_WINDOW
from stepscope.analysis.memory.allocator_events import main_memory
from stepscope.analysis.structure.links import Linked
from stepscope.errors import Unavailable


def trace_memory(linked: Linked) -> dict[str, Any]:
    """Return the allocations of the device with the highest peak, preferring a GPU.

    A trace has op, module and phase of an allocation, but not its owner, dtype or shape.
    """
    found = main_memory(linked)
    if found is None:
        raise Unavailable("The trace has no [memory] events. Record it with profile(profile_memory=True).")
    chosen, lives = found
    if lives["address"].null_count():
        raise Unavailable("The [memory] events of the trace have no addresses, so frees cannot be matched.")
    name = chosen.device_type if chosen.device < 0 else f"{chosen.device_type}:{chosen.device}"
    times = lives["time_ns"] - lives["time_ns"][0]
    before = {"device": name, "op": BEFORE_THE_WINDOW, "phase": BEFORE_THE_WINDOW, "born": None}
    allocations: list[dict[str, Any]] = []
    for row in lives.filter((pl.col("bytes") > 0) | ~pl.col("is_seen")).iter_rows(named=True):
        born = {"device": name, **{key: row[key] for key in ("op", "module", "phase")}, "born": row["order"]}
        is_birth = row["bytes"] > 0
        died = row["next_order"] if is_birth else row["order"]
        allocations.append(
            {
                **(born if is_birth else before),
                "bytes": abs(row["bytes"]),
                "born_ns": times[row["order"]] if is_birth else None,
                "died": died,
                "died_ns": None if died is None else times[died],
            }
        )
    unseen = chosen.start_bytes - sum(each["bytes"] for each in allocations if each["born"] is None)
    if unseen > 0:
        allocations.append({**before, "bytes": unseen, "died": None})
    return {
        "device": name,
        "allocations": allocations,
        "stages": [{"name": phase, "event": order} for order, phase in _changes(lives, "phase")],
        "reserved": _changes(lives, "reserved_bytes"),
        "allocator": {
            "start_allocated_bytes": chosen.start_bytes,
            "peak_allocated_bytes": chosen.peak_allocated_bytes,
            "peak_reserved_bytes": chosen.peak_reserved_bytes,
        }
        if chosen.is_start_known
        else None,
    }


def _changes(lives: pl.DataFrame, column: str) -> list[tuple[int, Any]]:
    """Return the events from which on a column has another value, and the values."""
    known = lives.select("order", column).drop_nulls()
    return known.filter(pl.col(column).ne_missing(pl.col(column).shift(1))).rows()

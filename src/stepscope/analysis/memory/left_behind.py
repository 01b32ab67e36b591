"""Memory that every step leaves behind, from a recording's memory window or between a trace's steps."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from stepscope.analysis.memory.allocator_events import main_memory
from stepscope.analysis.memory.timeline import on_device
from stepscope.analysis.structure.links import Linked
from stepscope.errors import Unavailable

_KNOWN_OWNERS = ("parameter", "buffer", "gradient", "optimizer_state")
_HELD_BEFORE = 2
"""Tensors of one kind from earlier steps; from this many on, one more is not just the last step's variable."""
_ALIKE = 2.0  # ratio of the least to the most that steps leave behind


@dataclass(frozen=True)
class MemoryGrowth:
    """Memory that each step leaves behind."""

    bytes_per_step: int
    held_bytes: int | None  # left by earlier steps and still alive; None if those were not seen
    num_steps: int  # steps in which it was seen
    rows: tuple[Mapping[str, Any], ...]
    """The most bytes first: `op`, `module`, `shape`, `dtype`, `bytes` of one, `num_left` per step, `num_held` from
    earlier steps, `holder` (a variable); None if unknown."""
    kept: pl.DataFrame | None = None  # for a trace: the allocating ops' `start_ns` and `end_ns`


def growth_in_window(memory: Mapping[str, Any]) -> MemoryGrowth | None:
    """Return what a memory window's step (docs/memory.md) leaves behind that earlier steps left too; None if nothing.

    A kind of tensor grows if the step keeps more than it frees, and similar ones, owned by neither model nor
    optimizer, existed before and stayed.
    """
    left: Counter[Any] = Counter()
    held: Counter[Any] = Counter()
    first: dict[Any, Mapping[str, Any]] = {}
    holders: dict[Any, str] = {}
    for each in on_device(memory)[0]:
        if each.get("owner") in _KNOWN_OWNERS or not each["bytes"]:
            continue
        kind = (each["bytes"], each.get("dtype"), tuple(each.get("shape") or ()))
        is_new, stays = each.get("born") is not None, each.get("died") is None
        if is_new and stays:
            left[kind] += 1
            # The last batch stays in its variable too: ignore it if there are other kinds.
            if kind not in first or first[kind].get("owner") == "input":
                first[kind] = each
        elif stays:
            held[kind] += 1
            if each.get("caller"):
                holders.setdefault(kind, each["caller"])
        elif not is_new:
            left[kind] -= 1
    growing = [kind for kind, num in left.items() if num > 0 and held[kind] >= _HELD_BEFORE]
    if not growing:
        return None
    rows: list[dict[str, Any]] = []
    for kind in sorted(growing, key=lambda kind: -kind[0] * left[kind]):
        names = {"op": first[kind].get("op"), "module": first[kind].get("module"), "shape": list(kind[2])}
        counts = {"num_left": left[kind], "num_held": held[kind], "holder": holders.get(kind)}
        rows.append({**names, "dtype": kind[1], "bytes": kind[0], **counts})
    return MemoryGrowth(
        bytes_per_step=sum(row["bytes"] * row["num_left"] for row in rows),
        held_bytes=sum(row["bytes"] * row["num_held"] for row in rows),
        num_steps=1,
        rows=tuple(rows),
    )


def growth_between_steps(linked: Linked) -> MemoryGrowth | None:
    """Return what every step of a trace leaves behind, from its `[memory]` events; None if nothing or too few steps.

    The level rises by similar amounts between steps, and unfreed allocations of the steps before the last explain at
    least half of it, which a prefetched batch does not. Raises Unavailable if the trace cannot show it.
    """
    if linked.memory.is_empty():
        how = "Record with profile_memory=True or `stepscope run train.py`."
        raise Unavailable(f"The trace has no memory events. {how}")
    if linked.steps.num < 2:
        raise Unavailable("The trace has fewer than two steps. Use schedule(wait=1, warmup=1, active=3).")
    steps, found = linked.steps.table, main_memory(linked)
    if steps.height < 2 or found is None or found[1]["address"].null_count():
        return None
    lives = found[1].sort("time_ns", maintain_order=True)
    borders = pl.concat([steps["start_ns"], steps["end_ns"].tail(1)])
    place = lives["time_ns"].search_sorted(borders, side="left")
    levels = pl.concat([pl.Series("bytes", [0], dtype=pl.Int64), lives["bytes"].cum_sum()]).gather(place)
    rises = levels.diff().drop_nulls().to_list()
    least, most = min(rises), max(rises)
    kept = lives.filter(
        pl.col("bytes") > 0, pl.col("next_order").is_null(), pl.col("step").is_in(steps["step"].head(-1).implode())
    )
    if least <= 0 or most > _ALIKE * least or int(kept["bytes"].sum()) < sum(rises[:-1]) / 2:
        return None
    table = (
        kept.group_by(pl.col("op", "module").cast(pl.String), "bytes")
        .agg((pl.len() / (steps.height - 1)).alias("num_left"))
        .sort(pl.col("bytes") * pl.col("num_left"), descending=True)
    )
    unknown = dict.fromkeys(("shape", "dtype", "num_held", "holder"))
    taken = linked.memory.join(kept, on=["time_ns", "address"], how="semi")
    start, end = (linked.host[name].gather(taken["op"]) for name in ("start_ns", "end_ns"))
    return MemoryGrowth(
        bytes_per_step=round(sum(rises) / len(rises)),
        held_bytes=None,
        num_steps=steps.height,
        rows=tuple({**row, **unknown} for row in table.iter_rows(named=True)),
        kept=taken.select(start_ns=start.fill_null(taken["time_ns"]), end_ns=end.fill_null(taken["time_ns"] + 1)),
    )

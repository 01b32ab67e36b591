"""Which host event contains which: a tree per thread."""

import polars as pl

_LARGE = 512  # events per thread from which columns beat a loop


def nest(host: pl.DataFrame) -> pl.DataFrame:
    """Return the host table by thread and time, with `parent` and `self_ns` filled.

    The parent is the innermost event open on the thread when an event starts. If events overlap in part (clocks of
    different origin), an event keeps the parent it starts in, and each moment belongs to the last started event still
    open: `self_ns` of a thread adds up to the time its events cover.
    """
    names = host.columns
    ordered = host.sort("thread", "start_ns", "duration_ns", "event", descending=[False, False, True, False])
    end = (ordered["start_ns"] + ordered["duration_ns"]).alias("end_ns")
    places = ordered.select("thread", "start_ns", end).with_row_index("row")
    is_small = pl.len().over("thread") < _LARGE
    found = [_by_stack(places.filter(is_small))]
    for thread in places.filter(~is_small).partition_by("thread"):
        by_columns = _by_columns(thread)
        found.append(_by_stack(thread) if by_columns is None else by_columns)
    parent = pl.concat(found).sort("row")["parent"]
    overhang = end > end.gather(parent)
    own = _self_by_sweep(places) if overhang.any() else _self_in_tree(ordered["duration_ns"], parent)
    return ordered.with_columns(parent, own).select(names)


def _by_columns(thread: pl.DataFrame) -> pl.DataFrame | None:
    """Return parents in a thread whose events nest; None if some overlap in part."""
    is_solid = thread["end_ns"] > thread["start_ns"]
    # An event of zero length contains nothing: only those with a length are counted.
    started = is_solid.cast(pl.Int64).cum_sum() - is_solid.cast(pl.Int64)
    closed = thread.filter(is_solid)["end_ns"].sort().search_sorted(thread["start_ns"], side="right").cast(pl.Int64)
    placed = thread.select("row", "end_ns", depth=started - closed)
    above = placed.filter(is_solid).select("row", "depth", parent="row", parent_end_ns="end_ns")
    found = placed.with_columns(pl.col("depth") - 1).join_asof(
        above, on="row", by="depth", allow_exact_matches=False, check_sortedness=False
    )
    is_lost = (pl.col("depth") >= 0) != pl.col("parent").is_not_null()
    misfits = found.filter((pl.col("end_ns") > pl.col("parent_end_ns")) | is_lost)
    return found.select("row", "parent") if misfits.is_empty() else None


def _by_stack(events: pl.DataFrame) -> pl.DataFrame:
    """Return parents in any thread."""
    parents: list[int | None] = []
    stack: list[tuple[int, int]] = []
    last = None
    for row, thread, start, end in events.select("row", "thread", "start_ns", "end_ns").iter_rows():
        if thread != last:
            stack.clear()
            last = thread
        while stack and stack[-1][1] <= start:
            stack.pop()
        parents.append(stack[-1][0] if stack else None)
        if end > start:
            stack.append((row, end))
    return pl.DataFrame({"row": events["row"], "parent": pl.Series(parents, dtype=pl.UInt32)})


def _self_in_tree(duration: pl.Series, parent: pl.Series) -> pl.Series:
    """Return durations minus those of the children."""
    children = pl.DataFrame({"parent": parent, "inside": duration}).filter(parent.is_not_null())
    sums = children.group_by("parent").agg(pl.col("inside").sum())
    covered = pl.zeros(len(duration), pl.Int64, eager=True).scatter(sums["parent"], sums["inside"])
    own: pl.Series = duration - covered
    return own.alias("self_ns")


def _self_by_sweep(places: pl.DataFrame) -> pl.Series:
    """Return self times if events overlap: each moment belongs to the last started event still open."""
    own = [0] * places.height
    stack: list[tuple[int, int]] = []
    last, now = None, 0

    def advance(until: int | None) -> None:
        """Assign the time up to a moment (None: all) to the innermost open events."""
        nonlocal now
        while stack and (until is None or now < until):
            row, end = stack[-1]
            stop = end if until is None else min(end, until)
            if stop > now:
                own[row] += stop - now
                now = stop
            if end <= now:
                stack.pop()

    for row, thread, start, end in places.select("row", "thread", "start_ns", "end_ns").iter_rows():
        advance(None if thread != last else start)
        last, now = thread, start
        stack.append((row, end))
    advance(None)
    return pl.Series("self_ns", own, dtype=pl.Int64)

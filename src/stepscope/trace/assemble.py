"""The columns of many slices as the tables of one trace, with the tree of each thread's host events."""

from array import array
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.trace import fast
from stepscope.trace.columns import BEGINS, ENDS, Counts, Numbers
from stepscope.trace.decode import Decoded
from stepscope.trace.first_part import FirstPart
from stepscope.trace.scan import Problems
from stepscope.trace.tables import COUNTS, HOST, TABLES, THREADS, Table, Trace, TraceFacts

_LARGE = 512  # events per thread from which columns beat a loop


def nest(host: pl.DataFrame) -> pl.DataFrame:
    """Return the host table by thread and time, with `parent` and `self_ns` filled.

    The parent is the innermost event open on the thread when an event starts. If events overlap in part (clocks of
    different origin), an event keeps the parent it starts in, and each moment belongs to the last started event still
    open: `self_ns` of a thread adds up to the time its events cover.
    """
    rest = host.select(pl.exclude("parent", "self_ns"))
    del host
    by = ("thread", "start_ns", "duration_ns", "event")
    if fast.is_built():
        order = fast.order(rest)
    else:
        order = rest.select(pl.arg_sort_by(by, descending=[False, False, True, False])).to_series()
    # A few columns at a time, so that not all of them are there twice.
    columns = {name: rest.drop_in_place(name) for name in rest.columns}
    with ThreadPoolExecutor(min(4, pl.thread_pool_size())) as pool:
        ordered = pl.DataFrame(list(pool.map(lambda name: columns.pop(name).gather(order), by)))
        others = pool.map(lambda name: columns.pop(name).gather(order), list(columns))
        tree = fast.nest(ordered) if fast.is_built() else _tree(ordered)
        ordered = ordered.hstack([*others, *tree])
    missing = [pl.lit(None, dtype).alias(name) for name, dtype in HOST.schema.items() if name not in ordered.columns]
    return ordered.with_columns(missing).select(HOST.schema.names())


def _tree(ordered: pl.DataFrame) -> tuple[pl.Series, pl.Series]:
    end = (ordered["start_ns"] + ordered["duration_ns"]).alias("end_ns")
    places = ordered.select("thread", "start_ns", end)
    places = places.with_row_index("row")
    is_small = pl.len().over("thread") < _LARGE
    found = [_by_stack(places.filter(is_small))]
    for thread in places.filter(~is_small).partition_by("thread"):
        by_columns = _by_columns(thread)
        found.append(_by_stack(thread) if by_columns is None else by_columns)
    parent = pl.concat(found).sort("row")["parent"]
    overhang = end > end.gather(parent)
    return parent, _self_by_sweep(places) if overhang.any() else _self_in_tree(ordered["duration_ns"], parent)


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


class Assembler:
    """Takes slices in file order; `finish` returns the trace."""

    def __init__(self) -> None:
        self.num_events = 0
        self.num_sound = 0  # events that fit a table, or are only counted
        self.num_passed_over = 0  # bytes in which no event was found
        self.problems = Problems()
        self._rows = FirstPart()
        self._counts: Counts = Counter()
        self._threads = Numbers()
        self._labels: dict[tuple[Any, ...], str] = {}
        """Names of processes by process, of threads by process and thread."""

    def add(self, decoded: Decoded) -> None:
        columns = decoded.columns
        numbers = pl.Series([self._threads[key] for key in columns.threads], dtype=pl.UInt32)
        frames = {}
        for name, frame in columns.frames.items():
            frame = frame.clone()  # columns are replaced: expressions take longer, for each of hundreds of slices
            frame.replace_column(frame.get_column_index("event"), frame["event"] + self.num_events)
            frames[name] = _renumbered(frame, numbers)
        self._rows.add(frames)
        self._counts.update(columns.counts)
        for pid, tid, what, text in columns.labels:
            if what == "thread_name":
                self._labels[what, pid, tid] = text
                self._threads[pid, tid]  # a named stream has a row here too
            else:
                self._labels[what, pid] = text  # once per process, on an arbitrary thread
        self.problems.take(decoded.problems.values())
        self.num_events += columns.num_events
        self.num_sound += columns.num_events - decoded.num_unsound
        self.num_passed_over += decoded.num_passed_over

    def finish(self, path: Path, facts: TraceFacts, warnings: Iterable[str]) -> Trace:
        warnings = [*warnings, *filter(None, [self._rows.close()])]
        frames = self._rows.frames
        begins, ends = (frames.pop(table.name, []) for table in (BEGINS, ENDS))
        if begins or ends:
            pairs, num_open = pair_edges(_together(BEGINS, begins), _together(ENDS, ends))
            frames.setdefault(HOST.name, []).append(pairs)
            if num_open:
                warnings.append(f"{num_open:,} begin or end events have no counterpart and were skipped")
        threads = self._thread_table()
        numbers = threads["number"].arg_sort()
        counted = [(*key, num) for key, num in self._counts.items()]
        counts = pl.DataFrame(counted, schema=COUNTS.schema, orient="row")
        tables = {}
        for table in TABLES:
            if table not in (THREADS, COUNTS):
                finished = nest if table is HOST else pl.DataFrame.clone
                # Nothing here holds the parts any longer than it takes.
                tables[table.name] = finished(_renumbered(_together(table, frames.pop(table.name, [])), numbers))
        fast.trim()
        return Trace(
            path=path,
            facts=facts,
            problems=tuple(sorted(self.problems.values(), key=lambda problem: (problem.offset, problem.what))),
            warnings=tuple(warnings),
            num_events=self.num_events,
            threads=threads.drop("number"),
            counts=counts.sort("num_events", "phase", "category", "table", descending=[True, False, False, False]),
            compiler=None,
            **tables,
        )

    def _thread_table(self) -> pl.DataFrame:
        """Return the threads (numbers sorted before names) and the `number` that each has in the slices."""
        name = self._labels.get
        threads = pl.DataFrame(
            {
                "pid": [pid for pid, _ in self._threads],
                "tid": [tid for _, tid in self._threads],
                "process_name": [name(("process_name", pid)) for pid, _ in self._threads],
                "process_labels": [name(("process_labels", pid)) for pid, _ in self._threads],
                "thread_name": [name(("thread_name", *thread)) for thread in self._threads],
            },
            schema={column: dtype for column, dtype in THREADS.schema.items() if column != "thread"},
        )
        order = [pl.col(part).cast(dtype, strict=False) for part in ("pid", "tid") for dtype in (pl.Int64, pl.String)]
        ordered = threads.with_row_index("number").sort(order, nulls_last=True)
        return ordered.with_row_index("thread").select(*THREADS.schema.names(), "number")


def _together(table: Table, parts: list[pl.DataFrame]) -> pl.DataFrame:
    # The host table is sorted, and thus copied, in any case; that adds columns which no event has.
    if table is HOST and parts:
        return pl.concat(parts, how="diagonal", rechunk=False)
    return pl.concat([table.empty(), *parts], how="diagonal")


def _renumbered(frame: pl.DataFrame, numbers: pl.Series) -> pl.DataFrame:
    if "thread" not in frame.columns:
        return frame
    renumbered = numbers[frame["thread"]].alias("thread")
    return frame.clone().replace_column(frame.get_column_index("thread"), renumbered)


def pair_edges(begins: pl.DataFrame, ends: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Return begin and end events as complete ones, and how many stay open; an end closes its thread's last begin."""
    edges = pl.concat([begins.with_columns(is_begin=True), ends.with_columns(is_begin=False)])
    edges = edges.sort("thread", "start_ns", "event")
    firsts, lasts = array("I"), array("I")
    stack: list[int] = []
    on_thread = None
    num_open = 0
    for row, (thread, is_begin) in enumerate(edges.select("thread", "is_begin").iter_rows()):
        if thread != on_thread:
            num_open += len(stack)
            stack, on_thread = [], thread
        if is_begin:
            stack.append(row)
        elif stack:
            firsts.append(stack.pop())
            lasts.append(row)
        else:
            num_open += 1
    num_open += len(stack)
    begun = edges[pl.Series(firsts, dtype=pl.UInt32)]
    ended = edges["start_ns"].gather(pl.Series(lasts, dtype=pl.UInt32))
    return begun.drop("is_begin").with_columns(duration_ns=ended - begun["start_ns"]), num_open

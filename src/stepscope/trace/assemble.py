"""Assembles the columns of many slices into the tables of one trace."""

from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.trace.columns import BEGINS, ENDS, Counts, Numbers
from stepscope.trace.decode import Decoded
from stepscope.trace.nesting import nest
from stepscope.trace.scan import Problems
from stepscope.trace.schema import COUNTS, HOST, TABLES, THREADS, Table
from stepscope.trace.tables import Trace, TraceFacts


class Assembler:
    """Takes slices in file order; `finish` returns the trace."""

    def __init__(self) -> None:
        self.num_events = 0
        self.num_sound = 0  # events that fit a table, or are only counted
        self.num_passed_over = 0  # bytes in which no event was found
        self.problems = Problems()
        self._frames: dict[str, list[pl.DataFrame]] = {}
        self._counts: Counts = Counter()
        self._threads = Numbers()
        self._labels: dict[tuple[Any, ...], str] = {}
        """Names of processes by process, of threads by process and thread."""

    def add(self, decoded: Decoded) -> None:
        columns = decoded.columns
        numbers = pl.Series([self._threads[key] for key in columns.threads], dtype=pl.UInt32)
        for name, frame in columns.frames.items():
            frame = frame.with_columns(pl.col("event") + self.num_events)
            self._frames.setdefault(name, []).append(_renumbered(frame, numbers))
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
        warnings = list(warnings)
        begins, ends = (self._frames.pop(table.name, []) for table in (BEGINS, ENDS))
        if begins or ends:
            pairs, num_open = pair_edges(_together(BEGINS, begins), _together(ENDS, ends))
            self._frames.setdefault(HOST.name, []).append(pairs)
            if num_open:
                warnings.append(f"{num_open:,} begin or end events have no counterpart and were skipped")
        threads = self._thread_table()
        numbers = threads["number"].arg_sort()
        counted = [(*key, num) for key, num in self._counts.items()]
        counts = pl.DataFrame(counted, schema=COUNTS.schema, orient="row")
        tables = {}
        for table in TABLES:
            if table not in (THREADS, COUNTS):
                whole = _renumbered(_together(table, self._frames.pop(table.name, [])), numbers)
                tables[table.name] = nest(whole) if table is HOST else whole
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
    """Return all parts of a table with all its columns."""
    # The host table is sorted, and thus copied, in any case.
    return pl.concat([table.empty(), *parts], how="diagonal", rechunk=table is not HOST)


def _renumbered(frame: pl.DataFrame, numbers: pl.Series) -> pl.DataFrame:
    return frame.with_columns(thread=numbers.gather(frame["thread"])) if "thread" in frame.columns else frame


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

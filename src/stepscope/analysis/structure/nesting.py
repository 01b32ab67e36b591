"""Lookups in a thread's tree of host events."""

from collections.abc import Collection

import polars as pl

from stepscope.analysis.structure.names import matches

_HIGHEST = 64  # limit on steps up: links in a damaged trace may form a cycle
NO_ROW = pl.Series([None], dtype=pl.UInt32)


def ancestor(host: pl.DataFrame, is_wanted: pl.Series) -> pl.Series:
    """Return for each row the innermost row at or above it that is wanted, or null."""
    wanted = is_wanted.fill_null(False)
    parents: pl.Series = host["parent"]
    answer: pl.Series = pl.int_range(host.height, dtype=pl.UInt32, eager=True).zip_with(wanted, parents)
    while True:
        # Pointer doubling: a wanted row names itself, any other the candidate of its candidate.
        further = answer.gather(answer)
        if further.equals(answer):
            return answer
        answer = further


def climb(rows: pl.Series, above: pl.Series) -> pl.Series:
    """Return rows moved up as far as `above`, which has the next row up or null for every row, leads."""
    for _ in range(_HIGHEST):
        higher = above.gather(rows)
        if not higher.count():
            break
        rows = higher.zip_with(higher.is_not_null(), rows)
    return rows


def outermost(host: pl.DataFrame, rows: pl.Series, is_passed: pl.Series) -> pl.Series:
    """Return rows moved up as long as the event above is to be passed."""
    parent = host["parent"]
    return climb(rows, parent.zip_with(is_passed.gather(parent).fill_null(False), NO_ROW))


def last_started(host: pl.DataFrame, threads: pl.Series, times_ns: pl.Series) -> pl.Series:
    """Return the last event of a thread that started by each time, or null."""
    asked = pl.DataFrame({"thread": threads, "time_ns": times_ns}).with_row_index("place").sort("time_ns")
    begun = host.select("thread", pl.col("start_ns").alias("time_ns"), "row").sort("time_ns", maintain_order=True)
    return asked.join_asof(begun, on="time_ns", by="thread", check_sortedness=False).sort("place")["row"]


def is_named(host: pl.DataFrame, names: Collection[str]) -> pl.Series:
    return host["name"].is_in(pl.Series(sorted(names), dtype=host.schema["name"]).implode())


def is_aten_op(host: pl.DataFrame) -> pl.Series:
    return (host["kind"] == "op") & matches(host["name"], "^aten::")

"""Lookups among host events: by name, up a thread's tree, and the user's function around an event."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import polars as pl


def matches(names: pl.Series, pattern: str) -> pl.Series:
    """Return which names (Categorical) match a regular expression; null does not match.

    >>> matches(pl.Series(["aten::mm", "cudaLaunchKernel", None], dtype=pl.Categorical), "^aten").to_list()
    [True, False, False]
    """
    name = pl.col(names.name)
    distinct = name.unique(maintain_order=True)  # twice the same
    found = distinct.filter(distinct.cast(pl.String).str.contains(pattern))
    return names.to_frame().select(name.is_in(found.implode()).fill_null(False)).to_series()


def with_answers(
    table: pl.DataFrame,
    keys: Sequence[str],
    function: Callable[..., Sequence[Any]],
    schema: Mapping[str, pl.DataType],
) -> pl.DataFrame:
    """Return a table with columns (`schema`) that a function computes from the texts of its `keys`."""
    distinct = table.select(keys).unique(maintain_order=True)
    rows = [function(*texts) for texts in distinct.cast(pl.String).iter_rows()]
    answers = distinct.hstack(pl.DataFrame(rows, schema=schema, orient="row"))
    return table.join(answers, on=keys, how="left", nulls_equal=True, maintain_order="left")


_HIGHEST = 64  # limit on steps up: links in a damaged trace may form a cycle
NO_ROW = pl.Series([None], dtype=pl.UInt32)


def ancestor(host: pl.DataFrame, is_wanted: pl.Series) -> pl.Series:
    """Return for each row the innermost row at or above it that is wanted, or null."""
    wanted = is_wanted.fill_null(False)
    parents: pl.Series = host["parent"]
    answer: pl.Series = NO_ROW.new_from_index(0, host.height)
    if not wanted.any():
        return answer
    answer = pl.int_range(host.height, dtype=pl.UInt32, eager=True).zip_with(wanted, parents)
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
    asked = pl.DataFrame({"thread": threads, "time_ns": times_ns}).with_row_index("place").drop_nulls()
    last: pl.Series = NO_ROW.new_from_index(0, len(threads))
    for part in asked.partition_by("thread"):
        # The table is by thread and time.
        first, end = (host["thread"].search_sorted(part["thread"][0], side=side) for side in ("left", "right"))
        num = host["start_ns"].slice(first, end - first).search_sorted(part["time_ns"], side="right")
        last = last.scatter(part["place"], (num + first).zip_with(num > 0, NO_ROW) - 1)
    return last.alias("row")


def innermost_open(host: pl.DataFrame, rows: pl.Series, times_ns: pl.Series) -> pl.Series:
    """Return rows moved up to the first event that is open at each time, or null."""
    one_up = above, end = host["parent"], host["end_ns"]
    num_moves = 0
    while True:
        is_over = (end.gather(rows) < times_ns).fill_null(False)
        if is_over.any():
            rows = above.gather(rows).zip_with(is_over, rows)
            num_moves += 1
            if num_moves > _HIGHEST:  # twice as far each time; `end` is the latest of all that a move passes
                further = end.gather(above)
                above, end = above.gather(above), further.zip_with((further > end).fill_null(False), end)
        elif above is one_up[0]:
            return rows
        else:
            above, end = one_up


def is_named(host: pl.DataFrame, names: Collection[str]) -> pl.Series:
    return host["name"].is_in(pl.Series(sorted(names), dtype=host.schema["name"]).implode())


def is_aten_op(host: pl.DataFrame) -> pl.Series:
    return (host["kind"] == "op") & matches(host["name"], "^aten::")


_FUNCTION = r"\.py\(\d+\): "
# The profiler removes the package folder from a path if it knows it.
_NOT_THE_USERS = (
    r"(^|-packages/|/python3\.\d+/)(torch|torchvision|numpy|importlib|asyncio|logging|multiprocessing|concurrent|json)/"
    r"|(^|/python3\.\d+/)(contextlib|functools|threading|runpy|traceback|linecache|copy|random|gc|socket|pickle)\.py\("
    r"|^<"
)


def python_callers(host: pl.DataFrame, rows: pl.Series) -> pl.Series:
    """Return the user's innermost function around each row (`train.py(12): step`); null without Python stacks."""
    is_function = (host["kind"] == "python") & matches(host["name"], _FUNCTION)
    if not is_function.any():
        return pl.repeat(None, len(rows), dtype=pl.String, eager=True).alias("caller")
    around = ancestor(host, is_function & ~matches(host["name"], _NOT_THE_USERS)).gather(rows)
    names: pl.Series = host["name"].gather(around).cast(pl.String)
    return names.alias("caller")

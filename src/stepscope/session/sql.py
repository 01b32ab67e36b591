"""SQL queries over the tables of a session's traces. A query sees these tables and no other file."""

import re
from collections.abc import Callable

import polars as pl
import polars.selectors as cs

from stepscope.errors import UsageError
from stepscope.formatting import plural, safe
from stepscope.session.session import Session
from stepscope.trace.tables import TABLES

_LONGEST_ERROR = 400
_QUERIES = ("select", "with", "from", "values", "show", "explain")
_FIRST_WORD = re.compile(r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*(\w*)", re.DOTALL)
# Polars' SQL has table functions that read files, also over the network: `read_csv('…')`. Such a name before a
# parenthesis is refused even inside a string: finding the strings exactly as Polars does would need its parser.
_FILE_FUNCTION = re.compile(r"(?<!\w)((?:read|scan)_\w+)[\"`]?\s*(\(|--|/\*)", re.IGNORECASE)
# How a plan shows that it reads a file; a table of ours is `DF [`.
_FILE_IN_PLAN = re.compile(r"^\s*\w+ SCAN\b", re.MULTILINE)


def refuse_other_than_query(query: str) -> None:
    """Raise UsageError if a query would do anything else than read the trace's tables."""
    first = _FIRST_WORD.match(query)
    if first is None or first[1].lower() not in _QUERIES:
        raise UsageError(f"only queries are run: {safe(query, 60)!r} does not begin with select or with")
    function = _FILE_FUNCTION.search(query)
    if function:
        raise UsageError(f"{safe(function[1])}() is refused: a query sees the trace's tables and no other file")


def tables_of(session: Session, warn: Callable[[str], None] = lambda text: None) -> dict[str, pl.LazyFrame]:
    """Return the tables of all traces of a session; names and kinds are plain text, as SQL expects."""
    parts: dict[str, list[pl.LazyFrame]] = {table.name: [] for table in TABLES}
    for opened in list(session.traces()):
        trace = opened.trace
        warnings = list(trace.warnings)
        if trace.num_problems:
            first = trace.problems[0]
            problems = plural(trace.num_problems, "problem")
            warnings.append(f"{problems}, the first at byte {first.offset:,}: {first.what}")
        for text in warnings:
            warn(f"{safe(trace.path.name)}: {safe(text, _LONGEST_ERROR)}")
        owner = [
            pl.lit(opened.rank if opened.is_known else None, pl.Int64).alias("rank"),
            pl.lit(str(opened.path)).alias("file"),
        ]
        for table in TABLES:
            # Lazy: a column that the query does not name costs nothing.
            part = getattr(trace, table.name).lazy()
            parts[table.name].append(part.with_columns((cs.categorical() | cs.enum()).cast(pl.String), *owner))
    return {name: pl.concat(frames) for name, frames in parts.items()}


def run_query(tables: dict[str, pl.LazyFrame], query: str) -> pl.DataFrame:
    """Return the rows of one query; UsageError in one line if it is wrong."""
    try:
        lazy = pl.SQLContext(tables).execute(query, eager=False)
        if _FILE_IN_PLAN.search(lazy.explain(optimized=False)):
            raise UsageError("a query sees the trace's tables and no other file")
        # Polars reads 100.0 as a decimal, which is not what people mean by it.
        return lazy.with_columns(cs.decimal().cast(pl.Float64)).collect()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        what = lines[0].removeprefix("sql parser error: ")
        raise UsageError(f"{safe(what, _LONGEST_ERROR)} (tables: {', '.join(tables)})") from None


def type_in_words(dtype: pl.DataType | type[pl.DataType]) -> str:
    """Return a column's type as a query sees it: `integer`, `number` or `text`."""
    return "integer" if dtype.is_integer() else "number" if dtype.is_numeric() else "text"

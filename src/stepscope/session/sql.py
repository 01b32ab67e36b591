"""SQL queries over the tables of a session's traces. A query sees these tables and no other file."""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping

import polars as pl

from stepscope.errors import UsageError
from stepscope.formatting import plural, safe, size
from stepscope.session import sql_process
from stepscope.session.session import Session
from stepscope.trace.tables import TABLES

MEMORY_LIMIT_BYTES = 2 << 30
"""How much memory a query may take besides the tables, unless told otherwise: --memory-limit."""
_LONGEST_ERROR = 400
_QUERIES = ("select", "with", "from", "values", "show", "explain")
_START = "import sys; sys.path[:] = {path!r}; import runpy; runpy.run_path({file!r}, run_name='__main__')"
_FIRST_WORD = re.compile(r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*(\w*)", re.DOTALL)


def refuse_other_than_query(query: str) -> None:
    """Raise UsageError if the text is not a query. What a query can reach is up to its process."""
    first = _FIRST_WORD.match(query)
    if first is None or first[1].lower() not in _QUERIES:
        raise UsageError(f"only queries are run: {safe(query, 60)!r} does not begin with select or with")


def tables_of(session: Session, warn: Callable[[str], None] = lambda text: None) -> dict[str, pl.DataFrame]:
    """Return the tables of all traces of a session, each row with its rank and its file."""
    parts: dict[str, list[pl.DataFrame]] = {table.name: [] for table in TABLES}
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
            pl.lit(str(opened.path), pl.Categorical()).alias("file"),
        ]
        for table in TABLES:
            parts[table.name].append(getattr(trace, table.name).with_columns(owner))
    return {name: pl.concat(frames) for name, frames in parts.items()}


def run_query(
    tables: Mapping[str, pl.DataFrame],
    query: str,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    most_rows: int | None = None,
) -> pl.DataFrame:
    """Return the rows of one query, at most `most_rows`, run in a process of its own; UsageError if it fails."""
    if sys.platform == "win32":
        raise UsageError("sql needs Linux or macOS: a query runs in a process that can open no files")
    named = {name: table for name, table in tables.items() if name in query.lower()} or tables
    # Its own session: Ctrl-C is for the process that talks to the user.
    with subprocess.Popen(
        [sys.executable, "-c", _START.format(path=[str(each) for each in sys.path], file=sql_process.__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            sql_process.send(process.stdin, [query, memory_limit_bytes, most_rows], named)
            wrong, answer = sql_process.receive(process.stdout)
        except (BrokenPipeError, EOFError):
            process.wait()
            raise UsageError(
                f"the query ended early, probably because it needs more than {size(memory_limit_bytes)} besides the "
                "tables. Select less, or raise the limit with --memory-limit"
            ) from None
        finally:
            process.kill()
    if wrong is not None:
        raise UsageError(f"{safe(wrong, _LONGEST_ERROR)} (tables: {', '.join(tables)})")
    return answer["answer"]


def type_in_words(dtype: pl.DataType | type[pl.DataType]) -> str:
    """Return a column's type as a query sees it: `integer`, `number` or `text`."""
    return "integer" if dtype.is_integer() else "number" if dtype.is_numeric() else "text"

"""Plain tables of an untrusted SQLite file, read without running any SQL that the file contains."""

import os
import sqlite3
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from stepscope.border import limit, open_file
from stepscope.errors import TraceError

_ROWS = 1 << 16  # fetched at a time
_LARGEST_ROW = 1 << 24
_OPS = 1 << 20  # of SQLite's machine between two looks at the budget
_OPS_A_BYTE = 100  # a row has at least a byte per column and takes about five ops for each


class Database(AbstractContextManager["Database"]):
    """An SQLite file, opened read-only and as if nobody else could write to it. TraceError says what is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path) as stream:
                self._num_bytes = os.fstat(stream.fileno()).st_size
            address = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro&immutable=1"
            self._connection = sqlite3.connect(address, uri=True)
        except (OSError, ValueError, sqlite3.Error) as error:
            raise self._error(getattr(error, "strerror", None) or error) from None
        self._budget = 10 + self._num_bytes * _OPS_A_BYTE // _OPS
        self._connection.text_factory = lambda text: text.decode("utf-8", errors="replace")
        if hasattr(self._connection, "setlimit"):  # from Python 3.11 on
            self._connection.setlimit(0, _LARGEST_ROW)  # SQLITE_LIMIT_LENGTH
        self._connection.set_progress_handler(self._is_spent, _OPS)
        try:
            self.tables = self._plain_tables()
        except TraceError:
            self._connection.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def _plain_tables(self) -> dict[str, list[str]]:
        """Return the columns of each table; a view or a virtual table stands for SQL and is not one."""
        self._run("PRAGMA trusted_schema = OFF")
        self._run("PRAGMA temp_store = MEMORY")
        self._run("PRAGMA cell_size_check = ON")
        found = self._run("SELECT name, type, rootpage FROM sqlite_master WHERE type IN ('table', 'view')")
        names = {name: kind == "table" and bool(page) for name, kind, page in found if isinstance(name, str)}
        self.not_plain = {name for name, is_plain in names.items() if not is_plain}
        quoted = {name: name.replace('"', '""') for name, is_plain in names.items() if is_plain}
        # This pragma leaves out generated columns, whose values are SQL too.
        rows_of = {name: self._run(f'PRAGMA table_info("{text}")').fetchall() for name, text in quoted.items()}
        self._connection.set_authorizer(_authorize)
        return {name: [row[1] for row in rows] for name, rows in rows_of.items()}

    def read(
        self, table: str, integers: tuple[str, ...], texts: tuple[str, ...] = (), is_distinct: bool = False
    ) -> pl.DataFrame:
        """Return columns of a table, empty without the table. A column or a value that is not as asked is null."""
        if table in self.not_plain:
            raise TraceError(f"{self.path}: {table} is a view or a virtual table, which Stepscope does not run")
        schema = {**dict.fromkeys(integers, pl.Int64()), **dict.fromkeys(texts, pl.String())}
        frames, num_rows = [pl.DataFrame(schema=schema)], 0
        if table not in self.tables:
            return frames[0]
        longest, most = limit("NAME"), min(limit("SQLITE_ROWS"), self._num_bytes)
        chosen = [self._value(table, name, "integer") for name in integers]
        chosen += [self._value(table, name, "text", longest + 1) for name in texts]
        # An index may hold SQL, or other values than the table: it is not used.
        which = "DISTINCT " if is_distinct else ""
        cursor = self._run(f'SELECT {which}{", ".join(chosen)} FROM "{table}" NOT INDEXED')
        while rows := self._fetch(cursor):
            frames.append(pl.DataFrame(rows, schema=schema, orient="row"))
            num_rows += len(rows)
            if num_rows > most:
                why = "than bytes" if most == self._num_bytes else f"than {most:,}"
                raise self._error(
                    f"{table} has more rows {why}. STEPSCOPE_MAX_SQLITE_ROWS sets the most that is read"
                )
        cut = [
            pl.when(pl.col(name).str.len_chars() > longest)
            .then(pl.col(name).str.head(longest) + "…")
            .otherwise(pl.col(name))
            .alias(name)
            for name in texts
        ]
        return pl.concat(frames).with_columns(cut)

    def _value(self, table: str, column: str, kind: str, longest: int | None = None) -> str:
        """Return the SQL of a value: null where the file has another type, or no such column."""
        if column not in self.tables[table]:
            return "NULL"
        value = f'"{column}"' if longest is None else f'substr("{column}", 1, {longest})'
        return f"CASE typeof(\"{column}\") WHEN '{kind}' THEN {value} END"

    def _run(self, statement: str) -> sqlite3.Cursor:
        try:
            return self._connection.execute(statement)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            raise self._error(error) from None

    def _fetch(self, cursor: sqlite3.Cursor) -> list[Any]:
        try:
            return cursor.fetchmany(_ROWS)
        except (sqlite3.Error, ValueError) as error:
            raise self._error(error) from None

    def _is_spent(self) -> bool:
        self._budget -= 1
        return self._budget < 0

    def _error(self, error: object) -> TraceError:
        why = "it takes more work than any file of its size" if str(error) == "interrupted" else error
        why = "it is damaged" if isinstance(error, UnicodeError) else why  # in SQLite's own message
        return TraceError(f"{self.path} cannot be read as an SQLite database: {why}")


def _authorize(action: int, _: str | None, name: str | None, __: str | None, source: str | None) -> int:
    """Allow to read tables and to call the two functions used here, and neither from inside a view or a trigger."""
    is_known = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ) or (
        action == sqlite3.SQLITE_FUNCTION and name in ("typeof", "substr")
    )
    return sqlite3.SQLITE_OK if is_known and source is None else sqlite3.SQLITE_DENY

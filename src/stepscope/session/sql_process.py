"""The process that runs one SQL query: it can open nothing and may take only so much memory.

Polars' SQL can read files and addresses (`read_csv('…')`), and which texts make it do so only its own parser knows.
So the query runs where no file, folder or socket can be opened: its tables and its answer pass through the pipes that
are open already. `sql.py` runs this file alone, so it imports nothing else of Stepscope.
"""

import contextlib
import ctypes
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import polars as pl
import polars.selectors as cs

NO_OTHER_FILE = "a query sees the trace's tables and no other file"
_NO_DESCRIPTOR = "os error 24"  # of EMFILE, as Rust words it
_PARENT_DEATH_SIGNAL, _KILL = 1, 9


class QueryError(Exception):
    """What is wrong with a query, in one line."""


def execute(tables: Mapping[str, pl.DataFrame], query: str, most_rows: int | None = None) -> pl.DataFrame:
    """Return the rows of one query, at most `most_rows`. Names and kinds are plain text in it, as SQL expects."""
    as_text = (cs.categorical() | cs.enum()).cast(pl.String)
    lazy = {name: table.lazy().with_columns(as_text) for name, table in tables.items()}
    try:
        answer = pl.SQLContext(lazy).execute(query, eager=False)
        # Polars reads 100.0 as a decimal, which is not what people mean by it.
        answer = answer.with_columns(cs.decimal().cast(pl.Float64))
        return (answer if most_rows is None else answer.head(most_rows)).collect()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        text = str(error).strip()
        # An answer about a file would say whether it exists, or quote its first line.
        if isinstance(error, OSError) or _NO_DESCRIPTOR in text:
            raise QueryError(NO_OTHER_FILE) from None
        lines = text.splitlines() or [type(error).__name__]
        raise QueryError(lines[0].removeprefix("sql parser error: ")) from None


def lock(memory_limit_bytes: int) -> None:
    """Let this process open nothing more for good, and take at most this much more memory."""
    import resource

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, _KILL, 0, 0, 0)
    pl.select(1).lazy().collect()  # Polars opens what its threads need, once
    with contextlib.suppress(OSError, ValueError):  # elsewhere than on Linux it is not enforced
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        taken = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (taken + memory_limit_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def send(stream: IO[bytes], header: Any, frames: Mapping[str, pl.DataFrame]) -> None:
    """Write a line of JSON and tables; `receive` reads them."""
    blobs = []
    for frame in frames.values():
        frame.write_ipc_stream(buffer := io.BytesIO())
        blobs.append(buffer.getbuffer())
    sizes = dict(zip(frames, map(len, blobs)))
    stream.write(json.dumps([header, sizes]).encode() + b"\n")
    for blob in blobs:
        stream.write(blob)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[Any, dict[str, pl.DataFrame]]:
    """Return what `send` wrote; EOFError if the other process ended before."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    header, sizes = json.loads(line)
    frames = {}
    for name, size in sizes.items():
        blob = stream.read(size)
        if len(blob) < size:
            raise EOFError
        frames[name] = pl.read_ipc_stream(io.BytesIO(blob))
    return header, frames


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    (query, memory_limit_bytes, most_rows), tables = receive(sys.stdin.buffer)
    lock(memory_limit_bytes)
    try:
        send(answers, None, {"answer": execute(tables, query, most_rows)})
    except QueryError as error:
        send(answers, str(error), {})


if __name__ == "__main__":
    main()
    os._exit(0)  # exit handlers could need what cannot be opened any more

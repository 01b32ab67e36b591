"""SQLite databases that other profilers write, read as a `Trace`."""

from collections.abc import Callable
from pathlib import Path

from stepscope.errors import TraceError
from stepscope.trace.databases import nsight, rocpd
from stepscope.trace.databases.sqlite_file import Database
from stepscope.trace.tables import Trace


def is_trace(path: Path) -> bool:
    """Return False only for an SQLite database that surely is something else."""
    try:
        with Database(path) as database:
            return nsight.is_nsight(database) or rocpd.is_rocpd(database)
    except TraceError:
        return True  # and the reader says what is wrong with it


def gpu_processes(path: Path) -> list[int]:
    """Return the processes in a database that used a GPU, by GPU and then by number; empty if it does not tell."""
    with Database(path) as database:
        return rocpd.gpu_processes(database) if rocpd.is_rocpd(database) else nsight.gpu_processes(database)


def read_database(path: Path, process: int | None = None, progress: Callable[[float], None] | None = None) -> Trace:
    """Return one process of a database; all of it if none is named."""
    with Database(path) as database:
        read = rocpd.read_rocpd if rocpd.is_rocpd(database) else nsight.read_nsight
        return read(database, process, progress or (lambda _: None))

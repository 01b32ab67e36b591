"""What a path is, told from the files in a folder or the first bytes of a file."""

import errno
import zlib
from enum import Enum
from pathlib import Path

from stepscope.border import open_file
from stepscope.errors import UsageError
from stepscope.rows import RESULTS_FILE
from stepscope.trace.memory_file import MEMORY_FILE
from stepscope.trace.recording import RECORDING_FILE

STUDY_FILE = "study.json"
BEGINNING = 1 << 16
"""Bytes that are enough to recognize a file."""
SQLITE = b"SQLite format 3\0"


class Kind(Enum):
    """What a path holds; the value is its name in JSON and in messages."""

    RECORDING = "recording"
    """A folder that `stepscope run` or `stepscope.record` wrote."""
    TRACE = "trace"
    """A trace file of PyTorch's profiler, or an SQLite database of Nsight Systems or rocprofv3."""
    RANKS = "folder of traces"
    """A folder with one trace per rank."""
    SWEEP = "sweep"
    """What `stepscope bench` wrote: the folder, or its results.jsonl."""
    STUDY = "study"
    """A folder that `stepscope study` wrote."""
    SNAPSHOT = "snapshot"
    """A CUDA memory snapshot (.pickle)."""
    MEMORY = "memory window"
    """The memory window of a recording, without the recording."""


_FILES = {
    RECORDING_FILE: Kind.RECORDING,
    STUDY_FILE: Kind.STUDY,
    RESULTS_FILE: Kind.SWEEP,
    MEMORY_FILE: Kind.MEMORY,
}
"""The file that makes a folder what it is, most telling first."""


def kind_of(path: Path) -> Kind:
    """Return what a path is; UsageError if it is nothing that Stepscope reads.

    A file that nothing else explains is taken for a trace: the reader says what is wrong with it.
    """
    try:
        follow_link(path)
        if not path.exists():
            raise UsageError(f"{path} does not exist{_instead_of(path)}")
        if path.is_dir():
            return next((kind for name, kind in _FILES.items() if (path / name).is_file()), Kind.RANKS)
        if not path.is_file():
            raise UsageError(f"{path} is neither a file nor a folder")
        if path.suffix == ".jsonl":
            return Kind.SWEEP
        if path.name == MEMORY_FILE:
            return Kind.MEMORY
        beginning = beginning_of(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}. `ls -ld {path}` says who can") from None
    if path.suffix == ".py":
        raise UsageError(
            f"{path} is a script. `stepscope run {path}` records it, and then `stepscope diagnose` reads that"
        )
    if beginning[:1] == b"\x80" or path.suffix in (".pickle", ".pkl"):
        return Kind.SNAPSHOT
    is_memory = b'"allocations"' in beginning and b'"traceEvents"' not in beginning
    return Kind.MEMORY if is_memory else Kind.TRACE


def _instead_of(path: Path) -> str:
    """Return what to type instead of a path that is not there."""
    import difflib

    near = difflib.get_close_matches(path.name, [each.name for each in path.parent.glob("*")], 1, 0.75)
    return f". Did you mean {path.parent / near[0]}?" if near else ". `stepscope run train.py` records a run"


def is_sqlite(path: Path) -> bool:
    """Return whether a file begins like an SQLite database, as those of Nsight Systems and rocprofv3 do."""
    try:
        with open_file(path) as stream:
            return stream.read(len(SQLITE)) == SQLITE
    except (OSError, ValueError):  # the reader says what is wrong with it
        return False


def follow_link(path: Path) -> None:
    """Raise UsageError for a link that leads to no file."""
    if not path.is_symlink():
        return
    try:
        path.stat()
    except FileNotFoundError:
        raise UsageError(f"{path} is a link to {path.readlink()}, which is not there") from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UsageError(f"{path} is a link that leads in a circle") from None


def beginning_of(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed; empty if the compression is damaged."""
    with open_file(path) as stream:
        data = stream.read(BEGINNING)
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        return zlib.decompressobj(wbits=31).decompress(data, BEGINNING)
    except zlib.error:
        return b""

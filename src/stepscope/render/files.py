"""Files that a report or an export is written to: checked before the work, whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from stepscope.errors import MissingDependencyError, StepscopeError, UsageError

_LEVEL = 5
"""Of compression: half the time of the usual level for a twentieth more bytes."""
_TRACES = (".gz", ".json", ".trace", ".pt")
"""Endings that a trace's name loses in the name of what is made of it."""
_EXTRAS = {"matplotlib": "'stepscope[png]'"}
"""What to install for a package that not everybody has."""


def stem_of(path: Path) -> str:
    """The name of what is made of a trace, without its endings.

    >>> stem_of(Path("traces/rank0.pt.trace.json.gz")), stem_of(Path("runs/x-1"))
    ('rank0', 'x-1')
    """
    name = Path(path.resolve().name)
    while name.suffix in _TRACES and name.stem:
        name = Path(name.stem)
    return str(name)


def file_names(ids: list[str]) -> list[str]:
    """Return one file name per id; repeated ids are numbered.

    >>> file_names(["a", "b", "a", "a"])
    ['a', 'b', 'a-2', 'a-3']
    """
    return [f"{name}-{ids[:at].count(name) + 1}" if name in ids[:at] else name for at, name in enumerate(ids)]


def check_file(target: Path, force: bool) -> None:
    """UsageError where a file cannot or should not be written, before any work is done for nothing."""
    if target.is_dir():
        raise UsageError(f"{target} is a folder: name a file")
    if target.exists() and not force:
        raise UsageError(f"{target} is there already: --force writes over it")
    _check_parent(target)


def check_folder(target: Path, force: bool) -> None:
    """The same of a folder for files."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file: name a folder")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise UsageError(f"{target} is a folder with files in it: --force writes into it")
    _check_parent(target)


def _check_parent(target: Path) -> None:
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}")


def need(package: str) -> None:
    """MissingDependencyError where a package is not installed; it is not imported."""
    if importlib.util.find_spec(package) is None:
        raise missing(package)


def missing(package: str) -> MissingDependencyError:
    return MissingDependencyError(f"{package} is missing: pip install {_EXTRAS.get(package, package)}")


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """What the machine does not let us write becomes one line."""
    try:
        yield
    except OSError as error:
        raise StepscopeError(f"{target} could not be written: {error.strerror or error}") from None


def write_texts(target: Path, texts: Iterable[str | bytes]) -> None:
    """Write texts one after the other, compressed where the name ends in .gz; the file is in place when whole."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with writing(target), contextlib.ExitStack() as stack:
            stream: io.BufferedIOBase = stack.enter_context(part.open("wb"))
            if target.suffix == ".gz":
                # No name and no time in it: the same trace makes the same file.
                stream = stack.enter_context(gzip.GzipFile("", "wb", _LEVEL, stream, mtime=0))
            for text in texts:
                stream.write(text.encode("utf-8", "backslashreplace") if isinstance(text, str) else text)
            stack.close()
            part.replace(target)
    finally:
        part.unlink(missing_ok=True)

"""Output files of reports and exports: checked before the work starts, written completely or not at all."""

import contextlib
import gzip
import importlib.util
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from stepscope.errors import MissingDependencyError, StepscopeError, UsageError

_LEVEL = 5  # gzip level: half the time of the default for 5 % more bytes
_TRACES = (".gz", ".json", ".trace", ".pt")  # suffixes that are dropped from a trace's name
_EXTRAS = {"matplotlib": "'stepscope[png]'"}  # what to install for an optional package


def stem_of(path: Path) -> str:
    """Return the name of a trace without its suffixes.

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
    """Raise UsageError if the file cannot be written, or exists and `force` is off."""
    if target.is_dir():
        raise UsageError(f"{target} is a folder. Name a file")
    if target.exists() and not force:
        raise UsageError(f"{target} already exists. Use --force to overwrite it")
    _check_parent(target)


def check_folder(target: Path, force: bool) -> None:
    """Raise UsageError if the folder cannot be written to, or has files and `force` is off."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file. Name a folder")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise UsageError(f"{target} is not empty. Use --force to write into it")
    _check_parent(target)


def _check_parent(target: Path) -> None:
    if not target.parent.is_dir():
        raise UsageError(f"folder {target.parent} does not exist")


def need(package: str) -> None:
    """Raise MissingDependencyError if a package is not installed, without importing it."""
    if not has(package):
        raise missing(package)


def has(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None


def missing(package: str) -> MissingDependencyError:
    return MissingDependencyError(f"{package} is not installed. Run: pip install {_EXTRAS.get(package, package)}")


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn an OSError into a one-line error."""
    try:
        yield
    except OSError as error:
        raise StepscopeError(
            f"{target} could not be written: {error.strerror or error}. Choose another place with -o"
        ) from None


def write_texts(target: Path, texts: Iterable[str | bytes]) -> None:
    """Write texts to a file, compressed if its name ends in .gz; it appears only when complete."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with writing(target), contextlib.ExitStack() as stack:
            stream: io.BufferedIOBase = stack.enter_context(part.open("wb"))
            if target.suffix == ".gz":
                # Without name and time: the same input gives the same file.
                stream = stack.enter_context(gzip.GzipFile("", "wb", _LEVEL, stream, mtime=0))
            for text in texts:
                stream.write(text.encode("utf-8", "backslashreplace") if isinstance(text, str) else text)
            stack.close()
            part.replace(target)
    finally:
        part.unlink(missing_ok=True)

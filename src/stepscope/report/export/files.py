"""Where an export is written: whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
from collections.abc import Iterable
from pathlib import Path

from stepscope.errors import StepscopeError, UsageError

_LEVEL = 5
"""Of compression: half the time of the usual level for a twentieth more bytes."""


def check_file(target: Path, force: bool, endings: tuple[str, ...]) -> None:
    """UsageError where a file cannot or should not be written, before any work is done for nothing."""
    if not target.name.endswith(endings):
        raise UsageError(f"{target}: name it {' or '.join('*' + ending for ending in endings)}")
    if target.is_dir():
        raise UsageError(f"{target} is a folder: name a file")
    if target.exists() and not force:
        raise UsageError(f"{target} is there already: --force writes over it")
    _check_parent(target)


def check_folder(target: Path, force: bool) -> None:
    """The same of a folder for tables."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file: tables go into a folder")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise UsageError(f"{target} is a folder with files in it: --force writes into it")
    _check_parent(target)


def _check_parent(target: Path) -> None:
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}")


def write_texts(target: Path, texts: Iterable[str]) -> None:
    """Write texts one after the other, compressed where the name ends in .gz; the file is in place when whole."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with contextlib.ExitStack() as stack:
            stream: io.BufferedIOBase = stack.enter_context(part.open("wb"))
            if target.suffix == ".gz":
                # No name and no time in it: the same trace makes the same file.
                stream = stack.enter_context(gzip.GzipFile("", "wb", _LEVEL, stream, mtime=0))
            for text in texts:
                stream.write(text.encode("utf-8"))
        part.replace(target)
    except OSError as error:
        raise StepscopeError(f"{target} could not be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)

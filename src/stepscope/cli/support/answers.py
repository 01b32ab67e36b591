"""Keeps what a verb printed in the user's cache folder, for the next time it is asked the same.

The name of an answer is a hash of all that it depends on: the words that were typed, the terminal, the settings,
every file that was read and the code. One that is damaged, or may be another user's, is not used.
"""

import argparse
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stepscope.cli.support import output
from stepscope.user_cache import cache_folder, own_folder, read_own

FOLDER = "answers"
PACKAGE = Path(__file__).parents[2]
_MOST_FILES = 5_000  # a folder with more is read again
_MOST_BYTES = 1 << 28  # of all answers; the ones unused for longest are removed
_END = 1 << 16
_SETTLED_NS = 1_000_000_000  # a file that changes again within a tick of its clock would show the same times


def answer(verb: str, arguments: argparse.Namespace, paths: list[Path], compute: Callable[[], None]) -> int:
    """Print the answer that was kept; otherwise compute it, and keep what was printed."""
    question = None if arguments.no_cache else _question(verb, arguments, paths)
    if question is None:
        compute()
        return 0
    try:
        file = own_folder(FOLDER) / question
        digest, _, text = read_own(file).partition(b"\n")
        if digest == _hash_of(text):
            os.utime(file)  # it is in use, so it is kept
            output.write([text.decode()])
            return 0
    except (OSError, RuntimeError):  # there is none, or it may not be believed
        pass
    with output.copied() as parts:
        compute()
    if parts and _question(verb, arguments, paths) == question:  # nothing changed meanwhile
        with suppress(OSError, RuntimeError):  # a full disk, or no home directory
            _keep(question, "".join(parts).encode())
    return 0


def _question(verb: str, arguments: argparse.Namespace, paths: list[Path]) -> str | None:
    """Return a hash of all that an answer depends on; None if a file may change without a trace of it."""
    settings = sorted((key, value) for key, value in os.environ.items() if key.startswith("STEPSCOPE_"))
    known: list[Any] = [verb, sorted(vars(arguments).items()), Path.cwd(), output.screen(), settings, sys.version]
    try:
        libraries = [spec.origin for name in ("polars", "msgspec") if (spec := find_spec(name)) and spec.origin]
        files = [*libraries, *(file for file in files_in(PACKAGE) if file.endswith((".py", ".json")))]
        files += [str(file) for file in cache_folder().glob("*") if file.is_file()]  # rates measured on this machine
        for path in paths:
            files += filter(os.path.isfile, files_in(path)) if path.is_dir() else [str(path)]
        asked = set(map(str, paths))
        for file in sorted(files):
            status = os.stat(file)  # noqa: PTH116 - of 500 files: 500 paths take longer
            if len(files) > _MOST_FILES or time.time_ns() - status.st_ctime_ns < _SETTLED_NS:
                return None
            known.append((file, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
            if file in asked:  # for file systems without these times
                with Path(file).open("rb") as stream:
                    beginning = stream.read(_END)
                    stream.seek(max(0, status.st_size - _END))
                    known.append(_hash_of(beginning + stream.read(_END)))
    except (OSError, RuntimeError):
        return None
    return _hash_of(repr(known).encode()).decode()


def files_in(folder: Path) -> Iterator[str]:
    return (f"{place}{os.sep}{name}" for place, _, names in os.walk(folder) for name in names)


def _hash_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).hexdigest().encode()


def _keep(question: str, text: bytes) -> None:
    own_folder(create=True)
    folder = own_folder(FOLDER, create=True)
    temporary = folder / f".{question}.{secrets.token_hex(6)}"
    try:
        temporary.touch(mode=0o600)
        temporary.write_bytes(_hash_of(text) + b"\n" + text)
        temporary.replace(folder / question)
    finally:
        temporary.unlink(missing_ok=True)
    room = _MOST_BYTES
    kept = [(file.stat(), file) for file in folder.iterdir()]
    for status, file in sorted(kept, key=lambda each: each[0].st_mtime, reverse=True):
        room -= status.st_size
        if room < 0:
            file.unlink(missing_ok=True)

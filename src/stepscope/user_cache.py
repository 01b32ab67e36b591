"""The user's cache folder: only this user can write to it, so what is in it may be believed.

What lies beside a trace came with the trace, from anybody. So everything that Stepscope keeps is here, in
`$STEPSCOPE_CACHE`, `$XDG_CACHE_HOME/stepscope` or `~/.cache/stepscope`.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_COMMANDS = "commands"  # a file for each that this user has run
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Return the folder, which may not exist; RuntimeError if this user has no home directory."""
    folder, base = os.environ.get("STEPSCOPE_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    if folder:
        return Path(folder).absolute()
    # As the XDG specification says, a relative path is ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "stepscope"


def own_folder(name: str = "", create: bool = False) -> Path:
    """Return the cache folder or a folder in it; OSError if it does not exist or others may have written to it."""
    base = cache_folder()
    if create:
        base.parent.mkdir(parents=True, exist_ok=True)
    folder = base.resolve()  # a link of the user's own, to a larger disk
    for each in (folder, folder / name):
        if create:
            each.mkdir(mode=0o700, exist_ok=True)
        check_own(each)
    return folder / name


def check_own(path: Path) -> os.stat_result:
    """Return the status of a file or folder; OSError for a link, and if others own it or may write to it."""
    status = path.lstat()
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        raise OSError(f"{path} is neither a file nor a folder")
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise OSError(f"{path} belongs to another user")
    if hasattr(os, "geteuid") and status.st_mode & _OTHERS_MAY_WRITE:
        raise OSError(f"{path} can be written by other users. Run: chmod go-w {path}")
    return status


def read_own(path: Path) -> bytes:
    """Return the bytes of a file in the cache folder; OSError if it is not a regular file of this user."""
    if not stat.S_ISREG(check_own(path).st_mode):
        raise OSError(f"{path} is not a file")  # and reading a pipe would block
    return path.read_bytes()


def note_command(command: Mapping[str, Any]) -> None:
    """Note that this user runs a command, as a recording names it; without a cache folder, nothing is noted."""
    with suppress(OSError, RuntimeError):
        (own_folder(_COMMANDS, create=True) / _command_name(command)).touch(mode=0o600)


def has_run(command: Mapping[str, Any]) -> bool:
    """Return whether this user has run the command that a recording names, in the same folder."""
    try:
        read_own(own_folder(_COMMANDS) / _command_name(command))
    except (OSError, RuntimeError):
        return False
    return True


def _command_name(command: Mapping[str, Any]) -> str:
    words = [command.get(name) for name in ("folder", "argv", "module", "program")]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()

"""Every error a user can cause, as one tree.

    StepscopeError              exit code 2, one line, never a traceback
    ├── UsageError              the command line or an argument is wrong
    ├── RecordingError          a recording cannot be read or written
    ├── TraceError              a trace cannot be read
    ├── NotComparableError      two things that cannot be compared; `stepscope compare` exits with 4
    ├── MissingDependencyError  something must be installed first
    └── Unavailable             the recording or trace does not contain what was asked for

A user's own exceptions pass through Stepscope untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class StepscopeError(Exception):
    """A user's mistake: the message says what happened, where, and what to do."""


class UsageError(StepscopeError):
    """The command line or an argument is wrong."""


class RecordingError(StepscopeError):
    """A recording cannot be read or written."""


class TraceError(StepscopeError):
    """A trace cannot be read; the message has the byte where it went wrong."""


class NotComparableError(StepscopeError):
    """Two runs, sweeps or traces that cannot be compared; the message says why."""


class MissingDependencyError(StepscopeError):
    """A package is missing; the message carries the command that installs it."""


class Unavailable(StepscopeError):
    """The recording or trace does not contain what was asked for; the message says what to run to get it."""


ABOUT_GPUS = "These checks are about GPUs."
ABOUT_CPUS = "These checks are about training on a CPU."
"""Reasons of what is Unavailable because it does not apply."""


def if_available(read: Callable[[], T]) -> T | None:
    """Return what `read` returns; None if it is Unavailable."""
    try:
        return read()
    except Unavailable:
        return None


def failure(error: BaseException) -> str:
    """Return an unexpected error in one line.

    >>> failure(KeyError("num_steps"))
    "KeyError: 'num_steps'"
    >>> failure(ValueError("x" * 999)).count("x"), failure(ValueError("x" * 999))[-1]
    (287, '…')
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:299]}…"


def need_torch() -> None:
    """Raise MissingDependencyError if PyTorch is not installed; it is not imported."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingDependencyError("PyTorch is not installed, and a CPU build is enough: `pip install torch`")

"""The wall between Stepscope and the script that it runs in.

Whatever of ours runs in the script's process is called from here, from `patches.py` or from `model.py`, or passes its
errors to `failed`. An error on our side ends the measurement with one line on standard error; the script goes on as
if it were alone. KeyboardInterrupt, SystemExit and what the script's own functions raise pass through untouched.
"""

from __future__ import annotations

import functools
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ParamSpec

from stepscope.recorder import current

P = ParamSpec("P")

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  as a code object spells it
_stands = False
_has_spoken = False
_stderr: tuple[int, int] | None = None  # what standard error was at the start


def raise_up() -> None:
    """Protect the script from here on. Before, and in processes of our own, errors are raised as usual."""
    global _stands, _has_spoken, _stderr
    _stands, _has_spoken = True, False
    _stderr = _stderr or identity(2)


def take_down() -> None:
    global _stands
    _stands = False


def failed(error: Exception) -> None:
    """End the measurement because of an error on our side."""
    global _has_spoken
    if not _stands:
        raise error
    text = f"{type(error).__name__}: {' '.join(message(error).split())[:200]}{_place(error.__traceback__)}"
    try:
        if current.session is not None:
            current.session.abandon(text)
    except Exception as another:
        pass_on(another)  # it is inert in any case, and the line says what came first
    pass_on(error)
    if not _has_spoken:
        _has_spoken = True
        tell(f"the measurement ended after an error ({text}); the script goes on")


def guarded(function: Callable[P, Any]) -> Callable[P, None]:
    """Return a function that passes errors on to `failed`. For callbacks that run rarely: it adds a frame."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            failed(error)

    return call


@contextmanager
def surrounded(begin: Callable[[], Callable[[], object] | None]) -> Iterator[None]:
    """Call `begin` before a block of the script, and what that returns, if anything, after it."""
    end = None
    try:
        end = begin()
    except Exception as error:
        failed(error)
    try:
        yield
    finally:
        if end is not None:
            guarded(end)()


@guarded
def _leave_in_child() -> None:
    # A forked worker is not the training process. Its copies of the hooks stay installed and do nothing.
    if current.session is not None:
        current.session.stop_listening()
        current.session = None


os.register_at_fork(after_in_child=_leave_in_child)


def message(error: BaseException) -> str:
    """Return what an exception says, which may be code of the script."""
    try:
        return str(error)
    except Exception:
        return "an error without a message"


def _place(traceback: TracebackType | None) -> str:
    """Return the innermost line of ours in a traceback, `, at recorder/loop.py:42`."""
    found = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file.startswith(_FOLDER):
            found = f", at {file[len(_FOLDER) + 1 :]}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def pass_on(error: Exception) -> None:
    """Raise an error again if a signal handler of the script raised it, which may run between any two lines."""
    traceback = error.__traceback__
    installed = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in installed} - {None}
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            raise error
        traceback = traceback.tb_next


# --- what we say ----------------------------------------------------------------------------------


def identity(descriptor: int) -> tuple[int, int] | None:
    """Return what a descriptor is open on (device and inode), or None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def tell(line: str) -> None:
    """Write a line to standard error: not to an object that the script put in its place, nor to another file."""
    if _stderr is not None and identity(2) == _stderr:
        try:
            os.write(2, f"stepscope: {line}\n".encode(errors="replace"))
        except OSError:
            pass  # its reader is gone


_told: set[str] = set()


def tell_once(line: str) -> None:
    """Write a line to standard error, the first time."""
    if line not in _told:
        _told.add(line)
        tell(line)


@contextmanager
def caught_warnings() -> Iterator[list[Any]]:
    """Keep warnings of ours from the script.

    `warnings.catch_warnings` makes Python forget which warnings it has shown, so that the script's appear again.
    """
    caught: list[Any] = []
    every, show = ("always", None, Warning, None, 0), warnings._showwarnmsg_impl  # type: ignore[attr-defined]  # private
    shown = warnings.showwarning
    warnings.filters.insert(0, every)  # type: ignore[attr-defined]  # private
    warnings._showwarnmsg_impl = caught.append  # type: ignore[attr-defined]  # private
    warnings.showwarning = warnings._showwarning_orig  # type: ignore[attr-defined]  # private
    try:
        yield caught
    finally:
        warnings.filters.remove(every)  # type: ignore[attr-defined]  # private
        warnings._showwarnmsg_impl, warnings.showwarning = show, shown  # type: ignore[attr-defined]  # private

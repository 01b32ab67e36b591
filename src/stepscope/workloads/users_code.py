"""Runs code that a user wrote: its errors become one line, and its output does not mix with an answer."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from stepscope.errors import StepscopeError, UsageError

OURS = str(Path(__file__).parent.parent)


@contextlib.contextmanager
def users_code() -> Iterator[None]:
    """Turn whatever a user's code raises into a UsageError that names the line; STEPSCOPE_DEBUG prints all of it.

    `sys.exit` is such an error: a file that exits when it is imported has no function to offer.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except StepscopeError:
        raise
    except (Exception, SystemExit) as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            traceback.print_exception(error)
        raise UsageError(_in_one_line(error)) from None


def _in_one_line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((OURS, "<")) and "/lib/python" not in f.filename]
    frame = (theirs or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}: {type(error).__name__}{': ' if said else ''}{said}"

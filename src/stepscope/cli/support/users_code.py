"""Running what a user wrote: its mistakes are one line, and what it prints is no part of an answer."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from stepscope.cli.support.output import tell
from stepscope.errors import StepscopeError, UsageError

OURS = str(Path(__file__).parent.parent)


@contextlib.contextmanager
def users_code() -> Iterator[None]:
    """Around a user's code: whatever it raises is a UsageError that says where; the whole of it with STEPSCOPE_DEBUG.

    `sys.exit` is one of these mistakes: a file that leaves when it is imported has no function to give.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except StepscopeError:
        raise
    except (Exception, SystemExit) as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            tell("".join(traceback.format_exception(error)), end="")
        raise UsageError(_in_one_line(error)) from None


def _in_one_line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((OURS, "<")) and "/lib/python" not in f.filename]
    frame = (theirs or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}: {type(error).__name__}{': ' if said else ''}{said}"

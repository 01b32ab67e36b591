"""Runs code that a user wrote: its errors become one line, and its output does not mix with an answer."""

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from stepscope.errors import StepscopeError, UsageError
from stepscope.workloads.knobs import nearest

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


def check_python_file(path: Path) -> None:
    """Raise UsageError with a suggestion if there is no such file."""
    if not path.is_file():
        folder = path.parent
        beside = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
        where = f"in {folder.resolve()}" if folder.is_dir() else f"(no folder {folder})"
        raise UsageError(f"{path.name} not found {where}: {nearest(path.name, beside)}")


def module_from_file(path: Path) -> ModuleType:
    """Return a user's file as a module. Files in the same folder can be imported, as when Python runs the file."""
    check_python_file(path)
    folder_text = str(path.resolve().parent)
    if folder_text not in sys.path:
        sys.path.insert(0, folder_text)
    spec = importlib.util.spec_from_file_location(f"stepscope_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up a class's module by name
    spec.loader.exec_module(module)
    return module


def _in_one_line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((OURS, "<")) and "/lib/python" not in f.filename]
    frame = (theirs or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}: {type(error).__name__}{': ' if said else ''}{said}"

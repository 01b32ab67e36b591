"""What a user typed or wrote: values of knobs, with suggestions for mistakes; code, whose errors become one line."""

import contextlib
import difflib
import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from stepscope.errors import StepscopeError, UsageError
from stepscope.workloads.workload import Knob, Value

MOST_SHOWN = 20
BOOLS = {"true": True, "on": True, "false": False, "off": False}


def nearest(word: str, right: Iterable[str]) -> str:
    """Return a suggestion: the most similar valid word, or a list of valid words if none is similar.

    >>> nearest("seq_length", ["batch", "seq_len"]), nearest("x", ["batch", "seq_len"])
    ('did you mean seq_len?', 'one of: batch, seq_len')
    """
    words = list(dict.fromkeys(right))
    whole = next((known for known in words if word.lower() in known.lower().split("_")), None)
    if whole is not None:  # fp16 is more like autocast_fp16 than like bf16
        return f"did you mean {whole}?"
    lowered = {known.lower(): known for known in reversed(words)}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    if close:
        return f"did you mean {lowered[close[0]]}?"
    shown = ", ".join(words[:MOST_SHOWN]) + (f", … ({len(words)})" if len(words) > MOST_SHOWN else "")
    return f"one of: {shown}" if words else "none exist"


def check_key(knobs: Sequence[Knob], key: str) -> Knob:
    """Return the knob of that name; UsageError with a suggestion if there is none."""
    for knob in knobs:
        if knob.name == key:
            return knob
    raise UsageError(f"Unknown knob {key!r}: {nearest(key, (knob.name for knob in knobs))}")


def parse_value(knob: Knob, text: str) -> Value:
    """Return the value of a knob from text; UsageError with the allowed values.

    >>> parse_value(Knob(name="seq_len", kind=int, default=128, values=None, about=""), "16_384")
    16384
    """
    text = text.strip()
    if knob.kind is bool:
        if text.lower() not in BOOLS:
            raise UsageError(f"{knob.name}={text}: must be true or false (on, off)")
        return BOOLS[text.lower()]
    if knob.values is not None:
        given = _number(knob.kind, text) if knob.kind in (int, float) else text
        for value in knob.values:
            if given == value and given is not None:
                return value
        raise UsageError(f"{knob.name}={text}: {nearest(text, map(str, knob.values))}")
    if knob.kind is str:
        return text
    number = _number(knob.kind, text)
    if number is None:
        raise UsageError(f"{knob.name}={text}: must be {'an integer' if knob.kind is int else 'a number'}")
    return number


def _number(kind: type, text: str) -> int | float | None:
    try:
        number: int | float = int(text) if kind is int else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


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


def function_of(module: ModuleType, place: str, name: str) -> Callable[..., Any]:
    """Return a function of a user's module; UsageError with a suggestion if there is none."""
    function: Any = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]  # a user's own
    public = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
    raise UsageError(f"{place} has no function {name!r}: {nearest(name, public)}")


def _in_one_line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((OURS, "<")) and "/lib/python" not in f.filename]
    frame = (theirs or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}: {type(error).__name__}{': ' if said else ''}{said}"

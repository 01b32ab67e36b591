"""Runs a script the way Python would, with a hook that waits for torch to be imported.

This module must not import torch: what the script sets before importing it (CUDA_VISIBLE_DEVICES, OMP_NUM_THREADS,
the allocator configuration) must still take effect.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, NoReturn

PACKAGE_FOLDER = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Program:
    """A compiled script or module, ready to run as `__main__`."""

    name: str
    file: str
    code: CodeType
    spec: Any
    loader: Any
    argv: list[str]
    path_entry: str


def load_script(script: str, arguments: Sequence[str]) -> Program:
    """Return a compiled script file. Raises ValueError with a one-line message if it cannot be compiled."""
    path = Path(script)
    file = os.path.abspath(script)  # noqa: PTH100  as Python does: absolute, links not resolved
    if not path.exists():
        raise ValueError(f"{script} not found")
    if path.is_dir():
        raise ValueError(f"{script} is a folder: name a Python script, or use -m for a module")
    try:
        # Reads the file as bytes, so that the script's encoding declaration applies.
        with io.open_code(str(path.resolve())) as stream:
            code = compile(stream.read(), file, "exec", dont_inherit=True)
    except OSError as error:
        raise ValueError(f"cannot read {script}: {error.strerror}") from None
    except (SyntaxError, ValueError, UnicodeDecodeError) as error:
        where = f"{script}, line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else script
        raise ValueError(f"{where}: not Python: {getattr(error, 'msg', None) or error}") from None
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    return Program(path.stem, file, code, None, loader, [script, *arguments], str(path.resolve().parent))


def load_module(module: str, arguments: Sequence[str]) -> Program:
    """Return a compiled module for `-m`. Raises ValueError if it is not found."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        _, spec, code = runpy._get_module_details(module)  # type: ignore[attr-defined]
    except ImportError as error:
        raise ValueError(f"cannot run the module: {error}") from None
    finally:
        sys.path.pop(0)
    name = module.split(".")[-1]
    return Program(name, spec.origin, code, spec, spec.loader, [spec.origin, *arguments], str(Path.cwd()))


def run_program(program: Program) -> None:
    """Run a program as `__main__` in this process. Its exceptions pass through unchanged."""
    main = types.ModuleType("__main__")
    main.__file__ = program.file
    main.__spec__ = program.spec
    main.__loader__ = program.loader
    main.__package__ = program.spec.parent if program.spec else None
    main.__dict__["__builtins__"] = __builtins__
    main.__dict__["__cached__"] = None
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    # It stays in place after the script ends: atexit functions and threads still look it up.
    sys.modules["__main__"] = main
    sys.argv[:] = program.argv
    sys.path[0] = program.path_entry
    exec(program.code, main.__dict__)


def script_traceback(traceback: TracebackType | None, code: CodeType | None) -> TracebackType | None:
    """Return the traceback that the script alone would show, without frames of Stepscope."""
    frames: list[TracebackType] = []
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            frames.clear()
        if not traceback.tb_frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
            frames.append(traceback)
        traceback = traceback.tb_next
    result = None
    for entry in reversed(frames):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def raise_as_script(error: BaseException, code: CodeType) -> NoReturn:
    """Raise `error` so that Python prints the script's own traceback and exits with its code."""
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        value.__traceback__ = script_traceback(traceback, code)
        link = value.__cause__ or value.__context__
        while link is not None:
            link.__traceback__ = script_traceback(link.__traceback__, None)
            link = link.__cause__ or link.__context__
        previous(kind, value, value.__traceback__)

    sys.excepthook = excepthook
    raise error


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls `before` and `after` around the first import of one module, then removes itself."""

    def __init__(self, name: str, after: Callable[[], None], before: Callable[[], None] | None = None) -> None:
        self._name, self._after, self._before = name, after, before
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            if self._before is not None:
                self._before()
            load(module)
            self._after()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

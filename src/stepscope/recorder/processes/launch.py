"""Runs a script the way Python would.

This module must not import torch: what the script sets before importing it (CUDA_VISIBLE_DEVICES, OMP_NUM_THREADS,
the allocator configuration) must still take effect.
"""

import atexit
import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, NoReturn

from stepscope.recorder.wall import guarded

PACKAGE_FOLDER = str(Path(__file__).resolve().parents[2])


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


class NotPython(Exception):
    """A script that Python cannot compile."""


def load_script(script: str, arguments: Sequence[str]) -> Program:
    """Return a compiled script: a file, a folder or zip file with `__main__.py`, or a command such as `torchrun`.

    Raises ValueError with a one-line message if there is none, NotPython if it cannot be compiled.
    """
    path = Path(script)
    if not path.exists():
        path = _command(script)
        script = str(path)
    elif pkgutil.get_importer(os.path.abspath(script)) is not None:  # noqa: PTH100  as Python does
        return _load_container(script, arguments)
    file = os.path.abspath(script)  # noqa: PTH100  as Python does: absolute, links not resolved
    try:
        # Reads the file as bytes, so that the script's encoding declaration applies.
        with io.open_code(str(path.resolve())) as stream:
            code = compile(stream.read(), file, "exec", dont_inherit=True)
    except OSError as error:
        raise ValueError(f"cannot read {script}: {error.strerror}. `ls -ld {script}` says who can") from None
    except (SyntaxError, ValueError):
        raise NotPython from None
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    return Program(path.stem, file, code, None, loader, [script, *arguments], str(path.resolve().parent))


def _load_container(script: str, arguments: Sequence[str]) -> Program:
    """Return the `__main__` module of a folder or a zip file, as Python runs it."""
    path = os.path.abspath(script)  # noqa: PTH100  as Python does
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is None or spec.loader is None or spec.origin is None:
        raise ValueError(f"{script} has no __main__.py: name a Python script, or use -m for a module")
    try:
        code = spec.loader.get_code("__main__")  # type: ignore[attr-defined]  # a loader of source
    except (SyntaxError, ValueError):
        raise NotPython from None
    return Program(Path(path).stem, spec.origin, code, spec, spec.loader, [script, *arguments], path)


def _command(name: str) -> Path:
    """Return the Python script of a command such as `torchrun`: on PATH, else in this Python's environment."""
    beside = Path(sys.executable).parent / name
    found = [Path(path) for path in (shutil.which(name), shutil.which(str(beside))) if path]
    if os.sep in name or not found:
        import difflib
        import shlex

        near = difflib.get_close_matches(name, [str(path) for path in Path(name).parent.glob("*.py")], 1, 0.75)
        instead = "-m torch.distributed.run …" if name == "torchrun" else "path/to/train.py"
        if near:
            raise ValueError(f"{name} not found. Did you mean `stepscope run {shlex.quote(near[0])}`?")
        raise ValueError(f"{name} not found. Run `stepscope run {instead}`")
    pythons, ours = [_interpreter(path) for path in found], Path(sys.executable).parent.resolve()
    for path, python in zip(found, pythons):
        if python is not None and (os.sep not in python or Path(python).parent.resolve() == ours):
            return path  # a bare name is the one on PATH
    if pythons[0] is None:
        raise ValueError(f"{found[0]} is not a Python script: name the script that it starts")
    raise ValueError(f"{found[0]} belongs to {pythons[0]}: install Stepscope there and run it with that Python")


def _interpreter(path: Path) -> str | None:
    """Return the Python that the first lines of a script name; None if they name another program."""
    try:
        with path.open("rb") as stream:
            lines = stream.read(4096).decode(errors="replace").split("\n")
    except OSError:
        return None
    if not lines[0].startswith("#!"):
        return None
    # For a long path, pip writes #!/bin/sh, and the path in the second line.
    line = lines[1] if lines[0].startswith("#!/bin/sh") and len(lines) > 1 else lines[0][2:]
    words = [word for word in line.replace('"', " ").split() if Path(word).name.startswith("python")]
    return words[0] if words else None


def run_in_plain_python(words: Sequence[str]) -> NoReturn:
    """Replace this process with Python alone: a script that cannot be compiled fails in Python's own words."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # private
    os.execv(sys.executable, [sys.executable, *flags, *words])


def load_module(module: str, arguments: Sequence[str]) -> Program:
    """Return a compiled module for `-m`. Raises ValueError if it is not found."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        _, spec, code = runpy._get_module_details(module)  # type: ignore[attr-defined]  # private
    except ImportError as error:
        where = f"the folder that contains {module.partition('.')[0]}"
        raise ValueError(f"cannot run the module: {error}. Run `stepscope run -m {module}` in {where}") from None
    except (SyntaxError, ValueError):
        raise NotPython from None
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
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__cached__"] = program.spec.cached if program.spec else None
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    # It stays in place after the script ends: atexit functions and threads still look it up.
    sys.modules["__main__"] = main
    sys.argv[:] = program.argv
    _give_way(program.path_entry)
    sys.path[0] = program.path_entry
    exec(program.code, main.__dict__)


_hidden: dict[str, types.ModuleType] = {}  # modules of Python that the script's folder has too, and their parts


@guarded
def _give_way(folder: str) -> None:
    """Forget modules of Python that modules beside the script hide: it imports its own, as it does alone."""
    try:
        beside = {name.partition(".")[0] for name in os.listdir(folder)}  # noqa: PTH208  (names only)
    except OSError:
        return  # a zip file
    path = sys.path
    try:
        here = {os.path.abspath(entry) for entry in (folder, "")}  # noqa: PTH100  as Python does
        sys.path = [entry for entry in path if os.path.abspath(entry) not in here]  # noqa: PTH100  as Python does
        for name in beside & sys.stdlib_module_names - {"encodings", "__main__"}:
            if getattr(importlib.import_module(name).__spec__, "origin", None) not in ("built-in", "frozen"):
                _hidden.update(_loaded({name}))
    finally:
        sys.path = path
    for name in _hidden:
        del sys.modules[name]


def _loaded(names: Container[str]) -> dict[str, types.ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}


@contextmanager
def own_imports() -> Iterator[None]:
    """Import what we need ourselves: Python's own modules, not those beside the script that hide them."""
    names = {name.partition(".")[0] for name in _hidden}
    theirs = _loaded(names)
    for name in theirs:
        del sys.modules[name]
    sys.modules.update(_hidden)
    try:
        yield
    finally:
        _hidden.update(_loaded(names))
        for name in _loaded(names):
            del sys.modules[name]
        sys.modules.update(theirs)


def script_traceback(traceback: TracebackType | None, code: CodeType | None, is_import: bool) -> TracebackType | None:
    """Return the traceback that the script alone would show, without frames of Stepscope.

    Python leaves out the frames of an import that ran a module, or of any import that failed, unless ours are among
    them.
    """
    frames: list[TracebackType] = []
    importing: list[TracebackType] = []
    has_run = is_import
    while traceback is not None:
        found = traceback.tb_frame.f_code
        if found is code:
            frames.clear()
        if found.co_filename.startswith((PACKAGE_FOLDER, "<frozen importlib")):
            is_ours = found.co_filename.startswith(PACKAGE_FOLDER)
            has_run |= is_ours or found.co_name == "_call_with_frames_removed"
            importing += [] if is_ours else [traceback]
        else:
            frames += [*([] if has_run else importing), traceback]
            importing, has_run = [], is_import
        traceback = traceback.tb_next
    frames += [] if has_run else importing
    result = None
    for entry in reversed(frames):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def await_threads() -> None:
    """Wait for the script's threads, as Python does before it ends: they may train.

    Workers of thread pools end only when Python tells them to, later. So may others if anything else asked for that.
    """
    pools = sys.modules.get("concurrent.futures.thread")
    if len(getattr(threading, "_threading_atexits", ())) > (pools is not None):
        return
    workers = getattr(pools, "_threads_queues", ())
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon and thread not in workers:
            thread.join()


def raise_as_script(error: BaseException, code: CodeType) -> NoReturn:
    """Raise `error` so that Python prints the script's own traceback and exits with its code."""
    try:
        hide_own_frames(code)
    except Exception:
        pass  # then ours are among them
    try:
        raise error
    finally:
        # Its traceback has this frame. A cycle would keep the script's variables alive when Python ends, and PyTorch
        # waits 5 s for each worker of a DataLoader that lives until then.
        del error


def leave_fork(error: BaseException | None, code: CodeType) -> NoReturn:
    """End a forked process as Python does, but without the destructors of C++.

    There Kineto, once a trace was taken, waits forever for a thread that a fork does not have.
    """
    exit_code = 0
    if isinstance(error, SystemExit):
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, (int, type(None))):
            print(error.code, file=sys.stderr)
    elif error is not None:
        remove_own_frames(error, code)
        sys.excepthook(type(error), error, error.__traceback__)
        exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # private
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code & 0xFF)


def hide_own_frames(code: CodeType | None) -> None:
    """Let Python print an uncaught exception without frames of Stepscope, and from the script's `code` on."""
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        value.__traceback__ = traceback
        try:
            remove_own_frames(value, code)
        except Exception:
            pass  # then ours are among them
        previous(kind, value, value.__traceback__)

    sys.excepthook = excepthook


def remove_own_frames(error: BaseException, code: CodeType | None) -> None:
    """Remove Stepscope's frames from the tracebacks of an exception and of those it came from."""
    error.__traceback__ = script_traceback(error.__traceback__, code, isinstance(error, ImportError))
    seen, link = {id(error)}, error.__cause__ or error.__context__
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = script_traceback(link.__traceback__, None, isinstance(link, ImportError))
        link = link.__cause__ or link.__context__

"""The start of a child process: waits for torch, and passes the recording on to the children of this one.

Loads nothing else of Stepscope before torch is imported, and leaves the script's `os.environ` alone. Children
without an environment of their own inherit the C library's, which `os.putenv` changes and `os.environ` does not show.
Launchers such as torchrun's build an environment for each child: there, `subprocess.Popen` adds to it.
"""

from __future__ import annotations

import functools
import os
import sys

from stepscope.recorder.processes import BOOTSTRAP_FOLDER, VARIABLE
from stepscope.recorder.processes.imports import AfterImport

TYPE_CHECKING = False
if TYPE_CHECKING:  # as in `typing`, which takes milliseconds to import
    from collections.abc import Mapping
    from typing import Any

POSITION_OF_ENV = 10  # among the arguments of Popen, if all are passed by position

_options: str | None = None
_is_patched = False


def pass_on(options: str) -> None:
    """Let every child process started from now on find `options`."""
    global _options
    _options = options
    _set_for_children()
    if "subprocess" in sys.modules:
        _patch_popen()
    else:
        AfterImport({"subprocess": _patch_popen})


def withdraw() -> None:
    """Start child processes as without Stepscope again."""
    global _options
    _options = None
    for name in (VARIABLE, "PYTHONPATH"):
        if name in os.environ:
            os.putenv(name, os.environ[name])
        else:
            os.unsetenv(name)


def with_options(environment: Mapping[str, str], options: str) -> dict[str, str]:
    """Return a child's environment with the options and the folder that reads them.

    >>> found = with_options({"PYTHONPATH": "a:b", "HOME": "/root"}, "{}")
    >>> found["PYTHONPATH"].removeprefix(BOOTSTRAP_FOLDER), found["HOME"], found[VARIABLE]
    (':a:b', '/root', '{}')
    """
    paths = [path for path in (BOOTSTRAP_FOLDER, environment.get("PYTHONPATH")) if path]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: options}


def _set_for_children() -> None:
    if _options is not None:
        found = with_options({"PYTHONPATH": os.environ.get("PYTHONPATH", "")}, _options)
        for name, value in found.items():
            os.putenv(name, value)


def _patch_popen() -> None:
    global _is_patched
    if _is_patched:
        return
    _is_patched = True
    import subprocess

    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        if _options is not None:
            try:
                if kwargs.get("env") is not None:
                    kwargs["env"] = with_options(kwargs["env"], _options)
                elif len(args) > POSITION_OF_ENV and args[POSITION_OF_ENV] is not None:
                    env = with_options(args[POSITION_OF_ENV], _options)
                    args = (*args[:POSITION_OF_ENV], env, *args[POSITION_OF_ENV + 1 :])
                else:
                    _set_for_children()  # again: the script may have set PYTHONPATH
            except Exception:
                pass  # an environment that Popen itself will refuse, or one of bytes
        original(self, *args, **kwargs)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]  # replaced on purpose


_waiting: list[AfterImport] = []


def start(options: str) -> None:
    """Measure this process if it trains; `options` is `Options.to_json()` of the process that was started first."""

    def torch_is_here() -> None:
        from stepscope.recorder import wall

        wall.raise_up()
        from stepscope.recorder.processes.child import begin
        from stepscope.recorder.processes.options import Options

        begin(Options.from_json(options))

    pass_on(options)
    if "torch" in sys.modules:
        torch_is_here()
    else:
        _waiting.append(AfterImport({"torch": torch_is_here}))


def cancel() -> None:
    """Leave this process alone: it is a `stepscope run` of its own, started under another one."""
    for finder in list(sys.meta_path):
        if finder in _waiting or type(finder).__module__ == "sitecustomize":
            sys.meta_path.remove(finder)
    if (child := sys.modules.get("stepscope.recorder.processes.child")) is not None:
        child.cancel()

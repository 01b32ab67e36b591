"""Runs commands in forks of a process that has imported torch, which takes seconds and is the same for all.

    python forks.py MODULES… < requests > answers

A request is a line of JSON: `words` (as after `python`: a script, or `-m` and a module, and its arguments), `folder`
(the working directory, where `stdout` and `stderr` are written) and `environment`. The answer is its exit code.
`Forks` is the other end.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 120
SOURCE_FOLDER = Path(__file__).parents[1] / "src"
# What `stepscope run` imports until it records, a third of its time here; the card's modules come when a script ends.
RECORDER = (
    "stepscope.cli.run",
    "stepscope.api.recording",
    "stepscope.recorder.processes.child",
    "stepscope.recorder.session",
)


def settings() -> dict[str, str]:
    """Return the environment of every script that a test runs."""
    paths = [str(SOURCE_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # a forked child that trains would wait for threads it does not have
    }


class Forks:
    """A process that has torch, and runs one command after the other in forks of itself.

    `modules` are imported there before.
    """

    def __init__(self, settings: Mapping[str, str], *modules: str) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, words: list[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
        """Run `python WORDS…` in `folder`. Return its exit code, standard output and standard error."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"words": words, "folder": str(folder), "environment": dict(environment)}
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            exit_code = int(self._process.stdout.readline())
        stdout, stderr = ((folder / name).read_text() for name in ("stdout", "stderr"))
        return exit_code, stdout, stderr

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    """Answer requests until standard input ends."""
    import torch._dynamo
    import torch.distributions
    import torch.func
    import torch.profiler
    import torch.utils.data  # noqa: F401

    for module in sys.argv[1:]:
        importlib.import_module(module)
    # A recorder looks at every object, and a collection touches every object: not at those of torch in each fork.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            _run(request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(request: dict[str, Any]) -> None:
    """Do what Python does from start to exit. Does not return."""
    signal.alarm(TIMEOUT_S)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    _replace(0, os.open(os.devnull, os.O_RDONLY))
    for number, name in ((1, "stdout"), (2, "stderr")):
        _replace(number, os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
        setattr(sys, f"__{name}__", getattr(sys, name))
    exit_code = 0
    try:
        _run_words(request["words"])
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        frames = error.__traceback__
        while frames and frames.tb_next and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        exit_code = 1
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code)


def _replace(number: int, other: int) -> None:
    os.dup2(other, number)
    os.close(other)


def _run_words(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.fspath(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.fspath(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()

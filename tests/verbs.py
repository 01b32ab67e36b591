"""A verb called in this process: what a fresh one would print and return, without a second of start-up."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from stepscope.cli.main import main


def run_verb(
    *words: object, cwd: Path | str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `stepscope WORDS`; `env` is added to this process's variables while it runs."""
    arguments = [str(word) for word in words]
    out, err = io.StringIO(), io.StringIO()
    with _surroundings(cwd, env or {}), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    return subprocess.CompletedProcess(["stepscope", *arguments], code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _surroundings(cwd: Path | str | None, env: Mapping[str, str]) -> Iterator[None]:
    before, folder = dict(os.environ), Path.cwd()
    os.environ.pop("COLUMNS", None)
    os.environ.update(env)
    try:
        if cwd is not None:
            os.chdir(cwd)
        yield
    finally:
        gc.enable()  # a verb that ends with its process may switch it off
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


def answers(verb: str, path: Path) -> str:
    """What a verb says: an answer in which no check failed, or one sentence."""
    done = run_verb(*verb.replace("{}", str(path)).split())

    assert done.returncode in (0, 2, 4) and "check failed" not in done.stdout
    assert done.returncode != 2 or len(done.stderr.splitlines()) == 1
    return done.stdout + done.stderr

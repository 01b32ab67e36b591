"""Scripts run as a user runs them: a file, a process of its own, and the recording it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from forks import Forks, settings
from stepscope import read
from stepscope.trace.recording import Recording, read_recording
from verbs import run_verb

TIMEOUT_S = 240
# Eight steps are in a window: 2 warm-up, 3 clean, 1 that warms the profiler up, 1 traced, 1 for memory and FLOPs.
SHORT = ("--warmup", "2", "--clean", "3", "--trace", "1")

# What most scripts here train: `from tiny import *`.
TINY = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))

def batch():
    return torch.randint(16, (2, 5))

def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train_step():
    loss_of(model, batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Run:
    """What a finished process said, and where its recording is."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path

    @cached_property
    def recording(self) -> Recording:
        return read_recording(self.folder)

    @cached_property
    def card(self) -> dict[str, Any]:
        return read(self.folder).to_json()

    @property
    def steps(self) -> list[int]:
        return [sample.step for sample in self.recording.samples]

    def each(self, field: str) -> list[Any]:
        """One field of every sample."""
        return [getattr(sample, field) for sample in self.recording.samples]

    def error_line(self) -> str:
        """The one line of a user's mistake; fails when it was said in any other way."""
        assert self.exit_code == 2, self.stderr
        assert "Traceback" not in self.stderr
        assert len(self.stderr.splitlines()) == 1, self.stderr
        assert self.stdout == ""
        return self.stderr.strip()


class Script:
    """A script in a folder of its own, run from there by its relative name."""

    def __init__(self, folder: Path, source: str) -> None:
        folder.mkdir()
        (folder / "tiny.py").write_text(TINY)
        self.folder = folder
        self.path = folder / "train.py"
        self.path.write_text(textwrap.dedent(source))

    def python(self, *words: object, **variables: str) -> Run:
        """`python WORDS…` in the script's folder."""
        with self.popen(*words, **variables) as process:
            try:
                stdout, stderr = process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return Run(process.returncode, stdout, stderr, self.folder / "recording")

    def popen(self, *words: object, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=self.folder,
            env=os.environ | settings() | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def bare(self, *arguments: object, **variables: str) -> Run:
        """The script without Stepscope."""
        return self.python(self.path.name, *arguments, **variables)

    def stepscope(self, *words: object, **variables: str) -> Run:
        """`stepscope WORDS…`."""
        return self.python("-m", "stepscope", *words, **variables)

    def run(self, *arguments: object, options: tuple[object, ...] = SHORT, **variables: str) -> Run:
        """`stepscope run -o recording OPTIONS… train.py ARGUMENTS…`."""
        return self.stepscope("run", "-o", "recording", *options, self.path.name, *arguments, **variables)

    def run_in_fork(self, forks: Forks, *options: object, arguments: tuple[str, ...] = ()) -> Run:
        """The same in a fork of a process that has torch: a second instead of several."""
        words = ["-m", "stepscope", "run", "-o", "recording", *map(str, options), self.path.name, *arguments]
        return self.python_in_fork(forks, *words)

    def python_in_fork(self, forks: Forks, *words: str) -> Run:
        """`python WORDS…` in a fork of a process that has torch."""
        return Run(*forks.run(list(words), self.folder, {}), self.folder / "recording")

    def verb(self, *words: object) -> Run:
        """`stepscope WORDS…` in this process, in the script's folder: for what only reads."""
        done = run_verb(*words, cwd=self.folder)
        return Run(done.returncode, done.stdout, done.stderr, self.folder / "recording")

    def both(self, *arguments: object, **variables: str) -> tuple[Run, Run]:
        """The script without Stepscope and, at the same time, under a Stepscope that says nothing."""
        with ThreadPoolExecutor(2) as pool:
            bare = pool.submit(self.bare, *arguments, **variables)
            run = pool.submit(self.run, *arguments, options=(*SHORT, "--quiet"), **variables)
            return bare.result(), run.result()


class Lab:
    """Makes scripts, and runs many of them in forks of a process that has torch."""

    def __init__(self, folder: Path, forks: Forks) -> None:
        self._folder = folder
        self._forks = forks
        self._numbers = count()

    def script(self, source: str = "") -> Script:
        return Script(self._folder / str(next(self._numbers)), source)

    def start(self, sources: Mapping[str, str], options: Mapping[str, tuple[object, ...]]) -> Runs:
        """Return a run of each script, made when it is asked for: SHORT windows where `options` has none."""
        return Runs(
            {
                name: partial(self.script(source).run_in_fork, self._forks, *options.get(name, SHORT))
                for name, source in sources.items()
            }
        )


class Runs:
    """Runs by name; the first to ask for one makes it."""

    def __init__(self, makers: Mapping[str, Callable[[], Run]]) -> None:
        self._makers = makers
        self._made: dict[str, Run] = {}

    def __getitem__(self, name: str) -> Run:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]


@pytest.fixture(scope="module")
def lab(tmp_path_factory, forks):
    return Lab(tmp_path_factory.mktemp("lab"), forks)


@pytest.fixture
def apply():
    """Makes fixes as STEPSCOPE_FIX names them, and takes them off at the end."""
    from stepscope.recorder.fixes.applied import AppliedFixes  # needs torch

    made = []

    def start(text):
        made.append(AppliedFixes(text))
        return made[-1]

    yield start
    for fixes in reversed(made):
        fixes.remove()

"""The code blocks of the README and the documentation, and a folder in which what they say can be done.

A block of commands is one without a language, or `console`, that begins with a program. A comment before a block says
why it cannot run on a computer without a GPU or a network; with a text in parentheses, only the lines with that text:

    <!-- not run: needs four machines -->
    <!-- not run (--full): takes hours on a GPU -->
"""

from __future__ import annotations

import pickle
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from dump_maker import calls, write
from memories import snapshot
from nsight_files import training_run

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "tests" / "traces" / "small_gemms.slow.json.gz"
# Programs that a block of commands may begin with. What is not ours is not run: servers, networks, other machines.
OURS = ("stepscope", "python", "pytest", "torchrun")
PROGRAMS = (*OURS, "pip", "git", "nsys", "ssh", "export", "for", "nvidia-smi", "sudo", "make")
_BLOCK = re.compile(r"(?:<!-- not run(?: \((?P<lines>.+?)\))?: (?P<reason>.+?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)  # fmt: skip # noqa: E501


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str
    not_run: str
    reason: str

    def is_run(self, line: str = "") -> bool:
        return not self.reason or (bool(self.not_run) and self.not_run not in line)

    @property
    def commands(self) -> list[str]:
        """Return the lines, or nothing where this is not a block of commands."""
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [word for word in lines[0].split() if not re.match(r"[A-Z_]+=", word)] if lines else []
        return [line for line in lines if line.strip()] if words and words[0] in PROGRAMS else []


def blocks() -> list[Block]:
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for each in _BLOCK.finditer(path.read_text(encoding="utf-8")):
            page, of = path.relative_to(ROOT).as_posix(), each.groupdict(default="")
            found.append(Block(page, of["language"], of["text"], of["lines"], of["reason"]))
    return found


def words_of(line: str) -> list[str]:
    """Return `stepscope` and its words from a line of a shell, or nothing."""
    words = shlex.split(line, comments=True)
    words = words[words.index("stepscope") :] if "stepscope" in words else []
    end = next((at for at, word in enumerate(words) if word in (">", "|", "&&")), len(words))
    return words[:end]


MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.mlp(x).relu()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(12)))

    def forward(self, x, targets=None):
        outputs = self.blocks(x)
        return outputs if targets is None else self.loss_fn(outputs, targets)

    def loss_fn(self, outputs, targets):
        return (outputs - targets).square().mean()


def build(batch: int = 6):
    return Model(), lambda: (torch.randn(batch, 16), torch.randn(batch, 16))
"""
SCRIPT = (
    MODEL
    + """

def main(argv=None):
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--from-checkpoint")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    model, batch = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    for step in range(40):
        loss = model(*batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
"""
)
TESTS = """
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train_step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# The names that the pages give to recordings.
RUNS = (
    "train-20260101-120000", "train", "baseline", "main", "mine", "main-1", "main-2", "mine-1", "mine-2", "h100",
    "h200", "nanogpt", "ddp", "pilot", "fixed",
)  # fmt: skip


def add_windows(folder: Path, recording: Path) -> None:
    """Put windows into two recordings, as `stepscope trigger` does while a job runs."""
    for name in ("window1", "window2"):
        for run in ("train", "train-20260101-120000"):
            shutil.copytree(recording, folder / "runs" / run / name, dirs_exist_ok=True)


def furnish(folder: Path, recording: Path) -> Path:
    """Put into `folder` what the pages name, with copies of one recording."""
    for name in RUNS:
        shutil.copytree(recording, folder / "runs" / name)
    add_windows(folder, recording)
    for host in range(2):
        shutil.copytree(recording, folder / f"node{host}" / "train-my-job")
    for name in ("bench-20260101-120000", "sizes"):
        shutil.copytree(ROOT / "tests" / "compatibility" / "sweep-1", folder / "runs" / name)
    shutil.copy(folder / "runs" / "sizes" / "results.jsonl", folder)
    shutil.copy(TRACE, folder / "trace.json.gz")
    (folder / "traces").mkdir()
    for rank in range(4):
        shutil.copy(TRACE, folder / "traces" / f"rank{rank}.json.gz")
    (folder / "folder").mkdir()
    shutil.copy(TRACE, folder / "folder")
    write(folder / "dumps", {0: calls("all_reduce", "all_gather"), 1: calls("all_reduce")})
    training_run().write(folder)
    (folder / "snapshot.pickle").write_bytes(pickle.dumps(snapshot()))
    (folder / "execution_trace.json").write_text('{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}')
    for name in ("train.py", "model.py"):
        (folder / name).write_text(SCRIPT)
    tests = [block.text for block in blocks() if block.page == "docs/testing.md" and block.language == "python"]
    (folder / "test_step.py").write_text("\n\n".join([TESTS, *tests]))
    (folder / "my-project").mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder

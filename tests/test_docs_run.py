"""What the README and the documentation say to type works as typed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest

from docs_blocks import OURS, ROOT, SCRIPT, add_windows, blocks, furnish, words_of
from forks import settings
from stepscope.cli.main import _find, verb_parser
from verbs import run_verb

BLOCKS = blocks()
LINES = [(block, line) for block in BLOCKS for line in block.commands]
RUN_HERE = [
    (block, line)
    for block, line in LINES
    if block.is_run(line) and set(OURS) & set(line.split()) and not line.startswith("pip ")
]
READ = ("show", "analyze", "diagnose", "compare", "report")
# The pages that a newcomer begins with; the others are marked long.
FIRST = ("README.md", "docs/tutorial.md")
# compare: 3, a gate failed; 4, the figures are too noisy for it.
ANSWERED = (0, 3, 4)
# The fixture's gate, which fails pytest where the machine got slower since the baseline.
WORSE = "The step is worse than its baseline"
# Examples of docstrings, and of integrations, have tests of their own.
TESTED_ELSEWHERE = ("docs/api.md", "docs/integrations.md")
PROGRAMS = {
    "stepscope": "from stepscope.cli.main import main",
    "pytest": "from pytest import main",
    "torchrun": "from torch.distributed.run import main",
    "python": "import os\n\ndef main(): os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
}


MEASURED = [words_of(line) for block, line in LINES if block.page == "README.md" and "stepscope run" in line]


@pytest.fixture(scope="module")
def recording(forks, tmp_path_factory):
    """The README's own command, on a script of that name."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "train.py").write_text(SCRIPT)
    words, _ = MEASURED
    code, _, error = forks.run(["-m", *words], folder, {})
    assert code == 0, error
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture(scope="module")
def place(recording, tmp_path_factory):
    return furnish(tmp_path_factory.mktemp("place"), recording)


def python_blocks(folder: Path, compiled: bool) -> Path:
    """Write the blocks into a file in `folder`, and make it what they expect. Return the file."""
    assert run_verb("export", "trace.json.gz", "parquet", "-o", "tables/", "--force", cwd=folder).returncode == 0
    shutil.rmtree(folder / "runs" / "mine", ignore_errors=True)
    chosen = [
        (block.page, block.text)
        for block in BLOCKS
        if block.language == "python" and block.is_run() and block.page not in TESTED_ELSEWHERE
        if compiled or not re.search("compile|flex_attention", block.text)
    ]
    assert len(chosen) > 50
    path = folder / "blocks.json"
    path.write_text(json.dumps(chosen))
    return path


def test_every_command_is_understood():
    for _, line in LINES:
        if words := words_of(line)[1:]:
            name, module, rest = _find(words)
            with (
                contextlib.suppress(SystemExit) if "--tables" in rest else contextlib.nullcontext()
            ):  # prints, and ends
                verb_parser(name, module).parse_args(rest)
    assert len(LINES) > 120


def test_what_is_installed_exists():
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    named = {name for _, line in LINES for name in re.findall(r"stepscope\[(\w+)\]", line)}
    assert named and named <= extras


def test_few_blocks_cannot_run_here():
    assert len([block for block in BLOCKS if block.reason]) <= 20


def test_what_a_newcomer_reads(place, monkeypatch):
    opened, done, failed = [], set(), []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.chdir(place)
    for block, line in RUN_HERE:
        words = words_of(line)[1:]
        if not block.page.startswith(FIRST) or not words or words[0] not in READ or tuple(words) in done:
            continue
        done.add(tuple(words))
        words = [name for word in words for name in (sorted(map(str, Path().glob(word))) or [word])]
        if (ended := run_verb(*words)).returncode not in ANSWERED:
            failed.append(f"{block.page}: {line}: {ended.stderr}")

    assert not failed and len(done) >= 3
    assert opened


@pytest.mark.long
def test_the_readme_measures_ranks(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words = [sys.executable, "-m", *MEASURED[1]]

    done = subprocess.run(words, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True)

    assert done.returncode == 0 and "A step takes" in done.stdout, done.stderr


def test_the_python_of_every_page(place, forks):
    script = ROOT / "tests" / "docs_fragments.py"
    code, said, error = forks.run([str(script), str(python_blocks(place, compiled=False))], place, {})

    assert code == 0 and "failed: " not in said, said + error


@pytest.mark.long
def test_the_python_that_compiles(place):
    words = [sys.executable, ROOT / "tests" / "docs_fragments.py", python_blocks(place, compiled=True)]
    done = subprocess.run(words, cwd=place, env=os.environ | settings(), capture_output=True, text=True)

    assert done.returncode == 0 and "failed: " not in done.stdout, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", sorted({block.page for block, _ in RUN_HERE}))
def test_every_command_of_a_page(page, recording, tmp_path):
    folder = furnish(tmp_path / "place", recording)
    environment = _programs(tmp_path / "bin", folder)
    made: set[str] = set()
    for block, line in RUN_HERE:
        if block.page != page:
            continue
        words = line.split()
        # What the page writes itself is not there before, unless it goes on with it.
        for name in [words[at + 1] for at, word in enumerate(words[:-1]) if word == "-o"]:
            if name not in made and "--resume" not in words:
                shutil.rmtree(folder / name, ignore_errors=True)
            made.add(name)
        if "window" in line:  # which a --resume before takes anew
            add_windows(folder, recording)
        # At a terminal, it asks whether to run what a recording names.
        typed = line if "--yes" in words else line.replace("stepscope verify runs/", "stepscope verify --yes runs/")
        done = subprocess.run(["bash", "-c", typed], cwd=folder, env=environment, capture_output=True, text=True)
        print(line, done.returncode, done.stdout[-2000:], done.stderr[-1000:], sep="\n")
        assert done.returncode in ANSWERED or WORSE in done.stdout, line


def _programs(folder: Path, home: Path) -> dict[str, str]:
    """Put our programs on the path, and make `home` a repository with two branches. Return the environment."""
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!{sys.executable}\nimport sys\n{text}\nsys.exit(main())\n")
        (folder / name).chmod(0o755)
    for words in ("init -qb main", "add train.py", "commit -qm first", "branch feature"):
        subprocess.run(
            ["git", "-c", "user.name=me", "-c", "user.email=me@example.org", *words.split()], cwd=home, check=True
        )
    return os.environ | settings() | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": str(home), "BROWSER": "true",
        "WANDB_MODE": "offline", "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }  # fmt: skip

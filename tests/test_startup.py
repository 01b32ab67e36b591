"""What starting costs: which modules each way in does not import, and that the face of the package holds."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from handmade import cpu_recording
from parametrized import parametrized
from stepscope.cli.main import VERBS
from stepscope.version import __version__
from verbs import run_verb

HEAVY = ("torch", "numpy", "polars", "matplotlib", "pandas", "rich", "multiprocessing")

# The last line of standard error is what was imported, whatever the command printed or raised.
TELL = """
import sys
try:
    {action}
finally:
    import json
    print(json.dumps([m for m in {heavy!r} if m in sys.modules]), file=sys.stderr)
"""
COMMAND = "from stepscope.cli.main import main; sys.argv = ['stepscope', *{words!r}]; sys.exit(main())"
MODULE = "import runpy; sys.argv[1:] = {words!r}; runpy.run_module('stepscope', None, '__main__', True)"


def run(action: str, cwd=None) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    program = TELL.format(action=action, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=cwd)
    return done, json.loads(done.stderr.strip().splitlines()[-1])


def stepscope(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "stepscope", *words], capture_output=True, text=True)


@parametrized(
    "action",
    [
        COMMAND.format(words=["--help"]),
        COMMAND.format(words=["--version"]),
        MODULE.format(words=["--help"]),
        COMMAND.format(words=["run", "--help"]),
        COMMAND.format(words=["show", "--help"]),
        COMMAND.format(words=["doctor", "--help"]),
        COMMAND.format(words=["analyze", "--sql", "--help"]),
        COMMAND.format(words=["verify", "--help"]),
        COMMAND.format(words=["list", "fixes"]),
        COMMAND.format(words=["show", "run"]),
        COMMAND.format(words=["show", "run", "--json"]),
        COMMAND.format(words=["watch", "run", "--once"]),
        "import stepscope",
        "import stepscope; stepscope.step()",
        "import stepscope\n    with stepscope.phase('data'): pass",
        "import stepscope; str(stepscope.read('run'))",
        "import stepscope; stepscope.record",
    ],
    quick=9,
)
def test_nothing_heavy_is_imported(action, tmp_path):
    cpu_recording(tmp_path / "run")

    done, heavy = run(action, cwd=tmp_path)

    assert heavy == []
    assert done.returncode == 0, done.stderr


def test_record_is_callable_before_and_after_its_modules_are_imported():
    done, heavy = run(
        "import stepscope; a = stepscope.record('x')\n"
        "    import stepscope.recorder.clock; b = stepscope.record('x')\n"
        "    from stepscope import record; c = record('x')\n"
        "    print(type(a) is type(b) is type(c), type(a).__name__, stepscope.recorder.clock.__name__)"
    )

    assert done.stdout.split() == ["True", "Recorder", "stepscope.recorder.clock"], done.stderr
    assert "torch" in heavy, "the test above can see it"


def test_a_name_that_is_not_there_is_an_attribute_error():
    done, _ = run("import stepscope; print(hasattr(stepscope, 'nothing'), sorted(stepscope.__all__))")

    assert done.stdout.startswith("False [") and "'bench'" in done.stdout


def test_the_version_is_one():
    printed = stepscope("--version")

    assert printed.stdout == f"stepscope {__version__}\n"
    assert importlib.metadata.version("stepscope") == __version__
    assert importlib.import_module("stepscope").__version__ == __version__


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_one_module_whose_docstring_is_its_help(verb):
    module = importlib.import_module(f"stepscope.cli.{verb.replace('-', '_')}")
    shown = run_verb(verb, "--help")

    assert callable(module.add_arguments) and callable(module.main)
    assert module.__doc__ and module.__doc__.strip() in shown.stdout
    assert shown.returncode == 0


def test_help_names_every_verb_with_its_line():
    shown = stepscope("--help").stdout

    assert all(verb in shown and text in shown for verb, text in VERBS.items())


def test_an_unknown_verb_is_an_error_that_names_the_right_ones():
    done = stepscope("runn", "train.py")

    assert done.returncode == 2 and done.stdout == ""
    assert "runn" in done.stderr and "'run'" in done.stderr and "stepscope --help" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_arguments_is_help_and_an_error():
    done = stepscope()

    assert done.returncode == 2
    assert done.stdout == stepscope("--help").stdout


def test_an_unknown_option_of_a_verb_is_an_error():
    done = stepscope("show", "somewhere", "--jsn")

    assert done.returncode == 2 and "--jsn" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_recording_is_one_line():
    done = stepscope("show", "no-such-folder")

    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "stepscope show: no-such-folder does not exist. `stepscope run train.py` records a run\n",
    )


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            [
                "bench",
                "cs336",
                "--preset",
                "tiny",
                "--set",
                "seq_len=16",
                "--device",
                "cpu",
                "--steps",
                "1",
                "-o",
                "out",
            ],
            marks=pytest.mark.long,
        ),
        pytest.param(["plan", "cs336", "--preset", "tiny", "--device", "NVIDIA H200"], marks=pytest.mark.long),
        pytest.param(["list", "workloads"], marks=pytest.mark.long),
        ["doctor"],
    ],
    ids=lambda words: words[0],
)
def test_measuring_needs_torch_and_the_standard_library_only(words, tmp_path):
    """A training machine often has nothing else. `run` is held to this by tests/run."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules.update(dict.fromkeys(('polars', 'msgspec', 'plotly', 'matplotlib', 'pandas')))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *words], capture_output=True, text=True, cwd=tmp_path, env=environment
    )

    assert done.returncode == 0, done.stderr


LOOP = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(60):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.long
def test_a_recording_is_verified_where_traces_cannot_be_read(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules.update(dict.fromkeys(('polars', 'msgspec')))\n"
    )
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "after.py").write_text(LOOP + "\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    start = [sys.executable, "-m", "stepscope"]
    subprocess.run([*start, "run", "--quiet", "-o", "before", "train.py"], cwd=tmp_path, env=environment, check=True)

    verify = ["verify", "before", "--rounds", "1", "--fix", "launch_bound=after.py"]
    done = subprocess.run([*start, *verify], capture_output=True, text=True, cwd=tmp_path, env=environment)

    assert done.returncode == 4 and "polars is missing" in done.stdout, done.stderr

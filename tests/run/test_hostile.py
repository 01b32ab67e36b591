"""Hostile scripts do under Stepscope what they do alone: output, exit code and every file that they write."""

import pytest
from hostile_scripts import PRELUDE, SCRIPTS

OPTIONS = ("--quiet", "--warmup", "2", "--clean", "3", "--trace", "1")
# One of each kind in `make test`; the others, and these, in `make test-all`.
QUICK = (
    "a dispatch mode around the optimizer only",
    "a function mode",
    "parameters() raises",
    "arguments nested without end",
    "containers that raise",
    "warnings that are shown once",
    "closed descriptors",
    "models that are released",
    "a clone by hand",
    "an exception that causes itself",
)
OWN = {"recording", "stdout", "stderr"}


def _files(folder):
    found = [path for path in folder.rglob("*") if path.is_file() and not OWN & set(path.relative_to(folder).parts)]
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(found) if "__pycache__" not in path.parts
    }


def _compare(lab, forks, name):
    alone, watched = lab.script(PRELUDE + SCRIPTS[name]), lab.script(PRELUDE + SCRIPTS[name])
    code, stdout, _ = forks.run(["train.py"], alone.folder, {})
    run = watched.run_in_fork(forks, *OPTIONS)
    assert run.stdout == stdout
    assert run.exit_code == code
    assert _files(watched.folder) == _files(alone.folder)
    assert "stepscope/recorder" not in run.stderr.replace("\n", "")
    return run


@pytest.mark.parametrize("name", QUICK)
def test_a_hostile_script_does_what_it_does_alone(lab, forks, name):
    _compare(lab, forks, name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in QUICK])
def test_every_hostile_script_does_what_it_does_alone(lab, forks, name):
    _compare(lab, forks, name)


def test_what_ends_a_measurement_is_one_line(lab, forks):
    run = _compare(lab, forks, "parameters() raises")
    said = [line for line in run.stderr.splitlines() if "stepscope" in line]
    assert len(said) == 1 and "RuntimeError: mine" in said[0] and said[0].endswith("the script goes on")

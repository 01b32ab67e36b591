"""Hostile scripts do under Stepscope what they do alone: output, exit code and every file that they write."""

import re
import subprocess
import sys

import pytest
from hostile_scripts import PRELUDE, SCRIPTS

from parametrized import parametrized

OPTIONS = ("--quiet", "--warmup", "2", "--clean", "3", "--trace", "1")
# One of each kind in `make test`; the others, and these, in `make test-all`.
QUICK = (
    "a function mode",
    "arguments nested without end",
    "closed descriptors",
    "models that are released",
    "a clone by hand",
    "an exception that causes itself",
    "parameters() draws and prints",
    "parameters whose functions draw",
    "losses whose ops draw",
    "a thread that trains after the script",
)
ENDS = "a table of modules that raises"  # the measurement
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
    faults = re.sub(r"^\S+: \w*Warning: ", "", run.stderr, flags=re.MULTILINE)  # may name the wrong caller
    assert "stepscope/recorder" not in faults.replace("\n", "")
    return run


@parametrized("name", QUICK, quick=6)
def test_a_hostile_script_does_what_it_does_alone(lab, forks, name):
    _compare(lab, forks, name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in (*QUICK, ENDS)])
def test_every_hostile_script_does_what_it_does_alone(lab, forks, name):
    _compare(lab, forks, name)


def test_what_ends_a_measurement_is_one_line(lab, forks):
    run = _compare(lab, forks, ENDS)
    said = [line for line in run.stderr.splitlines() if "stepscope" in line]
    assert len(said) == 1 and "RuntimeError: mine" in said[0] and said[0].endswith("the script goes on")


def test_a_file_beside_the_script_that_nobody_imports_is_not_run(lab):
    """Its name is that of a module of Python, and the folder is on the path, as with `python -m`."""
    script = lab.script("import torch\nprint('done')\n")
    (script.folder / "wave.py").write_text("print('wave.py runs')\n")
    words = [sys.executable, "-m", "stepscope", "run", "--quiet", "-o", "run", "train.py"]
    done = subprocess.run(words, cwd=script.folder, capture_output=True, text=True, timeout=200)
    assert done.stdout == "done\n"


def test_an_error_of_a_finder_has_the_traceback_that_python_shows(lab):
    finder = "class Finder:\n    def find_spec(self, name, *_):\n        if name == 'zz': raise OSError(name)\n"
    script = lab.script(f"import sys\n{finder}sys.meta_path.insert(0, Finder())\nimport zz\n")
    alone = subprocess.run([sys.executable, "train.py"], cwd=script.folder, capture_output=True, text=True)
    words = [sys.executable, "-m", "stepscope", "run", "--quiet", "-o", "run", "train.py"]
    done = subprocess.run(words, cwd=script.folder, capture_output=True, text=True, timeout=200)
    assert "_find_and_load" in alone.stderr and done.stderr.splitlines()[-8:] == alone.stderr.splitlines()[-8:]


FORKS = """
import atexit, os, sys
from tiny import *
for _ in range(12):
    train_step()
for how in ("sys.exit(7)", "pass", "raise ValueError('mine')", "sys.exit('text')", "os._exit(3)"):
    sys.stdout.flush()
    if not (pid := os.fork()):
        atexit.register(print, "at exit", how)
        train_step()
        print("child", how)
        exec(how)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.long
def test_forks_of_a_traced_process_end_as_they_do_alone(lab):
    """Kineto, once it has run, lets no fork of the process end by itself."""
    alone, watched = lab.script(FORKS).both()
    assert (watched.exit_code, watched.stdout) == (alone.exit_code, alone.stdout) and alone.exit_code == 0
    assert (watched.folder / "trace" / "rank0.json.gz").exists()
    said = re.sub(r'"/.*/train.py"', "", watched.stderr)
    assert said == re.sub(r'"/.*/train.py"', "", alone.stderr)


@pytest.mark.long
def test_modules_beside_the_script_hide_those_of_python(lab):
    """GIVEN a module with the name of one that we have loaded, and one that we load at the end."""
    script = lab.script("import ipaddress, statistics\nprint(ipaddress.mine, statistics.mine)\nimport torch\n")
    for name in ("ipaddress", "statistics", "fractions", "zipapp"):
        (script.folder / f"{name}.py").write_text("print('imported', __name__)\nmine = 1\n")
    command = script.folder / "bin" / "stepscope"
    command.parent.mkdir()
    command.write_text("import sys\nfrom stepscope.cli.main import main\nsys.exit(main())\n")
    alone = script.bare()
    run = script.python(command, "run", "-o", "recording", "train.py")
    assert run.stdout.startswith(alone.stdout) and "imported" not in run.stdout.removeprefix(alone.stdout)
    assert run.exit_code == alone.exit_code
    assert run.recording.facts["exit_code"] == alone.exit_code

"""Mistakes of the first hour end in one line with what to type next."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from parametrized import parametrized

# Root reads everything, unless it gives that up.
PLAIN_USER = (
    ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.name == "posix" and not os.geteuid() else []
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text("print('nothing to measure')\n")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    return tmp_path


@parametrized(
    ("words", "following"),
    [
        ("run trian.py", "`stepscope run train.py`"),
        ("run other.py", "`stepscope run path/to/train.py`"),
        ("run -m nowhere.train", "`stepscope run -m nowhere.train` in the folder that contains nowhere"),
        ("diagnose", "`stepscope run train.py` or `stepscope demo`"),
        ("show runs/frist", "Did you mean runs/first?"),
        ("show elsewhere", "`stepscope run train.py` records a run"),
        ("study nano --quick --device cuda", "--device cpu runs on the CPU"),
        ("bench --check dtypes cs336 --preset tiny --device cuda", "`stepscope doctor`"),
    ],
    quick=4,
)
def test_a_mistake(words, following, folder, forks):
    code, said, error = forks.run(["-m", "stepscope", *words.split()], folder, {})

    assert code == 2 and said == ""
    assert following in error and len(error.splitlines()) == 1


@pytest.mark.skipif(bool(PLAIN_USER) and not shutil.which("setpriv"), reason="root can read everything")
def test_a_folder_that_may_not_be_read(folder):
    (folder / "runs").chmod(0)
    words = [*PLAIN_USER, sys.executable, "-m", "stepscope", "show", "runs/first"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    (folder / "runs").chmod(0o700)

    assert done.returncode == 2
    assert done.stderr == (
        "stepscope show: runs/first cannot be read: Permission denied. `ls -ld runs/first` says who can\n"
    )


def test_a_rank_that_nothing_launched(forks, folder):
    (folder / "ddp.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    code, said, _ = forks.run(["-m", "stepscope", "run", "-o", "runs/ddp", "ddp.py", "3"], folder, {})

    assert code == 1 and "expects to be launched" in " ".join(said.split())
    assert said.rstrip().endswith("stepscope run -m torch.distributed.run --nproc-per-node 2 ddp.py 3")


def test_a_script_without_a_step(forks, folder):
    code, said, _ = forks.run(["-m", "stepscope", "run", "train.py"], folder, {})

    assert code == 0
    assert "Call stepscope.step() at the end of your loop." in " ".join(said.split())
    assert said.rstrip().endswith("stepscope run train.py"), said

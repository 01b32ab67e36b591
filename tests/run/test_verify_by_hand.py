"""A change that was made by hand, in a copy of the script: `stepscope verify train.py --fix NAME=COPY.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.analysis.time.loop_time import periods
from stepscope.api.verification import _steps_to_time
from stepscope.cli.main import main
from stepscope.errors import UsageError
from stepscope.findings.fixes import parse_change
from stepscope.sweep.record_runs import Command, recorded_command
from stepscope.trace.recording import Recording, StepSample


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for name in ("train.py", "after.py", "config.py", "sub/other.py"):
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "same.py").write_text("# train.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "text", "changed"),
    [
        ("train.py --lr 3", "after.py", "after.py --lr 3"),
        ("train.py --lr 3", "after.py --lr 4", "after.py --lr 4"),
        ("train.py config.py", "after.py", "after.py config.py"),
        ("-m torch.distributed.run --nproc-per-node 2 train.py x", "after.py",
         "-m torch.distributed.run --nproc-per-node 2 after.py x"),
        ("-m torch.distributed.run --nproc-per-node 2 train.py x", "after.py --lr 3",
         "-m torch.distributed.run --nproc-per-node 2 after.py --lr 3"),
        ("-m torch.distributed.run --nproc-per-node 2 train.py x", "-m torch.distributed.run after.py",
         "-m torch.distributed.run after.py"),
        ("-m pack.train x", "after.py", "after.py x"),
        ("-m pack.train config.py", "after.py", "after.py config.py"),
        ("-m pack.train x", "-m pack.after", "-m pack.after x"),
        ("train.py x", "-m pack.after", "-m pack.after x"),
        ("train.py x", "'after.py' 'a b'", "after.py 'a b'"),
    ],
)  # fmt: skip
def test_the_copy_replaces_the_script_and_its_arguments_stay(folder, words, text, changed):
    assert Command(tuple(words.split()), folder).changed("it", text).text == changed


def test_the_copy_lies_where_the_user_is_and_runs_where_the_script_ran(folder, monkeypatch):
    monkeypatch.chdir(folder / "sub")
    changed = Command(("train.py",), folder).changed("it", "other.py")

    assert changed.words == (str(folder / "sub" / "other.py"),) and changed.folder == folder


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing.py", "nothing.py is not a file"),
        ("train.py", "that is the same script. .*git show HEAD:./train.py > before.py"),
        ("sub/../train.py", "the same script"),
        ("train.py x", "the same command"),
        ("same.py", "same.py has the same content as train.py"),
    ],
)
def test_a_copy_that_is_none_is_refused(folder, text, said):
    with pytest.raises(UsageError, match=said):
        Command(("train.py", "x"), folder).changed("it", text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a/b=after.py", "letters, digits"),
        ("=after.py", "letters, digits"),
        ("it='after.py", "No closing quotation"),
        ("it=-m", "name a module after -m"),
        ("it=after", "Unknown fix 'it'.*--fix it=COPY.py"),
    ],
)
def test_a_name_that_cannot_be_a_folder_is_refused(text, said):
    with pytest.raises(UsageError, match=said):
        parse_change(text)


def test_two_changes_of_one_name_are_refused(folder, capsys):
    assert main(["verify", "train.py", "--fix", "a=after.py", "--fix", "a=after.py x"]) == 2
    assert "two changes have the same name and script" in capsys.readouterr().err


def test_the_fix_of_a_finding_may_be_tried_in_both_ways():
    own, by_hand = (parse_change(text) for text in ("waiting_for_data", "waiting_for_data=after.py"))

    assert own.text != by_hand.text and own.finding == by_hand.finding == "waiting_for_data"


def test_ranks_are_run_again_by_what_launched_them(folder):
    launched = {"argv": ["/lib/run.py", "--nproc-per-node", "2", "train.py"], "folder": str(folder), "module": True,
                "program": "torch.distributed.run", "script": "train.py"}  # fmt: skip
    command = recorded_command(folder, {"command": launched, "environment": {"world_size": 2}})

    assert command.text == "-m torch.distributed.run --nproc-per-node 2 train.py"
    assert command.file == folder / "train.py"


SCRIPT = """
import time
from tiny import *

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(200):
    model(torch.ones(4, 8)).square().mean().backward()
    time.sleep(0.05)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.long
def test_a_copy_without_the_sleep_is_faster_and_learns_the_same(lab):
    script = lab.script(SCRIPT)
    (script.folder / "after.py").write_text(SCRIPT.replace("    time.sleep(0.05)\n", ""))

    words = ("train.py", "--fix", "no_sleep=after.py", "--rounds", 1, "--json")
    run = script.stepscope("verify", "--warmup", 5, "--clean", 5, *words)

    assert run.exit_code == 4, run.stderr  # one round has no verdict
    (found,) = json.loads(run.stdout)["fixes"]
    assert (found["fix"], found["script"], found["status"]) == ("no_sleep=after.py", "after.py", "too few samples")
    assert found["saving_ns"] > 30e6 and found["losses"]["difference_share"] == 0 and found["expected"] is None
    assert "stepscope verify: round 1 of 1: with no_sleep=after.py, about" in run.stderr


def looped(num_steps, kind, every):
    """A recording whose steps take 10 ms; before each of `every` one comes work of another kind."""
    samples = []
    for step in range(num_steps):
        host_ns = {kind: 5_000_000} if step and not step % every else {}
        window = "warmup" if step < 5 else "clean"
        samples.append(StepSample(step, window, 0, 10_000_000, host_ns, None, None, None, 1, 0, 0, None))
    return Recording(Path("x"), "finished", {}, tuple(samples), (), None, ())


def test_what_happens_between_steps_is_timed_twice_or_said_not_to_be():
    often, seldom = (looped(1000, "evaluation", every) for every in (30, 190))

    assert periods(often) == {"evaluation": 30} and _steps_to_time(often) == (60, [])
    assert "--clean 60" in _steps_to_time(often, 20)[1][0] and _steps_to_time(often, 80) == (80, [])
    num, (said,) = _steps_to_time(looped(4000, "checkpoint", 900))
    assert num == 20 and "checkpoint comes every 900 steps" in said and "--clean 1800" in said
    assert _steps_to_time(seldom)[0] == 380

"""The parts of measuring child processes, without starting any: options, ranks, folders, and the end of a run."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

import stepscope
from stepscope.recorder.files import is_running
from stepscope.recorder.processes import BOOTSTRAP_FOLDER, VARIABLE, rank
from stepscope.recorder.processes.bootstrap import sitecustomize
from stepscope.recorder.processes.ending import adopt, ending
from stepscope.recorder.processes.options import Options
from stepscope.recorder.processes.start import with_options
from stepscope.recorder.windows import Windows

torch = pytest.importorskip("torch")


def write(folder, status="finished", num_steps=0, source="optimizer", **facts):
    folder.mkdir(parents=True, exist_ok=True)
    steps = {"num_steps": num_steps, "source": source if num_steps else None}
    facts = {"schema_version": 1, "status": status, "pid": 2**22 + 1, "steps": steps, **facts}
    (folder / "recording.json").write_text(json.dumps(facts))
    (folder / "samples.jsonl").write_text(f"{folder.name}\n" * num_steps)


def facts_of(folder):
    return json.loads((folder / "recording.json").read_text())


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_counting_processes_takes_no_number_from_the_script():
    before = multiprocessing.Process().name
    counts = [ending(None)[1]["num_child_processes"] for _ in range(3)]

    assert multiprocessing.Process().name == f"Process-{int(before.removeprefix('Process-')) + 1}"
    assert counts == [int(before.removeprefix("Process-"))] * 3


def test_the_bootstrap_knows_what_the_package_knows():
    assert sitecustomize.VARIABLE == VARIABLE
    assert sitecustomize.FOLDER == BOOTSTRAP_FOLDER
    assert Path(sitecustomize.SOURCE_FOLDER).samefile(Path(stepscope.__file__).parents[1])


def test_options_survive_the_environment(tmp_path):
    windows = Windows(warmup=2, clean=3, trace=1, repeat=2, memory=0)
    options = Options(folder=tmp_path, windows=windows, pid=7, rank=1, tokens_per_step=9, fix="a+b=c")
    assert Options.from_json(with_options({}, options.to_json())[VARIABLE]) == options


def test_an_environment_gains_a_folder_and_a_variable_and_loses_nothing():
    assert with_options({"A": "b"}, "{}") == {"A": "b", "PYTHONPATH": BOOTSTRAP_FOLDER, VARIABLE: "{}"}
    assert with_options({"PYTHONPATH": "x:y"}, "{}")["PYTHONPATH"] == f"{BOOTSTRAP_FOLDER}:x:y"


@pytest.mark.parametrize(
    ("error", "status", "exit_code"),
    [
        (None, "finished", 0),
        (SystemExit(0), "finished", 0),
        (SystemExit(3), "failed", 3),
        (SystemExit("a message"), "failed", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (ValueError("no"), "failed", 1),
    ],
    ids=repr,
)
def test_an_ending_has_a_status_and_an_exit_code(error, status, exit_code):
    found, facts = ending(error)
    assert (found, facts["exit_code"], facts.get("exception")) == (
        status,
        exit_code,
        "ValueError: no" if isinstance(error, ValueError) else None,
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (None, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"RANK": "three", "WORLD_SIZE": ""}, (None, 1)),
    ],
)
def test_the_rank_is_what_the_launcher_says(monkeypatch, variables, expected):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert rank.rank_and_world_size() == expected


def test_without_a_launcher_the_rank_is_that_of_the_process_group(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert rank.rank_and_world_size() == (0, 1)
    finally:
        torch.distributed.destroy_process_group()
    assert rank.rank_and_world_size() == (0, 1)  # scripts leave the group before they end
    rank.forget()
    assert rank.rank_and_world_size() == (None, 1)


def test_the_lowest_rank_becomes_the_recording(tmp_path):
    write(tmp_path, exit_code=0, num_child_processes=3, finished_at="later")
    for number in (10, 2, 1):
        write(tmp_path / f"rank{number}", num_steps=number, exit_code=0, finished_at="earlier")
    write(tmp_path / "process5", num_steps=99)
    (tmp_path / "rank1" / "trace").mkdir()
    assert adopt(tmp_path)
    assert names_in(tmp_path) == ["process5", "rank10", "rank2", "recording.json", "samples.jsonl", "trace"]
    facts = facts_of(tmp_path)
    assert (facts["steps"]["num_steps"], facts["num_child_processes"], facts["finished_at"]) == (1, 3, "later")
    assert (tmp_path / "samples.jsonl").read_text() == "rank1\n"


def test_a_process_that_trained_goes_before_one_that_did_not(tmp_path):
    write(tmp_path, exit_code=0)
    write(tmp_path / "rank0", status="failed")
    write(tmp_path / "rank1", num_steps=3)
    assert adopt(tmp_path)
    assert facts_of(tmp_path)["steps"]["num_steps"] == 3


@pytest.mark.parametrize(("source", "is_adopted"), [("optimizer", False), ("step()", False), ("forward", True)])
def test_training_in_the_first_process_keeps_its_place(tmp_path, source, is_adopted):
    write(tmp_path, num_steps=4, source=source, exit_code=0)
    write(tmp_path / "process5", num_steps=3)
    assert adopt(tmp_path) is is_adopted
    assert facts_of(tmp_path)["steps"]["num_steps"] == (3 if is_adopted else 4)
    assert (tmp_path / "process5").exists() is not is_adopted


def test_a_rank_leaves_the_other_ranks_alone(tmp_path):
    write(tmp_path, exit_code=0)
    write(tmp_path / "rank1", num_steps=3)
    assert not adopt(tmp_path, is_rank=True)
    write(tmp_path / "process5", num_steps=4)
    assert adopt(tmp_path, is_rank=True)
    assert facts_of(tmp_path)["steps"]["num_steps"] == 4
    assert names_in(tmp_path) == ["rank1", "recording.json", "samples.jsonl"]


def test_the_failure_of_the_script_is_that_of_its_recording(tmp_path):
    write(tmp_path, status="failed", exit_code=1, exception="ChildFailedError: …")
    write(tmp_path / "rank0", status="interrupted", num_steps=3)
    assert adopt(tmp_path)
    facts = facts_of(tmp_path)
    assert (facts["status"], facts["exit_code"], facts["exception"]) == ("failed", 1, "ChildFailedError: …")


def test_a_process_that_still_runs_is_left_alone(tmp_path):
    write(tmp_path, exit_code=0)
    write(tmp_path / "process1", status="interrupted", num_steps=3, pid=1)
    assert not adopt(tmp_path)
    assert names_in(tmp_path) == ["process1", "recording.json", "samples.jsonl"]


def test_only_one_process_adopts(tmp_path):
    write(tmp_path, exit_code=0)
    write(tmp_path / "rank0", num_steps=3)
    (tmp_path / ".adopting").touch()
    assert not adopt(tmp_path)
    assert (tmp_path / "rank0").exists()


def test_a_process_that_has_ended_does_not_run():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has waited for it
    assert not is_running(child)
    os.waitpid(child, 0)
    assert not is_running(child)
    assert is_running(os.getpid())


def test_folders_of_processes_are_claimed_once(tmp_path):
    from stepscope.recorder.processes.child import claim

    pid = os.getpid()
    found = [claim(tmp_path, number) for number in (1, 1, 1, None)]
    assert [folder.name for folder, _ in found] == ["rank1", f"process{pid}", f"process{pid}-2", f"process{pid}-3"]
    assert [is_first for _, is_first in found] == [True, False, False, False]


@pytest.fixture
def sentinel():
    from stepscope.recorder.processes.child import Sentinel

    signs = []
    sentinel = Sentinel(lambda: signs.append(torch.autograd.backward))
    yield signs
    sentinel.remove()


def test_the_first_gradient_is_a_sign_and_the_second_is_none(sentinel):
    original = torch.autograd.backward.__wrapped__
    weight = torch.ones(3, requires_grad=True)
    for _ in range(2):
        weight.sum().backward()
        torch.autograd.grad(weight.sum(), weight)
    assert sentinel == [original]  # its patches are gone when it reports
    assert torch.autograd.backward is original
    assert weight.grad.tolist() == [2, 2, 2]


def test_a_step_without_a_backward_is_a_sign_too(sentinel):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.register_step_post_hook(lambda *_: None)
    for _ in range(2):
        optimizer.step()
    assert len(sentinel) == 1
    assert parameter.tolist() == [-2, -2]

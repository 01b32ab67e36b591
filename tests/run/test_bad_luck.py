"""Bad input is one line and exit code 2; bad luck leaves a readable recording and the script's own ending."""

import json

import pytest

from parametrized import parametrized
from stepscope.trace.recording import read_recording

STEPS = """
from tiny import *
import os, signal, sys
for step in range(12):
    loss = loss_of(model, batch())
    if step == {step}:
        {action}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# A kill loses what was noted in the last tenth of a second: these steps are longer.
LONG_STEPS = "import time\n" + STEPS.replace("    optimizer.step()", "    time.sleep(0.11)\n    optimizer.step()")

FORKS = """
import multiprocessing, os, sys
from tiny import *
from torch.utils.data import DataLoader

def train(num_steps):
    for _ in range(num_steps):
        train_step()

# a child that trains and ends as a script does
if os.fork() == 0:
    train(3)
    sys.exit(9)
os.wait()
# two workers that read, and three that train for themselves, forked while the parent trains
for step, tokens in enumerate(DataLoader(torch.randint(16, (24, 5)), batch_size=2, num_workers=2)):
    loss_of(model, tokens).backward()
    optimizer.step()
    if step % 4 == 3:
        worker = multiprocessing.get_context("fork").Process(target=train, args=(5,))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
print("parent done")
"""

SPAWNS = """
import torch.multiprocessing

def train(rank):
    from tiny import train_step
    for step in range(3):
        train_step()

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
    print("all trained")
"""

# Ours warms up with step 5 and traces step 6. The script's own warms up with step WAIT and traces the next three.
PROFILES = """
from tiny import *
from torch.profiler import profile, schedule, ProfilerActivity

def ready(profiler):
    counts = {event.key: event.count for event in profiler.key_averages()}
    print(counts.get("aten::embedding"), counts.get("aten::embedding_dense_backward"), flush=True)

when = schedule(wait=WAIT, warmup=1, active=3, repeat=1)
with profile(activities=[ProfilerActivity.CPU], schedule=when, on_trace_ready=ready) as profiler:
    for step in range(16):
        train_step()
        profiler.step()
print("done")
"""

CATCHES = """
from tiny import *

class Failing(torch.optim.SGD):
    def step(self, closure=None):
        if step == 3:
            raise ArithmeticError
        return super().step(closure)

optimizer = Failing(model.parameters(), lr=0.1)
for step in range(14):
    try:
        loss_of(model, None if step == 4 else batch()).backward()
        optimizer.step()
    except (ArithmeticError, TypeError):
        pass
"""

# One optimizer a parameter, so that no two gradients are alive at once.
STEPS_INSIDE_BACKWARD = """
from tiny import *
optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)
for _ in range(12):
    loss_of(model, batch()).backward()
"""

# As the result of a CUDA graph once the next has run: torch lets nobody read it.
UNREADABLE_LOSSES = """
from tiny import *
import stepscope

for _ in range(12):
    train_step()
    stepscope.step(loss=torch.empty((), device="meta"))
"""

FILL_THE_DISK = "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))"

ENDINGS = {
    "raises": STEPS.format(step=4, action="raise ValueError(step)"),
    "exits": STEPS.format(step=4, action="sys.exit(3)"),
    "is killed": LONG_STEPS.format(step=7, action="os.kill(os.getpid(), signal.SIGKILL)"),
    "leaves without a word": LONG_STEPS.format(step=4, action="os._exit(5)"),
    "closes its output": STEPS.format(step=4, action="sys.stdout.close()"),
    "writes TorchScript": STEPS.format(step=4, action="torch.jit.script(model)"),
    "changes its folder": "import os\nos.mkdir('x')\nos.chdir('x')" + STEPS.format(step=99, action="pass"),
    "fills the disk": "import resource\n" + LONG_STEPS.format(step=4, action=FILL_THE_DISK),
    "catches errors": CATCHES,
    "steps inside backward": STEPS_INSIDE_BACKWARD,
    "has losses that cannot be read": UNREADABLE_LOSSES,
    "never steps": "from tiny import *\nprint(torch.ones(2).sum().item())",
    "forks": FORKS,
    "spawns": SPAWNS,
}

OWN_PROFILER = {
    "over before ours": 0,
    "active when ours warms up": 3,
    "warming up when ours warms up": 4,
    "begins when ours is warm": 5,
    "begins when ours is active": 6,
    "begins after ours": 9,
}


@pytest.fixture(scope="module")
def runs(lab):
    profiles = {name: PROFILES.replace("WAIT", str(wait)) for name, wait in OWN_PROFILER.items()}
    return lab.start(ENDINGS | profiles, {})


@pytest.fixture(scope="module")
def script(lab):
    """A script that only prints, and things around it that are in the way."""
    script = lab.script("print('ran')")
    (script.folder / "folder.py").mkdir()
    (script.folder / "file").write_text("a file")
    return script


@parametrized(
    ("words", "said"),
    [
        (["missing.py"], "missing.py not found"),
        (["folder.py"], "folder.py has no __main__.py"),
        (["true"], "true is not a Python script"),
        (["-m", "no.such.module"], "no.such.module"),
        ([], "name a script"),
        (["--no-such-option", "train.py"], "--no-such-option"),
        (["--warmup", "many", "train.py"], "many"),
        (["--warmup", "1", "train.py"], "--warmup"),
        (["--clean", "-1", "train.py"], "clean"),
        (["--tokens-per-step", "0", "train.py"], "--tokens-per-step"),
        (["-o", "file/x", "train.py"], "file/x"),
        (["-o", "file", "train.py"], "file"),
        (["-o", "/proc/x", "train.py"], "/proc/x"),
    ],
    quick=7,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(script, words, said):
    before = sorted(script.folder.rglob("*"))
    assert said in script.stepscope("run", *words).error_line()
    assert sorted(script.folder.rglob("*")) == before


def test_without_torch_the_line_says_what_to_install(script):
    run = script.python("-S", "-m", "stepscope", "run", "train.py")  # -S: no site-packages, so really no torch
    assert "pip install torch" in run.error_line()


def test_an_earlier_recording_is_only_replaced_by_force(script):
    first = script.run(options=("--quiet",))
    (first.folder / "trace").mkdir()
    (first.folder / "trace" / "rank0.json.gz").write_text("measured")  # a recording of nothing gives way
    assert "--force" in script.run(options=("--quiet",)).error_line()
    assert (first.folder / "trace").exists()
    again = script.run(options=("--quiet", "--force"))
    assert (again.exit_code, again.stdout) == (0, "ran\n")
    assert not (first.folder / "trace").exists()


def test_force_never_empties_a_folder_that_is_no_recording(script):
    precious = script.folder / "precious" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("years of work")
    assert "precious" in script.stepscope("run", "--force", "-o", "precious", "train.py").error_line()
    assert list(precious.parent.iterdir()) == [precious]
    assert precious.read_text() == "years of work"


def test_a_rank_that_comes_first_is_not_in_the_way_of_another(script):
    options = ("run", "--quiet", "-o", "ranks", "train.py")
    assert script.stepscope(*options, RANK="1").exit_code == 0
    assert script.stepscope(*options, RANK="0").exit_code == 0
    for folder in ("ranks", "ranks/rank1"):
        assert read_recording(script.folder / folder).status == "finished"


def test_a_script_that_never_imports_torch(script):
    run = script.run(options=("--force",))
    assert run.exit_code == 0
    assert run.stdout.startswith("ran\n")
    assert "never imported torch" in run.stdout
    assert run.recording.status == "finished"


@pytest.mark.long
def test_a_script_that_never_steps(runs):
    run = runs["never steps"]
    assert run.exit_code == 0
    assert "No step was found" in run.stdout
    assert run.steps == []


@parametrized(
    ("name", "exit_code", "status", "num_steps"),
    [
        ("raises", 1, "failed", 4),
        ("exits", 3, "failed", 4),
        ("is killed", -9, "interrupted", 7),
        ("leaves without a word", 5, "interrupted", 4),
        ("closes its output", 0, "finished", 12),
        ("writes TorchScript", 0, "finished", 12),
        ("changes its folder", 0, "finished", 12),
        ("catches errors", 0, "finished", 12),
        ("steps inside backward", 0, "finished", 12),
    ],
    quick=5,
)
def test_however_a_script_ends_its_finished_steps_can_be_read(lab, runs, name, exit_code, status, num_steps):
    run = runs[name]
    assert run.exit_code == exit_code, run.stderr
    assert run.recording.status == status
    assert run.steps == list(range(num_steps))
    assert run.recording.warnings == ()
    shown = lab.script().verb("show", run.folder, "--json")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["num_steps"] == num_steps


def test_a_closed_output_costs_the_card_and_nothing_else(runs):
    assert "Traceback" not in runs["closes its output"].stderr
    assert "card could not be shown" in runs["closes its output"].stderr


def test_a_full_disk_costs_the_recording_and_nothing_else(runs):
    assert runs["fills the disk"].exit_code == 0, runs["fills the disk"].stderr
    assert "Traceback" not in runs["fills the disk"].stderr
    assert runs["fills the disk"].steps == list(range(4))


@pytest.mark.long
def test_forked_processes_that_train_have_recordings_of_their_own(runs):
    run = runs["forks"]
    assert run.exit_code == 0, run.stderr
    assert run.recording.status == "finished"
    lines = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "wall_ns" in line] == list(range(12))
    assert run.steps == list(range(12))
    children = [read_recording(folder) for folder in run.folder.glob("process*")]
    found = sorted((child.status, child.facts["exit_code"], len(child.samples)) for child in children)
    assert found == [("failed", 9, 3), *[("finished", 0, 5)] * 3]


def test_a_forked_child_shows_no_card(runs):
    assert runs["forks"].stdout.count("parent done") == 1
    assert runs["forks"].stdout.count("About this measurement") == 1


@pytest.mark.long
def test_spawned_processes_that_train_are_recorded(runs):
    run = runs["spawns"]
    assert run.exit_code == 0, run.stderr
    assert run.stdout.startswith("all trained\n")
    assert run.steps == [0, 1, 2]
    other = next(run.folder.glob("process*"))
    assert len(read_recording(other).samples) == 3


@pytest.mark.long
@pytest.mark.parametrize("when", OWN_PROFILER)
def test_the_scripts_own_profiler_sees_all_of_its_steps(runs, when):
    run = runs[when]
    assert run.exit_code == 0, run.stderr
    assert run.stdout.startswith("3 3\ndone\n")
    assert run.recording.status == "finished"
    assert run.steps == list(range(16))
    traced = (run.folder / "trace" / "rank0.json.gz").exists()
    said = any("profiler" in note["text"] for note in run.recording.facts.get("notes", []))
    assert traced != said  # a trace of ours, or the reason why there is none


def test_a_line_that_was_cut_off_costs_that_line(lab, runs):
    run = runs["is killed"]
    copy = lab.script().folder
    lines = (run.folder / "samples.jsonl").read_text()
    (copy / "recording.json").write_bytes((run.folder / "recording.json").read_bytes())
    (copy / "samples.jsonl").write_text(lines[: lines.index('"step": 6, "window"') + 40])
    recording = read_recording(copy)
    assert [sample.step for sample in recording.samples] == list(range(6))
    assert len(recording.warnings) == 1
    assert "samples.jsonl" in recording.warnings[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"schema_version": 1, "sta',
        b"[1, 2]",
        b"\xff",
        b'{"schema_version": 99, "status": "finished"}',
    ],
)
def test_a_damaged_recording_is_one_line(script, content):
    folder = script.folder / "damaged"
    folder.mkdir(exist_ok=True)
    (folder / "recording.json").write_bytes(content)
    assert "damaged" in script.verb("show", "damaged").error_line()


def test_damaged_fields_are_not_taken_for_a_run_without_steps(lab):
    script = lab.script()
    content = '{"schema_version": 1, "status": "finished", "environment": 7, "steps": []}'
    (script.folder / "recording.json").write_text(content)
    shown = script.verb("show", ".")
    assert "recording.json is damaged" in shown.stdout and "environment" in shown.stdout
    assert "never imported torch" not in shown.stdout


def test_a_damaged_side_file_costs_its_lines(lab):
    script = lab.script()
    (script.folder / "recording.json").write_text('{"schema_version": 1, "status": "finished"}')
    (script.folder / "compile.json").write_text("{")
    shown = script.verb("show", ".")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "compile.json" in shown.stdout


def test_the_card_of_nothing_is_one_line(script):
    assert "nowhere" in script.verb("show", "nowhere").error_line()
    assert "folder.py" in script.verb("show", "folder.py").error_line()
    assert "file" in script.verb("show", "file").error_line()


def test_a_reader_that_goes_away_is_no_traceback(runs, script):
    with script.popen("-m", "stepscope", "show", runs["raises"].folder) as process:
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


def test_a_loss_that_cannot_be_read_costs_only_itself(runs):
    run = runs["has losses that cannot be read"]
    assert run.exit_code == 0, run.stderr
    notes = [note["text"] for note in run.recording.facts["notes"] if note["about"] == "recorder"]
    assert notes == ["while reading a loss: RuntimeError: Tensor.item() cannot be called on meta tensors"]
    assert (run.folder / "trace" / "rank0.json.gz").is_file() and run.recording.facts["flops"]
    assert all(sample.loss is None for sample in run.recording.samples)

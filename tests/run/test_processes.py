"""Every process that trains is measured, whoever started it; the others leave no trace of a recording."""

import json
import re
import sys
from pathlib import Path

import pytest

from stepscope.trace.recording import read_recording

SHORT = ("--warmup", "2", "--clean", "3", "--trace", "1")  # 8 steps in windows
NUM_STEPS = 12

TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn

NUM_STEPS = 12

def train(rank=None, store=None):
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    losses = []
    for _ in range(NUM_STEPS):
        inputs = torch.randn(8, 16)
        loss = (model(inputs) - inputs[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    dist.barrier()
    if rank == 0:
        print(*losses, flush=True)
    dist.destroy_process_group()
"""

DDP = f"{TRAIN}\ntrain()\n"
STARTS = f"""
import tempfile
import torch.multiprocessing as mp
{TRAIN}
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, args=(folder + "/store",), nprocs=2, start_method=sys.argv[1])
"""
MODULE = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
LAUNCHES = {
    "module": (DDP, MODULE, ()),
    "spawn": (STARTS, (), ("spawn",)),
    "torchrun": (DDP, TORCHRUN, ()),
    "fork": (STARTS, (), ("fork",)),
    "accelerate": (DDP, ACCELERATE, ()),
}


def start(lab, name, *options, num_steps=NUM_STEPS):
    source, launcher, arguments = LAUNCHES[name]
    script = lab.script(source.replace("NUM_STEPS = 12", f"NUM_STEPS = {num_steps}"))
    # Commands such as torchrun are on the PATH of an activated environment.
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return script.stepscope(
        "run", "-o", "recording", *SHORT, *options, *launcher, script.path.name, *arguments, PATH=path
    )


@pytest.fixture(scope="module")
def bare(lab, forks):
    """What rank 0 prints without Stepscope: the same with every launcher, so the cheapest is taken."""
    script = lab.script(STARTS)
    return script.python_in_fork(forks, script.path.name, "fork")


def is_complete(run, bare):
    """Assert that both ranks of a run are in its recording, and that nothing else is."""
    assert run.exit_code == 0, run.stderr
    assert run.stdout.count("About this measurement") == 1
    assert bare.stdout.strip() in run.stdout
    assert len(re.findall("stepscope: clean timing", run.stderr)) == 1
    for rank, folder in enumerate((run.folder, run.folder / "rank1")):
        recording = read_recording(folder)
        assert recording.status == "finished"
        assert [sample.step for sample in recording.samples] == list(range(NUM_STEPS))
        assert {sample.num_samples for sample in recording.window("clean")} == {8}
        facts = recording.facts
        assert (facts["environment"]["rank"], facts["environment"]["world_size"]) == (rank, 2)
        assert facts["exit_code"] == 0
        assert facts["command"]["argv"] == read_recording(run.folder).facts["command"]["argv"]
        assert Path(facts["command"]["script"]).name == "train.py"
        assert facts.get("notes") is None
        assert [file.name for file in (folder / "trace").iterdir()] == [f"rank{rank}.json.gz"]
    hexes = [(sample.loss or 0.0).hex() for sample in run.recording.samples if sample.loss is not None]
    assert hexes and set(hexes) <= set(bare.stdout.split())
    assert sorted(path.name for path in run.folder.iterdir() if path.is_dir()) == ["rank1", "trace"]
    assert not [path for path in run.folder.iterdir() if path.name.startswith(".")]


def test_both_ranks_are_in_one_recording(lab, forks, bare):
    """The ranks are new processes; the one that starts them has torch already."""
    is_complete(lab.script(STARTS).run_in_fork(forks, *SHORT, arguments=("spawn",)), bare)


@pytest.mark.long
@pytest.mark.parametrize("name", LAUNCHES)
def test_both_ranks_of_every_launcher_are_in_one_recording(lab, bare, name):
    is_complete(start(lab, name), bare)


@pytest.mark.long
def test_a_launcher_outside_stepscope_as_ever(lab):
    script = lab.script(DDP)
    words = [*MODULE, "-m", "stepscope", "run", "-o", "recording", *SHORT, "--quiet", script.path.name]
    run = script.python(*words)
    assert run.exit_code == 0, run.stderr
    for folder in (run.folder, run.folder / "rank1"):
        assert len(read_recording(folder).samples) == NUM_STEPS


ENVIRONMENT = """
import json, multiprocessing, os, subprocess, sys
SHOW = "import os, sys; print(os.environ.get('PYTHONPATH'), sorted(k for k in os.environ if 'STEP' in k), sys.path)"
AGAIN = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}])"
if __name__ == "__main__":
    exec(SHOW)
    sys.stdout.flush()
    os.system(f'{sys.executable} -c "{SHOW}"')
    for code in (SHOW, AGAIN):
        subprocess.run([sys.executable, "-c", code])
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "somewhere"})
        subprocess.run([sys.executable, "-c", code], env={})
    worker = multiprocessing.get_context("spawn").Process(target=exec, args=(SHOW,))
    worker.start()
    worker.join()
    try:
        subprocess.run(["no-such-program"], env={"A": "b"})
    except FileNotFoundError as error:
        print(error)
"""


def test_no_process_sees_a_changed_environment(lab):
    script = lab.script(ENVIRONMENT)
    (script.folder / "sitecustomize.py").write_text("print('the sitecustomize of the user')")
    bare, run = script.both()
    assert (run.exit_code, run.stdout, run.stderr) == (0, bare.stdout, bare.stderr)


@pytest.mark.long
def test_processes_that_do_not_train_leave_no_files(lab):
    run = lab.script(
        """
        import subprocess, sys
        from tiny import *
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __len__(self): return 12
            def __getitem__(self, index):
                weight = torch.ones(3, requires_grad=True)
                torch.autograd.grad(weight.sum(), weight)
                return torch.randint(16, (5,))

        if __name__ == "__main__":
            for how in ("spawn", "fork"):
                for tokens in DataLoader(Data(), batch_size=2, num_workers=1, multiprocessing_context=how):
                    loss_of(model, tokens).backward()
                    optimizer.step()
            code = "import torch; x = torch.ones(3, requires_grad=True); print(torch.autograd.grad(x.sum(), x))"
            subprocess.run([sys.executable, "-c", code], check=True)
        """
    ).run(options=(*SHORT, "--quiet"))
    assert run.exit_code == 0, run.stderr
    assert run.stdout == "(tensor([1., 1., 1.]),)\n"
    assert run.steps == list(range(12))
    assert [path.name for path in run.folder.iterdir() if path.is_dir()] == ["trace"]


ONE_CHILD = """
import multiprocessing, sys

def train(num_steps, code):
    from tiny import train_step
    for _ in range(num_steps):
        train_step()
    print("trained", flush=True)
    if code == "raise":
        raise ValueError("as planned")
    sys.exit(code)

if __name__ == "__main__":
    code = sys.argv[2] if sys.argv[2] == "raise" else int(sys.argv[2])
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=train, args=(12, code))
    worker.start()
    if sys.argv[3:]:
        worker.join()
        sys.exit(worker.exitcode)
"""


@pytest.fixture(scope="module")
def one_child(lab):
    return lab.script(ONE_CHILD)


@pytest.mark.long
def test_a_process_that_python_waits_for_at_its_end_is_measured(one_child):
    bare, run = one_child.both("fork", "0")
    assert (run.exit_code, run.stdout, run.stderr) == (0, bare.stdout, bare.stderr)
    assert run.steps == list(range(12))
    assert run.recording.status == "finished"
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "memory.json.gz", "recording.json", "samples.jsonl", "trace",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_a_process_that_fails_is_recorded_as_failed(lab, how):
    bare, run = lab.script(ONE_CHILD).both(how, "raise", "join")
    assert (run.exit_code, run.stdout) == (1, bare.stdout) == (bare.exit_code, run.stdout)
    assert "stepscope" not in run.stderr
    assert run.recording.status == "failed"
    assert run.steps == list(range(12))


@pytest.mark.long
def test_the_options_reach_the_ranks_and_both_stop_at_one_step(lab):
    run = start(lab, "module", "--exit-after", "--tokens-per-step", "77", "--json", num_steps=500)
    assert run.exit_code == 0, run.stderr
    card = json.loads(run.stdout)
    assert card["throughput"]["per_step"] in (77, 154)
    recordings = [read_recording(folder) for folder in (run.folder, run.folder / "rank1")]
    assert [recording.status for recording in recordings] == ["finished", "finished"]
    assert len(recordings[0].samples) == len(recordings[1].samples) < 500


@pytest.mark.long
@pytest.mark.parametrize("code", [0, 3])
def test_a_script_that_a_script_starts_is_measured(lab, code):
    script = lab.script(
        "import subprocess, sys\n"
        "sys.exit(subprocess.call([sys.executable, 'inner.py'], env={'OMP_NUM_THREADS': '1'}))"
    )
    (script.folder / "inner.py").write_text(
        f"import sys\nfrom tiny import *\nfor _ in range(12):\n    train_step()\nprint('ran')\nsys.exit({code})\n"
    )
    bare, run = script.both()
    assert (run.exit_code, run.stdout, run.stderr) == (code, "ran\n", bare.stderr)
    assert run.steps == list(range(12))
    assert run.recording.status == ("failed" if code else "finished")


LIGHTNING = """
import torch
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def training_step(self, batch, _):
        loss = (self.layer(batch[0]) - batch[0][:, :4]).square().mean()
        if self.trainer.is_global_zero:
            print(loss.item().hex(), flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

L.seed_everything(0)
data = DataLoader(TensorDataset(torch.randn(192, 16)), batch_size=8)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet).fit(Model(), data)
"""


@pytest.mark.long
def test_lightning_starts_its_second_rank_itself(lab):
    pytest.importorskip("lightning")
    script = lab.script(LIGHTNING)
    bare, run = script.both()
    assert (run.exit_code, run.stdout) == (0, bare.stdout), run.stderr
    for rank, folder in enumerate((run.folder, run.folder / "rank1")):
        recording = read_recording(folder)
        assert len(recording.samples) == NUM_STEPS
        assert (recording.status, recording.facts["environment"]["world_size"]) == ("finished", 2)
        assert recording.facts["environment"]["rank"] == rank

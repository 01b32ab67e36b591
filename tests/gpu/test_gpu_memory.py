"""The memory window on a real GPU: what the ledger follows against the allocator's own counters, and snapshots.

Run with `python -m pytest tests/gpu/test_gpu_memory.py -m gpu`.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

from stepscope.planner.hardware import buffer_bytes

SOURCE = Path(__file__).parents[2] / "src"

TRAINS = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(512, 2048), nn.Linear(2048, 512)
    def inner(self, x):
        return self.down(torch.relu(self.up(x)))
    def forward(self, x):
        if self.how == "plain":
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")

model = nn.Sequential(Block("plain"), Block("reentrant"), Block("not")).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(12):
    x = torch.randn(1024, 512, device="cuda", requires_grad=True)
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("PEAK", torch.cuda.max_memory_allocated())
"""

RUNS_OUT = """
import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = torch.empty(256 << 20, device="cuda", dtype=torch.uint8)
for step in range(12):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    if step == {step}:
        torch.empty(1 << 50, device="cuda", dtype=torch.uint8)
    optimizer.step()
    optimizer.zero_grad()
"""


def run(folder: Path, source: str, *options: str) -> tuple[Path, subprocess.CompletedProcess]:
    (folder / "train.py").write_text(source)
    words = ["run", "-o", "recording", "--warmup", "2", "--clean", "3", "--trace", "1", *options, "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return folder / "recording", done


def notes_of(folder: Path) -> list[dict]:
    return json.loads((folder / "recording.json").read_text()).get("notes", [])


def read_snapshot(path: Path) -> dict:
    content = path.read_bytes()
    assert next(pickletools.genops(content))[1] == 4
    return pickle.loads(content)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder, done = run(tmp_path_factory.mktemp("trains"), TRAINS, "--memory")
    assert done.returncode == 0, done.stderr
    with gzip.open(folder / "memory.json.gz") as stream:
        return folder, json.load(stream)


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


def inside_the_sum(entry: dict) -> int:
    """What the kernel that sums the 1024 rows of a bias's gradient takes and gives back, where no tensor shows it."""
    device = torch.cuda.get_device_properties(0)
    sizes = buffer_bytes(
        num_outputs=entry["bytes"] // 4,
        num_inputs=1024,
        is_inner=False,
        is_dense=True,
        num_dimensions=2,
        accumulator_bytes=4,
        num_processors=device.multi_processor_count,
        threads_per_processor=device.max_threads_per_multi_processor,
    )
    return sum(map(rounded, sizes))


def test_what_the_ledger_follows_is_what_the_allocator_counts(trained):
    """To the byte: tensors, what was there before, and the buffers of the sums of the six biases' gradients."""
    _, memory = trained
    allocator = memory["allocator"]
    here = [e for e in memory["allocations"] if e["device"] == memory["device"] == "cuda:0"]
    sums = {e["born"]: inside_the_sum(e) for e in here if e["op"] == "aten.sum"}
    live = peak = start = sum(rounded(e["bytes"]) for e in here if e["born"] is None)
    changes = {}
    for entry in here:
        for key, sign in (("born", 1), ("died", -1)):
            if entry[key] is not None:
                changes[entry[key]] = sign * rounded(entry["bytes"])
    for event in sorted(changes):
        live += changes[event]
        peak = max(peak, live + sums.get(event, 0))

    # In no tensor, and there all the time: cuBLAS's workspaces, and cuBLASLt's, of two threads (66 MiB on Hopper).
    unknown = allocator["start_allocated_bytes"] - start
    assert 0 <= unknown <= 80 << 20
    assert len(sums) == 6
    assert peak + unknown == allocator["peak_allocated_bytes"]
    assert allocator["peak_reserved_bytes"] >= allocator["peak_allocated_bytes"] and allocator["num_retries"] == 0


def test_the_backward_runs_in_another_thread_and_still_has_modules_and_callers(trained):
    _, memory = trained
    backward = [e for e in memory["allocations"] if e["phase"] == "backward" and e["bytes"] > 4096]
    products = [e for e in backward if e["op"] in ("aten.mm", "aten.addmm")]
    modules = {e["module"] for e in products}

    assert {"0.up", "0.down", "2.up", "2.down"} <= modules
    # Nodes of a reentrant checkpoint are numbered by the thread that ran it again: null where that is ambiguous.
    assert modules <= {"0.up", "0.down", "1.up", "1.down", "2.up", "2.down", None}
    assert all(e["caller"].startswith("train.py:") for e in backward)


def test_saved_bytes_are_the_activations(trained):
    _, memory = trained
    if not hasattr(torch._C._autograd.SavedTensor, "data"):
        assert memory["saved"] == []
        return
    saved = {entry["module"]: entry["bytes"] for entry in memory["saved"]}
    narrow, wide = 1024 * 512 * 4, 1024 * 2048 * 4

    assert saved["0.up"] == narrow and saved["0.down"] == wide
    assert saved["1"] == narrow
    assert sum(saved.values()) < 6 * narrow + wide
    assert memory["left_alive"] == []


def test_the_snapshot_has_python_stacks_of_the_window(trained):
    folder, _ = trained
    snapshot = read_snapshot(folder / "snapshot.pickle")
    allocations = [e for trace in snapshot["device_traces"] for e in trace if e["action"] == "alloc"]
    files = {frame["filename"].rpartition("/")[2] for entry in allocations for frame in entry.get("frames", ())}

    assert len(allocations) > 20 and "train.py" in files
    assert not any(name.endswith((".cpp", ".so")) for name in files)
    assert snapshot["segments"]


@pytest.mark.parametrize(("options", "step", "has_history"), [((), 7, False), (("--memory",), 0, True)])
def test_out_of_memory_leaves_a_snapshot(tmp_path, options, step, has_history):
    """GIVEN a script that runs out of memory THEN what filled it is written; in the warm-up, with its history."""
    folder, done = run(tmp_path, RUNS_OUT.format(step=step), *options)
    snapshot = read_snapshot(folder / "snapshot_oom.pickle")

    assert done.returncode == 1 and "OutOfMemoryError" in done.stderr
    assert sum(s["allocated_size"] for s in snapshot["segments"]) >= 256 << 20
    actions = {entry["action"] for trace in snapshot["device_traces"] for entry in trace}
    assert ("oom" in actions) == has_history
    assert any("snapshot_oom.pickle" in note["text"] for note in notes_of(folder))


def test_a_script_that_keeps_its_own_history_keeps_it(tmp_path):
    own = "import torch\ntorch.cuda.memory._record_memory_history(max_entries=1000)\n"
    check = "\nassert torch._C._cuda_isHistoryEnabled()\nprint('STILL ON')\n"
    folder, done = run(tmp_path, own + TRAINS + check, "--memory")

    assert done.returncode == 0 and "STILL ON" in done.stdout, done.stderr
    assert any("records the allocator history itself" in note["text"] for note in notes_of(folder))


def test_the_scripts_own_peak_is_what_it_is_without_us(tmp_path):
    """The counters are set back in the window; a script whose steps are alike sees no difference but the probe's."""
    _, done = run(tmp_path, TRAINS)
    assert done.returncode == 0, done.stderr
    bare = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    peaks = [
        int(line.split()[1]) for out in (done.stdout, bare.stdout) for line in out.splitlines() if "PEAK" in line
    ]

    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)

"""`stepscope run --memory` on real scripts: who allocated, what is saved, what earlier steps left alive."""

from __future__ import annotations

import gzip
import json

import pytest

from stepscope.recorder import files
from stepscope.recorder.ledger.nodes import SHOWS_SAVED_TENSORS

# Two warm-up steps, three clean, two for the trace, one for memory and FLOPs.
SHORT = ("--warmup", "2", "--clean", "3", "--trace", "1")

HEALTHY = """
from tiny import *

for _ in range(12):
    tokens = batch()
    loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

LEAKS = """
from tiny import *

def train():
    losses = []
    for _ in range(12):
        tokens = batch()
        loss = loss_of(model, tokens)
        losses.append(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_of(model, tokens))

train()
"""

OWN_HOOKS = """
from tiny import *
from torch.utils.checkpoint import checkpoint

packed, unpacked = [], []
def pack(tensor):
    packed.append(1)
    return tensor.detach()
def unpack(tensor):
    unpacked.append(1)
    return tensor

for step in range(9):
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = loss_of(model, batch())
    loss = loss + checkpoint(lambda x: model(x).sin().sum(), batch(), use_reentrant=False) * 0
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), len(packed), len(unpacked))
"""

FAILS = """
from tiny import *

for step in range(12):
    if step == 3:
        raise torch.OutOfMemoryError("CUDA out of memory: as if")
    train_step()
"""


@pytest.fixture(scope="module")
def runs(lab):
    scripts = {"healthy": HEALTHY, "plain": HEALTHY, "leaks": LEAKS, "fails": FAILS}
    with_memory = (*SHORT, "--memory")
    return lab.start(scripts, {"healthy": with_memory, "leaks": with_memory, "fails": with_memory})


def memory_of(run) -> dict:
    assert run.exit_code == 0, run.stderr
    with gzip.open(run.folder / files.MEMORY_FILE) as stream:
        return json.load(stream)


def notes_of(run) -> list[dict]:
    return json.loads((run.folder / files.RECORDING_FILE).read_text()).get("notes", [])


@pytest.mark.long
def test_a_healthy_script_has_callers_stages_and_nothing_left_alive(runs):
    memory = memory_of(runs["healthy"])
    made = [entry for entry in memory["allocations"] if entry["born"] is not None]

    assert (memory["schema_version"], memory["device"], memory["allocator"]) == (2, "cpu", None)
    assert memory["left_alive"] == []
    stages = [stage["name"] for stage in memory["stages"] if stage["name"] != "other"]  # zero_grad, the batch
    assert stages == ["forward", "loss", "backward", "optimizer"]
    callers = {entry["caller"] for entry in made if entry["phase"] == "forward"}
    assert callers == {"tiny.py:15 forward", "tiny.py:21 loss_of"}
    assert {entry["caller"] for entry in made if entry["phase"] == "backward"} == {"train.py:7 <module>"}
    backward = {entry["module"] for entry in made if entry["phase"] == "backward" and entry["owner"] == "gradient"}
    assert backward == {"embedding", "head"}
    assert not (runs["healthy"].folder / files.SNAPSHOT_FILE).exists()  # there is no GPU
    assert (notes_of(runs["healthy"]) == []) == SHOWS_SAVED_TENSORS


@pytest.mark.skipif(not SHOWS_SAVED_TENSORS, reason="this torch does not show saved tensors")
def test_what_is_saved_for_backward_is_counted_by_module(runs):
    saved = {entry["module"]: entry["bytes"] for entry in memory_of(runs["healthy"])["saved"]}
    num_tokens, width, num_classes, float_bytes, long_bytes = 10, 8, 16, 4, 8

    # The head keeps what the embedding made; both the embedding and the loss keep the tokens.
    assert saved["head"] == num_tokens * width * float_bytes
    loss = num_tokens * num_classes * float_bytes + float_bytes  # the log-softmax, the total weight
    assert saved.get("embedding", 0) + saved[None] == num_tokens * long_bytes + loss


def test_without_the_flag_the_tables_are_the_same_but_for_the_callers(runs):
    full, plain = memory_of(runs["healthy"]), memory_of(runs["plain"])

    def facts(memory: dict) -> list[tuple]:
        names = ("bytes", "shape", "owner", "op", "phase", "module", "born", "died")
        return [tuple(str(entry[name]) for name in names) for entry in memory["allocations"]]

    assert {entry["caller"] for entry in plain["allocations"]} == {None}
    assert facts(full) == facts(plain)
    assert (full["saved"], full["stages"]) == (plain["saved"], plain["stages"])


@pytest.mark.skipif(not SHOWS_SAVED_TENSORS, reason="this torch does not show saved tensors")
def test_a_leak_is_named_with_its_variable_and_its_bytes(runs):
    (entry,) = memory_of(runs["leaks"])["left_alive"]

    # Seven steps are over; the eighth begins. A loss that was only evaluated keeps its whole graph. Where the steps
    # end, the last one to be evaluated belongs to the seventh step: of its own tensors the graph alone is a leak.
    assert entry["frame"] == "train.py:9,13 losses" and entry["module"] is None  # by the lines that fill it
    a_graph = 10 * 8 * 4 + 10 * 16 * 4 + 4 + 10 * 8
    num_evaluated, num_trained = 6, 6
    assert entry["num_tensors"] == num_evaluated + num_trained
    assert entry["bytes"] == num_evaluated * (a_graph + 4) - 4 + num_trained * 4


@pytest.mark.long
def test_a_scripts_own_hooks_and_checkpoints_work_as_without_us(lab):
    bare, run = lab.script(OWN_HOOKS).both()

    assert run.exit_code == bare.exit_code == 0, run.stderr
    assert run.stdout == bare.stdout
    assert not [note for note in notes_of(run) if note["about"] == "recorder"]


def test_an_exception_for_want_of_memory_stays_the_scripts_own(runs):
    run = runs["fails"]

    assert run.exit_code == 1 and "CUDA out of memory: as if" in run.stderr
    assert notes_of(run) == []  # no CUDA here: nothing to take a picture of, and no fault of ours either
    assert not (run.folder / files.OOM_SNAPSHOT_FILE).exists()


def test_the_flag_and_its_opposite_are_one_line_of_error(lab):
    run = lab.script(HEALTHY).run(options=(*SHORT, "--memory", "--no-memory"))

    assert "--memory and --no-memory" in run.error_line()

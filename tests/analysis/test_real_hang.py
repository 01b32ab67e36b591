"""A hang that Gloo really has: one of three ranks skips a collective, and the dumps name it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import stepscope

SCRIPT = """
import json, os, sys, threading, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

def reduce_gradients(tensor):
    dist.all_reduce(tensor)  # REDUCE

def write(out, rank, group, num_calls, is_over):
    num = 0
    while num < num_calls:
        time.sleep(0.05)
        calls = json.loads(_dump_fr_trace_json()).get("entries", [])
        num = sum(each["process_group"][0] == group and (each["retired"] or not is_over) for each in calls)
    open(f"{out}/trace_rank_{rank}", "wb").write(_dump_fr_trace())
    open(f"{out}/json/rank{rank}.json", "wb").write(_dump_fr_trace_json())
    while len(os.listdir(f"{out}/json")) < 3:  # the others still need this process
        time.sleep(0.05)
    os._exit(0)

def train(out, plant, rank):
    # The last call of each rank before it hangs: of the rank that skips one, its third with the pair.
    last = ("0", 4, False) if plant == "other" else ("1", 3, True) if rank == 1 else ("0", 6, False)
    threading.Thread(target=write, args=(out, rank, *last)).start()
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=3)
    pair = dist.new_group([0, 1])
    tensor = torch.ones(4)
    for step in range(3):
        reduce_gradients(tensor)
        if rank < 2:
            dist.all_reduce(tensor, group=pair)
        if plant == "skip" and step == 2 and rank == 1:
            return
        if plant == "other" and step == 1 and rank == 2:
            dist.barrier()  # BARRIER
        dist.broadcast(tensor, 0)  # BROADCAST

for plant in ("skip", "other"):
    for rank in range(3):
        if os.fork() == 0:
            try:
                train(f"{sys.argv[1]}/{plant}", plant, rank)
            finally:
                time.sleep(50)
for _ in range(6):
    os.wait()
"""
LINES = {word: number for number, line in enumerate(SCRIPT.splitlines(), 1) for word in line.split("# ")[1:]}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory, forks) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    (folder / "hangs.py").write_text(SCRIPT)
    for plant in ("skip", "other"):
        (folder / plant / "json").mkdir(parents=True)
    exit_code, _, error = forks.run(["hangs.py", str(folder)], folder, {"TORCH_FR_BUFFER_SIZE": "200"})
    assert exit_code == 0, error
    return folder


@pytest.mark.parametrize("plant", ["skip", "other"])
def test_the_collective_the_rank_and_the_line_are_named(plant, dumps):
    hang, as_json = stepscope.hang(dumps / plant), stepscope.hang(dumps / plant / "json")

    for first in (hang.first, as_json.first):
        assert (first.collective, first.group, first.members) == ("broadcast", "0", (0, 1, 2))
        assert (first.kind, first.number) == (("missing", 6) if plant == "skip" else ("operation", 4))
        assert [each.rank for each in first.absent] == ([1] if plant == "skip" else [2])
    assert hang.first.place == f"hangs.py:{LINES['BROADCAST']} train"
    assert as_json.first.place is None, "JSON has no stacks"
    if plant == "skip":
        assert hang.first.absent[0].place == f"hangs.py:{LINES['REDUCE']} reduce_gradients"
    else:
        assert (hang.first.absent[0].collective, hang.first.absent[0].place) == (
            "barrier",
            f"hangs.py:{LINES['BARRIER']} train",
        )

"""A forward that runs again in the backward is found where its results fit into memory."""

from __future__ import annotations

import pytest
from device_cases import BF16, Program, without_shapes

from stepscope.errors import Unavailable
from stepscope.findings.rules.memory import checkpointing_with_free_memory
from trace_builder import AUTOGRAD

GIB = 1 << 30
X, W = [8192, 1024], [1024, 4096]


def step(peak: int = GIB, kept: int = GIB, shapes: tuple[list[int], list[int]] = (X, W)) -> Program:
    """A forward, and a backward that runs a product again and takes memory for it."""
    program = Program()
    number = program.op("aten::mm", [X, W], 2000, BF16)
    if peak:
        program.memory(peak, 1 << 40, peak)
    program.op("aten::mm", list(shapes), 2000, BF16, recomputed_in=number)
    if kept:
        at = program.at - 3.0
        args = {"Device Type": 1, "Device Id": 0, "Addr": 2 << 40, "Bytes": kept, "Total Allocated": peak + kept}
        program.trace.raw(ph="i", cat="cpu_instant_event", name="[memory]", pid=1, tid=2, ts=at, s="t", args=args)
    program.op("aten::mm", [X, [4096, 1024]], 2000, BF16, backward=number)
    return program


def test_recomputation_with_room_for_it():
    (finding,) = checkpointing_with_free_memory(step().case())

    assert finding.saving_ns == pytest.approx(2_000_000)
    assert "Recomputing 1 forward op" in finding.sentence
    assert "at most 1.00 GiB" in finding.sentence


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_the_node_does_around_it_on_the_host_belongs_to_it(is_reentrant):
    """Unpacking, generators and contexts of a checkpoint, up to the node's own work, or its nested backward."""
    program = step()
    node, again, own = program.at, program.at + 40, program.at + 90
    product = {"Input Dims": [X, W], "Input type": [BF16, BF16], "Concrete Inputs": ["", ""]}
    program.trace.op("SomeBackward0", node, 200, AUTOGRAD, sequence=101, forward_thread=1)
    program.trace.op("aten::mm", again, 20, AUTOGRAD, id=900, sequence=990, forward_thread=0, **product)
    program.trace.launch("mm_kernel", again + 1, (program.runs, 2000), took=1, thread=AUTOGRAD, id=900)
    if is_reentrant:
        program.trace.op("OtherBackward0", own, 60, AUTOGRAD, sequence=100, forward_thread=1)
    program.trace.op("aten::sum", own + 10 * is_reentrant, 20, AUTOGRAD, id=901)
    program.trace.launch("sum_kernel", own + 11, (program.runs + 2000, 10), took=1, thread=AUTOGRAD, id=901)
    program.at, program.runs = node + 200, program.runs + 2010

    row = program.case().recomputed.row(-1, named=True)

    begin_ns = row["start_ns"] - 40_000
    assert (row["from_ns"], row["until_ns"]) == (begin_ns, begin_ns + 90_000)
    assert row["end_ns"] == begin_ns + 60_000


def test_room_for_a_part_of_it():
    usable = int(150108897280 * 0.85)

    (finding,) = checkpointing_with_free_memory(step(peak=usable - 2 * GIB, kept=GIB * 3 // 2).case())

    # The peak is 0.5 GiB short of what is usable, and 1.5 GiB would be kept.
    assert finding.saving_ns == pytest.approx(2_000_000 / 3, rel=1e-6)
    assert "33 % of the layers" in finding.fix


def recorded(num_dropped: int = 0):
    """The same without memory events, as Stepscope traces; its memory window has what the forward did not keep."""
    made = {"device": "cuda:0", "owner": "temporary", "phase": "forward", "born": 0, "died": 1, "bytes": GIB}
    others = [{**made, "device": "cpu"}, {**made, "owner": "activation"}, {**made, "phase": "backward"}]
    case = step(peak=0, kept=0).case()
    case._window = lambda: {"device": "cuda:0", "allocations": [made, *others], "num_dropped": num_dropped}
    return case


def test_the_memory_window_bounds_what_would_be_kept():
    (finding,) = checkpointing_with_free_memory(recorded())

    assert finding.saving_ns == pytest.approx(2_000_000)
    assert "at most 1.00 GiB" in finding.sentence
    assert "allocated_bytes" not in finding.evidence[0].rows[0]


def test_a_memory_window_with_a_gap_bounds_nothing():
    with pytest.raises(Unavailable, match="size of the recomputed"):
        checkpointing_with_free_memory(recorded(num_dropped=1))


def test_full_memory_is_a_good_reason():
    assert checkpointing_with_free_memory(step(peak=130 * GIB).case()) == []


def test_a_backward_with_a_graph_of_its_own_is_none():
    """create_graph=True numbers the backward's ops too: no forward had called them with these shapes."""
    assert checkpointing_with_free_memory(step(shapes=([8192, 4096], [4096, 1024])).case()) == []


def test_without_memory_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="profile_memory=True"):
        checkpointing_with_free_memory(step(peak=0, kept=0).case())


def test_without_shapes_it_cannot_be_checked():
    with pytest.raises(Unavailable, match="record_shapes=True"):
        checkpointing_with_free_memory(without_shapes())

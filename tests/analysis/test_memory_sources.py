"""Snapshots and traces as accounts of memory: exact on small ones, and as PyTorch's own viewer sees them."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given

from any_trace import any_trace
from memories import MIB, TRAIN, snapshot
from stepscope.analysis.memory.account import BEFORE_THE_WINDOW, Account, account
from stepscope.analysis.memory.allocator_events import memory_summary, trace_memory
from stepscope.analysis.memory.snapshot import SnapshotEnd, devices_of, snapshot_memory
from stepscope.analysis.structure.links import link
from stepscope.errors import Unavailable
from stepscope.trace.reader import read_trace
from stepscope.trace.snapshot import read_snapshot
from trace_builder import PUBLIC, TraceBuilder, needs_traces

LINEAR = "linear.py:125 forward"


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Account, SnapshotEnd]:
    return of_snapshot(tmp_path_factory.mktemp("snapshot") / "s.pickle", snapshot())


def of_snapshot(path, value) -> tuple[Account, SnapshotEnd]:
    path.write_bytes(pickle.dumps(value))
    read = read_snapshot(path)
    memory, end = snapshot_memory(read, devices_of(read)[0])
    return account(memory), end


# -- snapshots ----------------------------------------------------------------------------------------------------


def test_the_peak_of_a_snapshot_is_in_its_history(both):
    found, _ = both

    assert (found.device, found.peak_bytes, found.peak_event) == ("cuda:0", 16 * MIB - 12, 5)
    assert {part.name: part.bytes for part in found.live_at_peak.by_caller} == {
        "train.py:10 step": 8 * MIB - 12,
        "model.py:31 forward": 4 * MIB,
        LINEAR: 2 * MIB,
        "train.py:12 loss": MIB,
        None: MIB,  # there before the history, and released: nothing says who made it
    }
    assert [point.allocated_bytes // MIB for point in found.timeline] == [8, 12, 13, 8, 15, 11, 10, 9]


def test_what_is_reserved_is_followed(both):
    found, _ = both

    assert [point.reserved_bytes // MIB for point in found.timeline] == [20, 20, 22, 22, 22, 22, 22, 22]
    assert (found.peak_reserved_bytes, found.fragmentation_bytes) == (22 * MIB, 6 * MIB + 12)


@pytest.mark.parametrize("actions", [("segment_alloc", "segment_free"), ("segment_map", "segment_unmap")])
def test_a_segment_that_was_given_back_is_not_reserved(actions, tmp_path):
    value = snapshot()
    held, given_back = (dict(value["device_traces"][0][1], action=action, size=30 * MIB) for action in actions)
    value["device_traces"][0][3:3] = [held, given_back]

    found, _ = of_snapshot(tmp_path / "s.pickle", value)

    assert found.peak_reserved_bytes == 52 * MIB
    assert {point.reserved_bytes // MIB for point in found.timeline} == {20, 22}


def test_the_end_is_that_of_the_segments(both):
    _, end = both

    assert (end.num_segments, end.reserved_bytes, end.allocated_bytes) == (2, 22 * MIB, 10 * MIB)
    assert (end.requested_bytes, end.awaiting_free_bytes) == (10 * MIB - 12, MIB)
    assert (end.num_inactive_blocks, end.inactive_bytes, end.largest_inactive_bytes) == (3, 11 * MIB, 5 * MIB)
    assert end.releasable_bytes == 2 * MIB
    assert {part.name: part.bytes for part in end.live_by_caller} == {
        "train.py:10 step": 8 * MIB - 12,
        LINEAR: 2 * MIB,
    }


def test_an_out_of_memory_says_what_was_asked_for_and_what_there_was(both):
    (oom,) = both[1].ooms

    assert (oom.asked_bytes, oom.free_bytes, oom.caller) == (64 * MIB, 32 * MIB, "model.py:31 forward")
    assert (oom.event, oom.allocated_bytes, oom.reserved_bytes) == (8, 12 * MIB - 12, 22 * MIB)


def test_pytorchs_own_viewer_says_the_same(both):
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    end = both[1]

    summary = viewer.segsum(snapshot())
    lines = viewer.memory(snapshot(), format_flamegraph=lambda text: text).splitlines()

    assert f"total_reserved: {end.reserved_bytes / MIB:.1f}MiB" in summary
    assert f"total_allocated: {end.requested_bytes / MIB:.1f}MiB" in summary
    used = [line for line in lines if ";active_allocated;" in line and "<gaps>" not in line]
    assert sum(int(line.rsplit(" ", 1)[1]) for line in used) == end.requested_bytes
    (of_train,) = (line for line in used if f"{TRAIN['line']}:{TRAIN['name']}" in line)
    assert int(of_train.rsplit(" ", 1)[1]) == {p.name: p.bytes for p in end.live_by_caller}["train.py:10 step"]
    assert re.search(r"raise OutOfMemoryError # 64.0MiB requested, 32.0MiB free", viewer.trace(snapshot()))


def test_without_a_history_the_end_is_the_peak(tmp_path):
    found, end = of_snapshot(tmp_path / "s.pickle", snapshot() | {"device_traces": []})

    assert (found.peak_bytes, found.peak_event, end.num_entries) == (10 * MIB - 12, -1, 0)
    assert (found.peak_reserved_bytes, end.ooms) == (22 * MIB, ())


def test_an_empty_snapshot_has_no_memory(tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    read = read_snapshot(path)

    assert devices_of(read) == []
    memory, end = snapshot_memory(read, 0)
    assert account(memory).peak_bytes == end.reserved_bytes == 0


def test_a_release_that_the_history_lost_is_no_second_life(tmp_path):
    value = snapshot()
    value["device_traces"][0].insert(1, dict(value["device_traces"][0][0], size=3 * MIB))

    found, _ = of_snapshot(tmp_path / "s.pickle", value)

    assert found.peak_bytes == 15 * MIB - 12  # of X, only the 3 MiB that came second


# -- traces -------------------------------------------------------------------------------------------------------


def block(trace: TraceBuilder, ts: float, num_bytes: int, address: int | None, total: int | None = None) -> None:
    args = {"Device Type": 1, "Device Id": 0, "Addr": address, "Bytes": num_bytes, "Total Allocated": total}
    args |= {"Total Reserved": 5000 if ts > 50 else 4000} if total else {}
    known = {key: value for key, value in args.items() if value is not None}
    trace.raw(ph="i", cat="cpu_instant_event", name="[memory]", pid=1, tid=1, ts=ts, s="t", args=known)


def a_trace(has_totals: bool = True) -> TraceBuilder:
    """1000 bytes held before, of which 900 are released; 300 taken and kept, 500 taken at the peak and released."""
    trace = TraceBuilder().step(3, 0, 100).annotation("stepscope.module/model.mlp", 5, 60)
    trace.op("aten::mm", 11, 8).op("aten::clone", 31, 8)
    for ts, num_bytes, address, total in (
        (12, 300, 1, 1300),
        (34, 500, 2, 1800),
        (70, -500, 2, 1300),
        (80, -900, 3, 400),
    ):
        block(trace, ts, num_bytes, address, total if has_totals else None)
    return trace


def test_a_trace_with_memory_events_has_an_account():
    found = account(trace_memory(a_trace().linked()))

    assert (found.device, found.peak_bytes, found.peak_tracked_bytes, found.peak_event) == ("cuda:0", 1800, 1800, 1)
    assert {part.name: part.bytes for part in found.live_at_peak.by_op} == {
        BEFORE_THE_WINDOW: 1000,
        "aten::clone": 500,
        "aten::mm": 300,
    }
    assert {part.name: part.bytes for part in found.live_at_peak.by_module} == {None: 1000, "model.mlp": 800}
    assert [(p.allocated_bytes, p.reserved_bytes) for p in found.timeline] == [
        (1000, None),
        (1300, 4000),
        (1800, 4000),
        (1300, 5000),
        (400, 5000),
    ]
    assert [stage.name for stage in found.stages][:2] == ["start", "forward"]
    assert (found.peak_reserved_bytes, found.fragmentation_bytes) == (5000, 2200)


def test_a_trace_without_totals_says_the_least_it_can_be():
    memory = trace_memory(a_trace(has_totals=False).linked())

    assert memory["allocator"] is None and account(memory).peak_bytes == 900 + 800


def test_a_trace_without_memory_events_or_addresses_is_refused():
    with pytest.raises(Unavailable, match="profile_memory"):
        trace_memory(TraceBuilder().op("aten::mm", 0, 1).linked())
    trace = TraceBuilder().op("aten::mm", 0, 9)
    block(trace, 2, 300, None, 300)
    with pytest.raises(Unavailable, match="addresses"):
        trace_memory(trace.linked())


def agrees_with_the_summary(linked) -> None:
    summaries = memory_summary(linked)
    try:
        found = account(trace_memory(linked))
    except Unavailable:
        return
    (summary,) = (s for s in summaries if found.device in (s.device_type, f"{s.device_type}:{s.device}"))
    assert found.peak_bytes == summary.peak_allocated_bytes
    assert sum(part.bytes for part in found.live_at_peak.by_op) == found.peak_bytes


@given(any_trace())
def test_on_any_trace_the_peak_is_that_of_the_summary(trace):
    agrees_with_the_summary(trace.linked())


@needs_traces
@pytest.mark.parametrize("name", ["qwen0.5b_h100_stacks.json.gz"])
def test_on_real_traces_the_peak_is_that_of_the_summary(name):
    linked = link(read_trace(PUBLIC / name))

    agrees_with_the_summary(linked)
    assert account(trace_memory(linked)).peak_tracked_bytes == memory_summary(linked)[0].peak_allocated_bytes

"""Whose memory it was at every moment, and what is alive at the peak: all of it adds up to the account."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memories import a_step, tensor, transformer
from stepscope.analysis.memory.account import MAX_POINTS, account
from stepscope.analysis.memory.allocator_events import trace_memory
from stepscope.analysis.memory.by_owner import alive_at_peak, known_split, levels_by
from stepscope.analysis.structure.links import link
from stepscope.trace.reader import read_trace
from trace_builder import TRACES, needs_traces


def sums(memory: dict[str, Any], by: str, most: int = MAX_POINTS) -> list[int]:
    found = levels_by(memory, by, most)
    return [sum(found.levels[name][i] for name in found.names) for i in range(len(found.events))]


def test_every_owner_has_its_level_after_every_birth_and_death():
    found = levels_by(a_step(), "owner")

    assert found.events == (-1, 0, 1, 2, 3, 4, 5, 6, 7)
    assert found.levels["parameter"] == (1000,) * 9
    assert found.levels["input"] == (0, 100, 100, 100, 100, 100, 100, 100, 100)
    assert found.levels["activation"] == (0, 0, 600, 1200, 1200, 1200, 1200, 600, 0)
    assert found.levels["temporary"] == (0, 0, 0, 0, 1000, 0, 0, 0, 0)
    assert found.levels["gradient"] == (0, 0, 0, 0, 0, 0, 400, 400, 400)
    assert found.events[found.peak_index] == 3
    assert found.names == ("activation", "parameter", "temporary", "input", "gradient")


def test_another_devices_memory_is_in_none_of_them():
    assert max(sums(a_step(), "owner")) == account(a_step()).peak_tracked_bytes == 3300


@pytest.mark.parametrize("memory", [a_step(), transformer(6), transformer(12)], ids=["step", "short", "long"])
@pytest.mark.parametrize("by", ["owner", "phase", "dtype"])
def test_at_every_point_of_the_timeline_the_levels_are_what_was_allocated(memory, by):
    found, timeline = levels_by(memory, by), account(memory).timeline

    assert found.events == tuple(point.event for point in timeline)
    assert found.times_ns == tuple(point.time_ns for point in timeline)
    assert sums(memory, by) == [point.allocated_bytes for point in timeline]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),
            st.sampled_from(["parameter", "activation", None]),
            st.one_of(st.none(), st.integers(0, 30)),
            st.one_of(st.none(), st.integers(0, 30)),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(2, 40),
)
def test_however_few_points_the_peak_and_what_it_is_made_of_are_among_them(rows, most):
    allocations = [
        tensor(size, owner, born, None if died is None else (born or 0) + died) for size, owner, born, died in rows
    ]
    memory = {"device": "cuda:0", "allocations": allocations}
    found, whole = levels_by(memory, "owner", most), account(memory)

    at_peak = {name: found.levels[name][found.peak_index] for name in found.names}

    assert found.events[found.peak_index] == whole.peak_event
    assert sum(at_peak.values()) == max(sums(memory, "owner", most)) == whole.peak_tracked_bytes
    assert {name: size for name, size in at_peak.items() if size} == {
        part.name: part.bytes for part in whole.live_at_peak.by_owner if part.bytes
    }
    assert sum(each.bytes for each in alive_at_peak(memory)) == whole.peak_tracked_bytes


def test_what_is_alike_at_the_peak_is_one_row():
    first, *_ = found = alive_at_peak(a_step())

    assert sum(each.bytes for each in found) == 3300
    assert (first.owner, first.phase, first.module, first.op) == ("activation", "forward", "blocks.*.mlp", "aten.mm")
    assert (first.shape, first.dtype, first.bytes, first.num_allocations) == ((150,), "float32", 1200, 2)
    assert {(each.owner, each.phase) for each in found} >= {("parameter", "before the window"), ("input", "data")}


def test_without_owners_the_phase_is_what_is_known():
    assert known_split(a_step()) == "owner"
    assert known_split({"allocations": [{"bytes": 1, "phase": "forward"}]}) == "phase"


@needs_traces
def test_a_real_trace_has_phases_that_add_up_to_its_timeline():
    memory = trace_memory(link(read_trace(TRACES / "h200" / "gpt2_eager.json.gz")))
    found, whole = levels_by(memory, known_split(memory)), account(memory)

    assert found.by == "phase"
    assert sums(memory, "phase") == [point.allocated_bytes for point in whole.timeline]
    assert sum(found.levels[name][found.peak_index] for name in found.names) == whole.peak_bytes

"""The account of memory: exact on a step written by hand, adding up on any."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memories import a_step, tensor
from stepscope.analysis.memory.account import BEFORE_THE_WINDOW, PARTS, REMAINDER, Account, Part, account
from stepscope.analysis.memory.module_tree import frontier
from stepscope.analysis.memory.timeline import thinned_indices


@pytest.fixture(scope="module")
def found() -> Account:
    return account(a_step())


def named(parts: tuple[Part, ...]) -> dict[str | None, int]:
    return {part.name: part.bytes for part in parts}


def test_the_peak_is_where_births_and_deaths_are_most(found):
    assert (found.device, found.peak_tracked_bytes, found.peak_event, found.peak_stage) == (
        "cuda:0",
        3300,
        3,
        "forward",
    )


def test_the_allocators_own_peak_is_the_peak_and_the_remainder_is_a_row(found):
    assert (found.peak_bytes, found.remainder_bytes, found.remainder_at_start_bytes) == (4100, 800, 24)
    assert named(found.live_at_peak.by_owner) == {
        "parameter": 1000,
        "activation": 1200,
        "temporary": 1000,
        "input": 100,
        REMAINDER: 800,
    }


def test_every_split_adds_up_to_the_peak(found):
    for name in PARTS:
        parts = getattr(found.live_at_peak, f"by_{name}")
        assert sum(part.bytes for part in parts) == 4100
        assert sum(part.share for part in parts) == pytest.approx(1)
        assert sum(part.num_allocations for part in parts) == 5
        assert [part.bytes for part in parts] == sorted((part.bytes for part in parts), reverse=True)


def test_each_split_names_what_it_is_by(found):
    live = found.live_at_peak
    assert named(live.by_phase) == {BEFORE_THE_WINDOW: 1000, "data": 100, "forward": 2200, REMAINDER: 800}
    assert named(live.by_dtype) == {"float32": 2200, "int64": 100, "bfloat16": 1000, REMAINDER: 800}
    assert named(live.by_caller) == {None: 2100, "train.py:7 forward": 1200, REMAINDER: 800}
    assert named(live.by_op)["aten.mm"] == 1200
    assert named(live.by_module)["blocks.1"] == 1000


def test_without_the_allocators_peak_what_is_listed_is_the_peak():
    found = account(a_step(allocator=None))

    assert (found.peak_bytes, found.remainder_bytes, found.fragmentation_bytes) == (3300, None, None)
    assert REMAINDER not in named(found.live_at_peak.by_owner)


def test_sizes_that_the_caller_rounds_are_the_ones_that_count():
    memory = a_step(allocator=None)
    sizes = [-(-each["bytes"] // 512) * 512 for each in memory["allocations"]]

    found = account(memory, sizes)

    assert found.peak_bytes == 1024 + 512 + 1024 + 1024 + 1024
    assert named(found.live_at_peak.by_owner)["activation"] == 2048


def test_memory_after_each_stage(found):
    stages = [(stage.name, stage.first_event, stage.after_bytes, stage.peak_bytes) for stage in found.stages]

    assert stages == [
        ("start", -1, 1000, 1000),
        ("data", 0, 1100, 1100),
        ("forward", 1, 2300, 3300),
        ("backward", 5, 1500, 2700),
        ("optimizer", 8, 1500, 1500),
    ]


def test_activations_and_saved_are_rolled_up_the_tree(found):
    kept = {row.module: (row.bytes, row.total_bytes, row.num_tensors) for row in found.activations}

    assert kept["blocks.0.mlp"] == (600, 600, 1)
    assert kept["blocks"] == kept[""] == (0, 1200, 0)
    assert {row.module: row.total_bytes for row in found.saved}[""] == 1100


def test_activations_of_micro_batches_are_not_added():
    memory = a_step(
        allocations=[tensor(10, "activation", 0, 1, module="a"), tensor(10, "activation", 2, 3, module="a")]
    )

    assert account(memory).activations[0].bytes == 10


def test_the_largest_allocations_are_told_by_place(found):
    assert [(large.bytes, large.owner, large.num_at_peak) for large in found.largest[:2]] == [
        (1000, "parameter", 1),
        (1000, "temporary", 1),
    ]
    alike = next(large for large in found.largest if large.bytes == 600)
    assert (alike.num_allocations, alike.module, alike.first_module) == (2, "blocks.*.mlp", "blocks.0.mlp")
    assert (alike.caller, alike.shape, alike.dtype, alike.phase) == (
        "train.py:7 forward",
        (150,),
        "float32",
        "forward",
    )
    assert {large.owner: large.bytes for large in found.largest_by_owner} == {
        "parameter": 1000,
        "temporary": 1000,
        "activation": 600,
        "gradient": 400,
        "input": 100,
    }


def test_what_the_allocator_says(found):
    assert (found.peak_reserved_bytes, found.fragmentation_bytes, found.num_retries) == (6000, 1900, 1)


def test_graphs_left_alive_are_named(found):
    (left,) = found.left_alive

    assert (left.bytes, left.num_tensors, left.op, left.frame) == (77, 3, "MulBackward0", "train.py:9 losses")


def test_other_devices_are_kept_apart(found):
    assert found.other_devices == {"cpu": 50_000} and found.num_allocations == 6


def test_the_timeline_is_every_level(found):
    assert [(p.event, p.allocated_bytes, p.time_ns) for p in found.timeline] == [
        (-1, 1000, None),
        (0, 1100, 0),
        (1, 1700, 1000),
        (2, 2300, 2000),
        (3, 3300, 3000),
        (4, 2300, 4000),
        (5, 2700, 5000),
        (6, 2100, 6000),
        (7, 1500, 7000),
    ]


def test_what_dies_where_another_is_born_is_gone_by_then():
    # As when a trace has lost the release of an address that is taken again.
    found = account(a_step(allocations=[tensor(40, "gradient", 1), tensor(30, "input", 0, 1)], allocator=None))

    assert found.peak_bytes == 40 and named(found.live_at_peak.by_owner) == {"gradient": 40}


def test_reserved_over_time_gives_the_fragmentation_at_the_peak():
    found = account(a_step(reserved=[(-1, 2000), (2, 5000), (6, 9000)]))

    assert found.fragmentation_bytes == 5000 - 3300
    assert [point.reserved_bytes for point in found.timeline][:5] == [2000, 2000, 2000, 5000, 5000]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(4, 40))
def test_a_thinned_timeline_keeps_both_ends_and_the_peak(levels, most):
    kept = thinned_indices(levels, most)

    assert len(kept) <= most and set(kept) <= set(range(len(levels)))
    assert (kept[0], kept[-1]) == (0, len(levels) - 1)
    assert max(levels[index] for index in kept) == max(levels)


@st.composite
def lives(draw):
    """Allocations whose births and deaths are numbered in one order."""
    num = draw(st.integers(0, 12))
    events = draw(st.permutations(range(2 * num)))
    found = []
    for index in range(num):
        born, died = sorted(events[2 * index : 2 * index + 2])
        owner = draw(st.sampled_from(["parameter", "activation", "temporary"]))
        module = draw(st.sampled_from([None, "", "a", "a.0.b", "a.1.b"]))
        size = draw(st.integers(0, 1000))
        before, after = draw(st.booleans()), draw(st.booleans())
        found.append(tensor(size, owner, None if before else born, None if after else died, module=module))
    return found


@given(lives())
def test_on_any_lives_the_parts_add_up_and_nothing_is_higher_than_the_peak(allocations):
    found = account(a_step(allocations=allocations, allocator=None))

    moments = [-1, *(each[key] for each in allocations for key in ("born", "died") if each[key] is not None)]
    levels = [
        sum(
            each["bytes"]
            for each in allocations
            if (each["born"] is None or each["born"] <= at) and (each["died"] is None or each["died"] > at)
        )
        for at in moments
    ]
    assert found.peak_bytes == max(levels)
    for name in PARTS:
        assert sum(part.bytes for part in getattr(found.live_at_peak, f"by_{name}")) == found.peak_bytes
    assert max(stage.peak_bytes for stage in found.stages) == found.peak_bytes


@given(st.dictionaries(st.sampled_from([None, "", "a", "a.0", "a.0.b", "a.1.b", "c.d.e"]), st.integers(1, 9)))
def test_rows_of_modules_hold_all_the_bytes(sizes):
    assert sum(num_bytes for _, num_bytes in frontier(sizes, 4)) == sum(sizes.values())


def test_it_needs_nothing_but_the_standard_library():
    program = "import sys, stepscope.analysis.memory.account, stepscope.session.memory_scaling\n"
    program += "import stepscope.document.sections.memory, stepscope.render.svg\n"
    program += "print([name for name in ('torch', 'polars', 'msgspec', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout.strip() == "[]", done.stderr

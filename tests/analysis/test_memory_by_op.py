"""What each op allocated: exact on a step written by hand."""

from __future__ import annotations

from memories import a_step
from stepscope.analysis.memory.account import account
from stepscope.analysis.memory.by_owner import OpBytes, memory_by_op


def test_each_op_has_what_it_allocated_in_the_step_most_first():
    """The peak is at the temporary of 1000: both activations are alive, the gradient is not there yet."""
    assert memory_by_op(a_step()) == (
        OpBytes("aten.mm", num_allocations=3, allocated_bytes=1600, largest_bytes=600, at_peak_bytes=1200),
        OpBytes("aten.add", num_allocations=1, allocated_bytes=1000, largest_bytes=1000, at_peak_bytes=1000),
        OpBytes("aten._to_copy", num_allocations=1, allocated_bytes=100, largest_bytes=100, at_peak_bytes=100),
    )


def test_what_ops_have_at_the_peak_and_what_was_there_before_are_the_peak():
    step = a_step()
    before = sum(each["bytes"] for each in step["allocations"] if each["born"] is None)

    assert sum(row.at_peak_bytes for row in memory_by_op(step)) + before == account(step).peak_tracked_bytes

"""What one pass under the profiler is said to take."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile

from stepscope.sweep import measure


@pytest.mark.long
def test_garbage_from_before_is_not_counted_as_given_back():
    """The profiler knows blocks from the windows before: what dies of those within this one is none of its bytes."""
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
            cycle = [torch.zeros(16384)]
            cycle.append(cycle)
        del cycle

        def run_once():
            gc.collect()
            return torch.ones(1024).sum()

        peak = measure.traced(run_once, "cpu", [], None).peak_bytes
    finally:
        gc.enable()

    assert peak == 1024 * 4 + 4

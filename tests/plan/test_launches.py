"""Triton kernels in a plan launch nothing, and what their callers allocate is seen."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from stepscope.planner.emulation.torch_support import launching_nothing


def test_a_launch_does_nothing():
    ran = []

    @triton.jit
    def kernel(x):
        pass

    with launching_nothing(may_import=False):
        ran.append(kernel[(1,)]("no tensor at all"))
    assert ran == [None]
    with pytest.raises(Exception, match=r".+"):  # without a device, or with a string for a pointer
        kernel[(1,)]("no tensor at all")

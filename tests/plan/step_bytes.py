"""What a step of a point really takes on this CPU."""

from __future__ import annotations

from stepscope.sweep import measure, prepare
from stepscope.workloads.registry import find


def measured_bytes(point):
    """The most bytes of tensors at once in a step that is not the first: every allocation event of the profiler."""
    workload = find(point.workload)
    built = prepare.build(workload, workload.config(**point.config), 0, "cpu")
    one_pass = prepare.Pass(built.module, prepare.make_batch(built, 0, "cpu"), point.run)
    one_pass()
    one_pass()
    one_pass.drop_gradients()
    return measure.traced(one_pass, "cpu", one_pass.tensors(), None).peak_bytes

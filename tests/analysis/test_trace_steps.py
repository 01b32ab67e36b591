"""Steps, whoever labeled them or nobody; and on any trace, that steps and phases tile the time."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given

from any_trace import any_trace
from stepscope.analysis.ranks.rank_account import phase_table, step_table
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.time.gpu_time import gpu_time
from stepscope.analysis.time.phases import PHASES
from trace_builder import AUTOGRAD, TraceBuilder, phases_of

BACKWARD = "autograd::engine::evaluate_function: MmBackward0"
OPTIMIZER = "Optimizer.step#SGD.step"
DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def steps_of(linked: Linked) -> list[tuple[int, int, int]]:
    """Number, start and end of each step, in whole microseconds."""
    return [(step, start // 1000, end // 1000) for step, start, end in linked.steps.table.rows()]


# -- steps ------------------------------------------------------------------------------------------------------


def test_the_profilers_labels_are_the_steps():
    linked = TraceBuilder().step(7, 0, 100).step(8, 102, 90).op("aten::mm", 10, 5).linked()

    assert linked.steps.source == "ProfilerStep"
    assert steps_of(linked) == [(7, 0, 100), (8, 102, 192)]


def test_a_step_ends_where_the_next_begins_should_labels_overlap():
    linked = TraceBuilder().step(1, 0, 110).step(2, 100, 50).op("aten::mm", 10, 5).linked()

    assert steps_of(linked) == [(1, 0, 100), (2, 100, 150)]


def test_a_label_that_occurs_twice_is_one_step():
    linked = TraceBuilder().step(1, 0, 100).annotation("ProfilerStep#1", 1, 98, AUTOGRAD).op("a", 5, 5).linked()

    assert steps_of(linked) == [(1, 0, 100)]


@pytest.mark.parametrize("category", ["cpu_op", "Operator"])
def test_labels_that_an_old_profiler_recorded_as_ops_are_the_labels_they_are(category):
    # GIVEN the profiler's labels in the category of ops
    trace = TraceBuilder().slice(category, "ProfilerStep#3", 0, 100).slice(category, DATA, 5, 20)
    trace.slice(category, "aten::mm", 30, 10).slice(category, OPTIMIZER, 60, 30)
    linked = trace.linked()

    # THEN they make the step and its phases, and are no ops
    assert linked.steps.source == "ProfilerStep" and steps_of(linked) == [(3, 0, 100)]
    assert phases_of(linked) == [
        ("other", 0, 5),
        ("data", 5, 25),
        ("other", 25, 30),
        ("forward", 30, 40),
        ("other", 40, 60),
        ("optimizer", 60, 90),
        ("other", 90, 100),
    ]
    assert linked.host.filter(pl.col("kind") == "op")["name"].to_list() == ["aten::mm"]


def test_without_labels_a_step_ends_with_each_optimizer_step():
    trace = TraceBuilder().op("aten::mm", 5, 10).annotation(OPTIMIZER, 80, 10).op("aten::mm", 110, 10)
    trace.annotation(OPTIMIZER, 180, 10).op("aten::item", 195, 5)
    linked = trace.linked()

    assert linked.steps.source == "optimizer"
    assert steps_of(linked) == [(0, 5, 90), (1, 90, 190)]
    assert linked.host.filter(pl.col("name").cast(pl.String) == "aten::item")["step"].to_list() == [None]


def test_an_optimizer_inside_another_ends_no_step_of_its_own():
    outer, inner = "Optimizer.step#ZeroRedundancyOptimizer.step", "Optimizer.step#AdamW.step"
    linked = TraceBuilder().op("aten::mm", 0, 5).annotation(outer, 20, 30).annotation(inner, 22, 26).linked()

    assert steps_of(linked) == [(0, 0, 50)]


def test_without_an_optimizer_a_step_ends_with_each_stretch_of_autograd():
    trace = TraceBuilder().op("aten::mm", 5, 10).op(BACKWARD, 20, 10, AUTOGRAD).op(BACKWARD, 31, 9, AUTOGRAD)
    trace.op("aten::mm", 50, 10).op(BACKWARD, 60, 20, AUTOGRAD)
    linked = trace.linked()

    assert linked.steps.source == "backward"
    assert steps_of(linked) == [(0, 5, 40), (1, 40, 80)]


def test_without_any_of_these_there_are_no_steps():
    linked = TraceBuilder().op("aten::mm", 5, 10).annotation("my label", 0, 100).linked()

    assert linked.steps.source == "none" and linked.steps.num == 0
    assert linked.host["step"].null_count() == linked.host.height


def test_a_host_event_belongs_to_the_step_it_starts_in():
    linked = TraceBuilder().step(1, 0, 100).step(2, 100, 100).op("a", 95, 20).op("b", 100, 5).op("c", 250, 5).linked()
    by_name = dict(zip(linked.host["name"].cast(pl.String), linked.host["step"]))

    assert (by_name["a"], by_name["b"], by_name["c"]) == (1, 2, None)


def test_a_step_has_the_gpu_time_that_passed_in_it_and_the_kernels_it_launched():
    # GIVEN a kernel launched in step 1 that runs into step 2, and one launched in step 2 that runs after it
    trace = TraceBuilder().step(1, 0, 100).step(2, 100, 100).launch("a", 50, (90, 30)).launch("b", 150, (195, 50))

    assert trace.account().steps.sort("step").select("step", "duration_ns", "gpu_busy_ns", "num_kernels").rows() == [
        (1, 100_000, 10_000, 1),
        (2, 100_000, 25_000, 1),
    ]


# -- one step alone ---------------------------------------------------------------------------------------------


def two_steps() -> TraceBuilder:
    trace = TraceBuilder().step(1, 0, 100).step(2, 100, 100)
    trace.op("aten::mm", 10, 20).launch("early", 12, (90, 40))
    return trace.op("aten::add", 110, 20).launch("late", 112, (150, 10)).kernel("nobody's", 20, 5)


@pytest.mark.parametrize(("step", "kernels"), [(1, {"early"}), (2, {"late"})])
def test_one_step_is_the_work_that_it_launched(step, kernels):
    account = two_steps().account(step)

    assert set(account.top_kernels["name"]) == kernels
    assert account.steps["step"].to_list() == [step]


def test_one_step_is_accounted_for_like_a_whole_trace():
    account = two_steps().account(1)

    # THEN the window is that of its own work, whenever that ran
    assert account.gpu_time.window_ns == account.gpu_time.busy_ns == 40_000
    assert int(account.idle_causes["total_ns"].sum()) == account.gpu_time.idle_ns


def test_a_step_that_was_found_keeps_its_number():
    trace = TraceBuilder().op("aten::mm", 5, 10).annotation(OPTIMIZER, 80, 10)
    trace.op("aten::mm", 110, 10).annotation(OPTIMIZER, 180, 10)

    assert trace.account(1).steps["step"].to_list() == [1]


# -- any trace --------------------------------------------------------------------------------------------------


@given(any_trace())
def test_phases_tile_the_time_of_the_host_and_their_sums_are_exact(trace):
    linked = trace.linked()
    table, phases, steps = phase_table(linked), linked.steps.phases, linked.steps.table

    # THEN phases follow one another without a gap, from the first host event to the last
    host = linked.host
    if host.is_empty():
        assert phases.is_empty()
    else:
        assert phases["end_ns"].to_list()[:-1] == phases["start_ns"].to_list()[1:]
        whole = int(host["end_ns"].max()) - int(host["start_ns"].min())
        assert int((phases["end_ns"] - phases["start_ns"]).sum()) == whole
        # AND the sums of the table are the steps' time, or the host's where there are no steps
        in_steps = int((steps["end_ns"] - steps["start_ns"]).sum())
        assert int(table["host_ns"].sum()) == (in_steps if steps.height else whole)
    assert table["phase"].to_list() == [*PHASES, "unattributed"]
    assert int(table["device_ns"].sum()) == gpu_time(linked.device).busy_ns

    # AND steps come in order, and each has the nanoseconds of GPU time that passed in it
    assert (steps["end_ns"] > steps["start_ns"]).all()
    assert (steps["end_ns"].head(-1) <= steps["start_ns"].tail(-1)).all()
    busy = {ns for start, end in linked.device.select("start_ns", "end_ns").rows() for ns in range(start, end)}
    for _, start, length, gpu_busy_ns in (
        step_table(linked).select("step", "start_ns", "duration_ns", "gpu_busy_ns").rows()
    ):
        assert gpu_busy_ns == len(busy & set(range(start, start + length)))

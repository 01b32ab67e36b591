"""Phases, from our labels, from the users', or from autograd: each stretch of them on small traces."""

from __future__ import annotations

import pytest

from trace_builder import AUTOGRAD, TraceBuilder, phases_of

BACKWARD = "autograd::engine::evaluate_function: MmBackward0"
OPTIMIZER = "Optimizer.step#SGD.step"
ZERO_GRAD = "Optimizer.zero_grad#SGD.zero_grad"
DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def test_our_own_labels_are_the_phases_and_nothing_else_is():
    # GIVEN labels of ours around autograd that would say otherwise
    trace = TraceBuilder().step(0, 0, 100).annotation("stepscope.phase/data", 0, 10)
    trace.annotation("stepscope.phase/forward", 10, 30).annotation("stepscope.phase/backward", 40, 30)
    trace.annotation("stepscope.phase/optimizer", 70, 20).annotation("stepscope.phase/before_forward", 90, 10)
    trace.op("aten::mm", 2, 3).op(BACKWARD, 72, 5, AUTOGRAD).annotation("## forward ##", 91, 5)
    linked = trace.linked()

    assert linked.steps.phase_source == "labels"
    assert phases_of(linked) == [
        ("data", 0, 10),
        ("forward", 10, 40),
        ("backward", 40, 70),
        ("optimizer", 70, 90),
        ("other", 90, 100),
    ]


def test_what_people_write_in_record_function_makes_phases():
    trace = TraceBuilder().step(0, 0, 100).annotation("## wait_for_batch ##", 0, 10)
    trace.annotation("## forward ##", 15, 25).annotation("## backward ##", 40, 30)
    trace.annotation("## optimizer ##", 70, 20).op("aten::mm", 16, 3).op("## something ##", 95, 1)
    linked = trace.linked()

    assert linked.steps.phase_source == "annotations"
    assert phases_of(linked) == [
        ("data", 0, 10),
        ("other", 10, 15),
        ("forward", 15, 40),
        ("backward", 40, 70),
        ("optimizer", 70, 90),
        ("other", 90, 100),
    ]


def test_what_users_did_not_label_is_found_from_autograd():
    # GIVEN a label around the forward only
    trace = TraceBuilder().step(0, 0, 100).annotation("forward", 10, 20).op("aten::mm", 12, 5)
    linked = trace.op(BACKWARD, 40, 20, AUTOGRAD).linked()

    assert phases_of(linked) == [
        ("other", 0, 10),
        ("forward", 10, 30),
        ("other", 30, 40),
        ("backward", 40, 60),
        ("other", 60, 100),
    ]


def training_step(autograd_thread: int) -> TraceBuilder:
    """A step whose backward is two nodes with an op inside each."""
    trace = TraceBuilder().step(0, 0, 100).op("aten::linear", 10, 20).op("aten::loss", 35, 5)
    trace.op(BACKWARD, 50, 10, autograd_thread, sequence=2, forward_thread=1).op("aten::mm", 52, 5, autograd_thread)
    trace.op(BACKWARD, 62, 8, autograd_thread, sequence=1, forward_thread=1).op("aten::mm", 63, 5, autograd_thread)
    return trace.annotation(OPTIMIZER, 75, 15).op("aten::add_", 76, 10)


@pytest.mark.parametrize("autograd_thread", [AUTOGRAD, 1], ids=["on a thread of its own", "on the main thread"])
def test_autograd_tells_forward_and_backward(autograd_thread):
    linked = training_step(autograd_thread).linked()

    # THEN the forward lasts up to the backward, and the backward's nodes are one stretch
    assert phases_of(linked) == [
        ("other", 0, 10),
        ("forward", 10, 50),
        ("backward", 50, 70),
        ("other", 70, 75),
        ("optimizer", 75, 90),
        ("other", 90, 100),
    ]


def test_without_any_label_phases_come_from_autograd_alone():
    trace = TraceBuilder().op("aten::mm", 10, 10).op(BACKWARD, 20, 10, AUTOGRAD).op("aten::add_", 40, 5)
    linked = trace.linked()

    assert linked.steps.phase_source == "autograd"
    assert phases_of(linked) == [("forward", 10, 20), ("backward", 20, 30), ("other", 30, 45)]


@pytest.mark.parametrize("autograd_thread", [AUTOGRAD, 1], ids=["on a thread of its own", "on the main thread"])
def test_gradient_accumulation_has_a_forward_before_each_backward(autograd_thread):
    trace = TraceBuilder().step(0, 0, 100).op("aten::mm", 10, 10).op(BACKWARD, 20, 10, autograd_thread)
    trace.op("aten::mm", 32, 8).op(BACKWARD, 40, 10, autograd_thread).annotation(OPTIMIZER, 60, 10)

    assert phases_of(trace.linked()) == [
        ("other", 0, 10),
        ("forward", 10, 20),
        ("backward", 20, 30),
        ("other", 30, 32),
        ("forward", 32, 40),
        ("backward", 40, 50),
        ("other", 50, 60),
        ("optimizer", 60, 70),
        ("other", 70, 100),
    ]


def test_an_op_that_starts_as_autograd_pauses_parts_two_stretches():
    # GIVEN the main thread's op starts in the very nanosecond in which autograd stops
    trace = TraceBuilder().op("aten::mm", 0, 10).op(BACKWARD, 10, 10, AUTOGRAD).op("aten::mm", 20, 5)
    trace.op(BACKWARD, 30, 10, AUTOGRAD)

    assert phases_of(trace.linked()) == [
        ("forward", 0, 10),
        ("backward", 10, 20),
        ("forward", 20, 30),
        ("backward", 30, 40),
    ]


def test_inference_is_forward_from_the_first_op_to_the_last():
    trace = TraceBuilder().step(0, 0, 100).op("aten::mm", 10, 5).op("aten::mm", 30, 10)
    trace.step(1, 105, 100).op("aten::mm", 125, 10)

    assert phases_of(trace.linked()) == [
        ("other", 0, 10),
        ("forward", 10, 40),
        ("other", 40, 125),
        ("forward", 125, 135),
        ("other", 135, 205),
    ]


def test_a_forward_of_inference_does_not_reach_over_the_border_of_steps_that_touch():
    trace = TraceBuilder().step(0, 0, 100).op("aten::mm", 10, 5).op("aten::mm", 30, 10)
    trace.step(1, 100, 100).op("aten::mm", 120, 10)

    assert phases_of(trace.linked()) == [
        ("other", 0, 10),
        ("forward", 10, 40),
        ("other", 40, 120),
        ("forward", 120, 130),
        ("other", 130, 200),
    ]


def test_what_comes_after_the_optimizer_is_not_the_forward_of_the_next_step():
    # GIVEN steps that touch, the first of which ends with an op of logging
    trace = TraceBuilder().step(0, 0, 100).op("aten::mm", 10, 10).op(BACKWARD, 20, 10, AUTOGRAD)
    trace.annotation(OPTIMIZER, 40, 10).op("aten::item", 60, 5)
    trace.step(1, 100, 100).op("aten::mm", 110, 10).op(BACKWARD, 120, 10, AUTOGRAD)

    assert phases_of(trace.linked())[5:] == [
        ("other", 50, 110),
        ("forward", 110, 120),
        ("backward", 120, 130),
        ("other", 130, 200),
    ]


def test_the_dataloaders_label_is_the_data_phase_and_the_forward_starts_after_it():
    trace = TraceBuilder().step(0, 0, 100).annotation(DATA, 5, 20).op("aten::stack", 10, 5)
    trace.op("aten::mm", 30, 10).op(BACKWARD, 40, 10, AUTOGRAD)

    assert phases_of(trace.linked()) == [
        ("other", 0, 5),
        ("data", 5, 25),
        ("other", 25, 30),
        ("forward", 30, 40),
        ("backward", 40, 50),
        ("other", 50, 100),
    ]


def test_a_zero_grad_between_forward_and_backward_takes_only_its_own_time():
    # GIVEN the order of most tutorials: forward, zero_grad, backward, step
    trace = TraceBuilder().step(0, 0, 100).annotation(DATA, 0, 10).op("aten::conv2d", 12, 20)
    trace.annotation(ZERO_GRAD, 40, 10).op("aten::zero_", 42, 4).op(BACKWARD, 50, 20, AUTOGRAD)

    assert phases_of(trace.annotation(OPTIMIZER, 70, 20).linked()) == [
        ("data", 0, 10),
        ("other", 10, 12),
        ("forward", 12, 40),
        ("optimizer", 40, 50),
        ("backward", 50, 70),
        ("optimizer", 70, 90),
        ("other", 90, 100),
    ]


def test_steps_labeled_on_a_thread_without_ops_leave_the_main_thread_to_the_ops():
    trace = TraceBuilder().annotation("ProfilerStep#1", 0, 100, thread=99).op("aten::mm", 10, 20)

    assert phases_of(trace.linked()) == [("other", 0, 10), ("forward", 10, 30), ("other", 30, 100)]


def test_where_phases_overlap_optimizer_comes_before_data_before_backward_before_forward():
    trace = TraceBuilder().step(0, 0, 100).annotation("forward", 0, 80).annotation("backward", 20, 60)
    trace.annotation(DATA, 40, 40).annotation(ZERO_GRAD, 60, 10)

    assert phases_of(trace.linked()) == [
        ("forward", 0, 20),
        ("backward", 20, 40),
        ("data", 40, 60),
        ("optimizer", 60, 70),
        ("data", 70, 80),
        ("other", 80, 100),
    ]


def test_gpu_work_has_the_phase_in_which_it_was_launched():
    # GIVEN a kernel that is launched in the forward and runs while the host is in the backward
    trace = TraceBuilder().step(0, 0, 100).annotation("forward", 10, 30).annotation("backward", 40, 30)
    trace.launch("a", 35, (50, 30)).launch("b", 45, (80, 10))
    account = trace.account()

    assert account.phases.select("phase", "host_ns", "device_ns", "num_kernels").rows() == [
        ("data", 0, 0, 0),
        ("forward", 30_000, 30_000, 1),
        ("backward", 30_000, 10_000, 1),
        ("optimizer", 0, 0, 0),
        ("other", 40_000, 0, 0),
        ("unattributed", 0, 0, 0),
    ]


def test_phases_of_steps_have_what_steps_launched_and_the_rest_is_a_row():
    # GIVEN a kernel of a step, one launched after it, and two that nobody is seen to launch, one beside the step's
    trace = TraceBuilder().step(0, 0, 100).annotation("forward", 10, 30).op("aten::mm", 190, 20)
    trace.launch("a", 35, (50, 30)).launch("after", 200, (210, 7)).kernel("early", 5, 4)
    account = trace.kernel("beside", 75, 10, stream=8).account()
    table = account.phases.select("phase", "device_ns", "num_kernels").rows()

    # THEN the phases are those of the step, and all rows add up to the busy time
    assert table[1] == ("forward", 30_000, 1) and table[4] == ("other", 0, 0)
    assert table[5] == ("unattributed", 16_000, 3)
    assert sum(ns for _, ns, _ in table) == account.gpu_time.busy_ns
    assert account.launches["num_kernel_launches_per_step"] == sum(num for _, _, num in table[:5])


def test_a_moment_with_work_of_two_phases_goes_to_the_later():
    trace = TraceBuilder().annotation("forward", 0, 20).annotation("backward", 20, 20)
    trace.launch("a", 5, (50, 10)).launch("b", 25, (55, 10), stream=8)
    table = trace.account().phases

    assert dict(zip(table["phase"], table["device_ns"])) == {
        "data": 0,
        "forward": 5_000,
        "backward": 10_000,
        "optimizer": 0,
        "other": 0,
        "unattributed": 0,
    }


def test_work_of_no_phase_gives_way_to_work_of_one():
    # GIVEN a kernel that was launched outside every phase, running beside one of the forward
    trace = TraceBuilder().op("aten::mm", 0, 2).annotation("forward", 20, 20)
    trace.launch("nobody's", 5, (50, 10)).launch("forward's", 25, (55, 10), stream=8)
    table = trace.account().phases

    assert dict(zip(table["phase"], table["device_ns"]))["forward"] == 10_000
    assert dict(zip(table["phase"], table["device_ns"]))["other"] == 5_000


def test_the_host_time_of_phases_is_that_inside_steps():
    trace = TraceBuilder().annotation("forward", 0, 50).step(0, 20, 100).op("aten::mm", 5, 5).op("aten::mm", 150, 5)
    table = trace.account().phases

    assert dict(zip(table["phase"], table["host_ns"])) == {
        "data": 0,
        "forward": 30_000,
        "backward": 0,
        "optimizer": 0,
        "other": 70_000,
        "unattributed": 0,
    }

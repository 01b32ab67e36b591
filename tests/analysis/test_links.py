"""What belongs to what: each kind of link on a trace that has it, and exactly the shares that have none."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from hypothesis import given

from any_trace import any_trace
from stepscope.analysis.structure.links import Linked, Share, link
from trace_builder import AUTOGRAD, TraceBuilder

NODE = "autograd::engine::evaluate_function: MmBackward0"


def device_of(linked: Linked, column: str) -> dict[str, Any]:
    """A column of the GPU's work, by its name."""
    found = linked.device.select(pl.col("name", column).cast(pl.String))
    return dict(found.rows())


def ops_of(linked: Linked) -> dict[str, str | None]:
    """The op of each kernel, by name."""
    return device_of(linked, "op_name")


def forwards_of(linked: Linked, prefix: str = "") -> dict[str, str | None]:
    """The forward op of each host event, by name."""
    names = linked.host["name"].cast(pl.String)
    forward = names.gather(linked.host["forward"])
    return {name: found for name, found in zip(names, forward) if name.startswith(prefix)}


def hosts_of(linked: Linked, column: str) -> dict[str, Any]:
    """A column of the host's events, by their name."""
    return dict(linked.host.select(pl.col("name", column).cast(pl.String)).rows())


# -- kernel → launch --------------------------------------------------------------------------------------------


def test_a_kernel_and_its_launch_have_one_correlation():
    trace = (
        TraceBuilder().call("cudaLaunchKernel", 10, 2, correlation=4).call("cudaLaunchKernel", 20, 2, correlation=5)
    )
    linked = trace.kernel("a", 30, 5, correlation=5).kernel("b", 40, 5, correlation=4).kernel("c", 50, 5).linked()

    assert device_of(linked, "launch_start_ns") == {"a": "20000", "b": "10000", "c": None}
    assert linked.unlinked["kernel_to_launch"] == Share(1, 3)


def test_a_graph_launch_has_many_kernels():
    trace = TraceBuilder().op("graph::replay", 0, 10).call("cudaGraphLaunch", 1, 5, correlation=9)
    for start in (20, 30, 40):
        trace.kernel(f"at {start}", start, 5, correlation=9)
    linked = trace.linked()

    assert ops_of(linked) == {"at 20": "graph::replay", "at 30": "graph::replay", "at 40": "graph::replay"}
    assert linked.unlinked["kernel_to_launch"] == Share(0, 3) and linked.unlinked["launch_to_op"] == Share(0, 1)


def test_a_driver_call_launches_as_a_runtime_call_does():
    trace = TraceBuilder().op("triton_kernel", 0, 10)
    trace.call("cuLaunchKernel", 1, 5, correlation=9, category="cuda_driver").kernel("a", 20, 5, correlation=9)

    assert ops_of(trace.linked()) == {"a": "triton_kernel"}


def test_a_correlation_of_zero_or_less_joins_nothing():
    trace = TraceBuilder().call("cudaDeviceSynchronize", 0, 5, correlation=0).kernel("a", 20, 5, correlation=0)
    trace.call("cudaDeviceSynchronize", 6, 5, correlation=-1).kernel("b", 30, 5, correlation=-1)

    assert device_of(trace.linked(), "launch") == {"a": None, "b": None}


def test_of_calls_with_one_correlation_the_first_is_the_launch_and_no_kernel_is_doubled():
    # GIVEN a runtime call, the driver call inside it, and a much later call of the same correlation
    trace = TraceBuilder().call("cudaLaunchKernel", 10, 4, correlation=9)
    trace.call("cuLaunchKernel", 11, 2, correlation=9, category="cuda_driver")
    linked = trace.call("cudaLaunchKernel", 90, 4, AUTOGRAD, correlation=9).kernel("a", 20, 5, correlation=9).linked()

    assert linked.device["launch_start_ns"].to_list() == [10_000]


# -- launch → op, kernel → op -----------------------------------------------------------------------------------


def test_without_an_external_id_the_innermost_op_around_a_launch_is_its_own():
    trace = TraceBuilder().op("aten::linear", 0, 50).op("aten::addmm", 5, 40).op("aten::expand", 6, 2)
    trace.python("frame", 9, 20).launch("gemm", 10, (60, 5)).launch("outside", 55, (70, 5))
    linked = trace.linked()

    assert ops_of(linked) == {"gemm": "aten::addmm", "outside": None}
    assert linked.unlinked["launch_to_op"] == Share(1, 2) and linked.unlinked["kernel_to_op"] == Share(1, 2)


def test_an_external_id_comes_before_nesting():
    trace = TraceBuilder().op("around", 0, 50, id=1).op("named", 100, 50, id=2)

    assert ops_of(trace.launch("gemm", 10, (60, 5), id=2).linked()) == {"gemm": "named"}


@pytest.mark.parametrize("number", [99, 0, -1, 3])
def test_an_external_id_that_names_no_op_leaves_it_to_nesting(number):
    trace = TraceBuilder().op("around", 0, 50, id=1).op("zero", 200, 5, id=0).op("minus", 210, 5, id=-1)
    trace.slice("user_annotation", "an annotation", 100, 50, **{"External id": 3})

    assert ops_of(trace.launch("gemm", 10, (60, 5), id=number).linked()) == {"gemm": "around"}


def test_a_kernel_without_a_launch_has_the_op_of_its_own_external_id():
    trace = (
        TraceBuilder().op("aten::mm", 0, 50, id=7).kernel("a", 60, 5, correlation=9, id=7).kernel("b", 70, 5, id=8)
    )
    linked = trace.linked()

    assert ops_of(linked) == {"a": "aten::mm", "b": None}
    assert linked.unlinked["kernel_to_launch"] == Share(2, 2) and linked.unlinked["kernel_to_op"] == Share(1, 2)
    assert linked.unlinked["launch_to_op"] == Share(0, 0) and linked.unlinked["launch_to_op"].share == 0


def test_a_launchs_op_comes_before_the_kernels_own_external_id():
    trace = TraceBuilder().op("of the launch", 0, 50, id=1).op("of the kernel", 100, 5, id=2)

    assert ops_of(trace.launch("gemm", 10, (60, 5), id=1).linked()) == {"gemm": "of the launch"}
    trace = TraceBuilder().op("of the launch", 0, 50, id=1).op("of the kernel", 100, 5, id=2)
    trace.call("cudaLaunchKernel", 10, 2, correlation=9).kernel("gemm", 60, 5, correlation=9, id=2)
    assert ops_of(trace.linked()) == {"gemm": "of the launch"}


def test_ops_that_share_an_external_id_neither_double_a_kernel_nor_change_from_run_to_run():
    trace = TraceBuilder().op("first", 0, 50, id=7).op("second", 100, 50, id=7).op("third", 200, 50, id=7)
    trace.launch("in second", 110, (300, 5), id=7).kernel("alone", 400, 5, id=7)

    found = [ops_of(trace.linked()) for _ in range(3)]

    assert found[0] == found[1] == found[2]
    assert set(found[0]) == {"in second", "alone"} and trace.linked().device.height == 2


def test_of_ops_that_share_an_external_id_the_one_around_the_launch_is_meant():
    trace = TraceBuilder().op("first", 0, 50, id=7).op("second", 100, 50, id=7).op("third", 200, 50, id=7)

    assert ops_of(trace.launch("gemm", 110, (300, 5), id=7).linked()) == {"gemm": "second"}


def test_a_launch_that_begins_with_its_op_and_outlasts_it_is_the_ops_all_the_same():
    # GIVEN times in whole microseconds, in which a call seems to hold the op that made it
    trace = TraceBuilder().op("aten::mm", 10, 5, id=5).launch("gemm", 10, (30, 40), took=6, id=5)

    account = trace.account()

    assert account.ops.select("op", "num_calls", "device_self_ns").rows() == [("aten::mm", 1, 40_000)]


def test_hundreds_of_frames_around_a_launch_do_not_make_one_of_them_an_op():
    trace = TraceBuilder()
    for depth in range(600):
        trace.python(f"deep.py({depth}): f", depth, 2000 - 2 * depth)

    assert ops_of(trace.launch("gemm", 700, (3000, 5)).linked()) == {"gemm": None}


# -- backward → forward -----------------------------------------------------------------------------------------


def test_a_backward_op_and_all_under_it_have_the_forward_op_of_their_sequence_number():
    trace = TraceBuilder().op("aten::mm", 0, 10, sequence=5, forward_thread=0).op("aten::sum", 10, 5, sequence=6)
    trace.op(NODE, 50, 20, AUTOGRAD, sequence=5, forward_thread=1).op("aten::t", 52, 5, AUTOGRAD)
    trace.op("another node", 80, 5, AUTOGRAD, sequence=4, forward_thread=1)
    linked = trace.linked()

    assert forwards_of(linked) == {
        "aten::mm": None,
        "aten::sum": None,
        NODE: "aten::mm",
        "aten::t": "aten::mm",
        "another node": None,
    }
    assert linked.unlinked["backward_to_forward"] == Share(1, 2)


def test_of_nested_ops_with_one_sequence_number_the_last_made_the_node():
    trace = TraceBuilder().op("aten::linear", 0, 20, sequence=5).op("aten::t", 1, 2, sequence=4)
    trace.op("aten::addmm", 5, 10, sequence=5).op("aten::relu", 20, 5, sequence=6)
    trace.op(NODE, 50, 20, AUTOGRAD, sequence=5, forward_thread=1)

    assert forwards_of(trace.linked(), "autograd")[NODE] == "aten::addmm"


def test_a_backward_on_the_thread_of_its_forward_is_no_forward_itself():
    trace = TraceBuilder().op("aten::mm", 0, 10, sequence=5, forward_thread=0)
    trace.op(NODE, 50, 20, sequence=5, forward_thread=1).op("MmBackward0", 51, 18, sequence=5, forward_thread=1)

    assert forwards_of(trace.linked()) == {"aten::mm": None, NODE: "aten::mm", "MmBackward0": "aten::mm"}


def test_each_forward_thread_is_the_one_that_most_of_its_numbers_are_on():
    # GIVEN two threads of forward that count for themselves: one from 0 to 4, one from 3 to 9; autograd calls the
    # first 1 and the second 2, and 3 and 4 are numbers of both
    trace = TraceBuilder()
    for number in range(5):
        trace.op(f"first {number}", 10 * number, 5, 11, sequence=number)
        trace.op(f"back first {number}", 500 + 10 * number, 5, AUTOGRAD, sequence=number, forward_thread=1)
    for number in range(3, 10):
        trace.op(f"second {number}", 10 * number, 5, 12, sequence=number)
        trace.op(f"back second {number}", 600 + 10 * number, 5, AUTOGRAD, sequence=number, forward_thread=2)

    found = forwards_of(trace.linked(), "back")

    assert found == {f"back {name}": name for name in (n.removeprefix("back ") for n in found)}
    assert len(found) == 12


def test_threads_that_match_equally_well_give_the_same_links_each_time():
    # GIVEN replicas that count alike, each on a thread of its own, as DataParallel runs them
    trace = TraceBuilder()
    for thread in (11, 12, 13):
        for number in range(3):
            trace.op(f"forward {number} on {thread}", 10 * number, 5, thread, sequence=number)
    for number in range(3):
        trace.op(f"back {number}", 500 + 10 * number, 5, AUTOGRAD, sequence=number, forward_thread=1)
    read = trace.read()

    found = [forwards_of(link(read), "back") for _ in range(20)]

    assert all(links == found[0] for links in found)
    assert None not in found[0].values()


# -- modules ----------------------------------------------------------------------------------------------------


def test_our_ranges_name_the_module_of_what_runs_in_them():
    trace = (
        TraceBuilder().annotation("stepscope.module/model", 0, 100).annotation("stepscope.module/model.fc", 10, 50)
    )
    trace.op("aten::mm", 20, 20).launch("gemm", 25, (200, 5)).op("aten::relu", 70, 10).launch("relu", 72, (210, 5))
    linked = trace.op("aten::loss", 110, 10).launch("loss", 112, (220, 5)).linked()

    assert linked.modules.source == "ranges"
    assert device_of(linked, "module") == {"gemm": "model.fc", "relu": "model", "loss": None}
    assert linked.unlinked["kernel_to_module"] == Share(1, 3)


def test_stacks_name_a_module_by_the_modules_around_it():
    trace = TraceBuilder().python("nn.Module: Model_0", 0, 100).python("model.py(7): forward", 5, 90)
    trace.python("nn.Module: Linear_1", 10, 50).op("aten::mm", 20, 20).launch("gemm", 25, (200, 5))
    linked = trace.linked()

    assert linked.modules.source == "stacks"
    assert device_of(linked, "module") == {"gemm": "Model_0.Linear_1"}


def test_our_ranges_come_before_stacks():
    trace = TraceBuilder().python("nn.Module: Linear_1", 0, 50).annotation("stepscope.module/fc", 1, 40)
    linked = trace.op("aten::mm", 2, 20).launch("gemm", 5, (200, 5)).linked()

    assert linked.modules.source == "ranges" and device_of(linked, "module") == {"gemm": "fc"}


def test_a_trace_without_modules_says_so():
    linked = TraceBuilder().op("aten::mm", 2, 20).launch("gemm", 5, (200, 5)).linked()

    assert linked.modules.source == "none" and device_of(linked, "module") == {"gemm": None}
    assert "kernel_to_module" not in linked.unlinked


@pytest.mark.parametrize("thread", [AUTOGRAD, 1])
def test_a_backward_op_has_the_module_of_its_forward(thread):
    trace = TraceBuilder().annotation("stepscope.module/fc", 0, 50).op("aten::mm", 10, 20, sequence=5)
    trace.op(NODE, 60, 30, thread, sequence=5, forward_thread=1).op("aten::mm", 62, 20, thread)
    linked = trace.launch("backward gemm", 65, (200, 5), thread=thread).linked()

    assert device_of(linked, "module") == {"backward gemm": "fc"}
    assert hosts_of(linked, "module")[NODE] == "fc"


def test_what_a_backward_recomputes_belongs_to_the_module_that_it_runs_in():
    trace = TraceBuilder().annotation("stepscope.module/block", 0, 50).op("aten::mm", 10, 20, sequence=5)
    trace.op(NODE, 60, 50, sequence=5, forward_thread=1).annotation("stepscope.module/block.fc", 62, 20)
    linked = trace.op("aten::mm", 64, 10).launch("again", 65, (200, 5)).linked()

    assert device_of(linked, "module") == {"again": "block.fc"}


# -- memory → op, event → step ----------------------------------------------------------------------------------


def test_memory_belongs_to_the_innermost_op_open_on_its_thread():
    trace = TraceBuilder().op("aten::linear", 0, 100).op("aten::empty", 10, 20).op("another thread", 0, 500, AUTOGRAD)
    for moment, num_bytes in ((15, 1), (50, 2), (150, 3)):
        trace.memory(moment, num_bytes)
    linked = trace.linked()
    names = linked.host["name"].cast(pl.String).gather(linked.memory["op"])

    assert dict(zip(linked.memory["bytes"], names)) == {1: "aten::empty", 2: "aten::linear", 3: None}
    assert linked.unlinked["memory_to_op"] == Share(1, 3)


def test_memory_after_a_hundred_frames_have_ended_belongs_to_the_op_around_them():
    trace = TraceBuilder().op("compiled", 0, 1000)
    for depth in range(100):
        trace.python(f"deep.py({depth}): f", 1 + depth, 300 - depth)
    linked = trace.memory(900, 8).memory(2000, -8).linked()
    names = linked.host["name"].cast(pl.String).gather(linked.memory["op"])

    assert names.to_list() == ["compiled", None]


def test_memory_has_the_step_and_the_phase_of_its_moment():
    trace = TraceBuilder().step(3, 0, 100).step(4, 100, 100).annotation("forward", 110, 50).op("aten::mm", 10, 5)
    linked = trace.memory(50, 1).memory(120, 2).memory(300, 3).linked()

    assert linked.memory["step"].to_list() == [3, 4, None]
    assert linked.memory["phase"].cast(pl.String).to_list() == ["other", "forward", None]


def test_gpu_work_belongs_to_the_step_of_its_launch_whenever_it_runs():
    trace = TraceBuilder().step(1, 0, 100).step(2, 100, 100).op("aten::mm", 10, 5)
    trace.launch("late", 50, (150, 10)).kernel("no launch", 160, 5).launch("before", 195, (250, 5))
    linked = trace.launch("outside", 300, (310, 5)).linked()

    assert device_of(linked, "step") == {"late": "1", "no launch": None, "before": "2", "outside": None}
    assert device_of(linked, "phase")["no launch"] is None
    assert linked.unlinked["event_to_step"] == Share(2, 4)


def test_gpu_work_whose_launch_is_not_there_belongs_to_the_step_of_its_op():
    trace = TraceBuilder().step(1, 0, 100).step(2, 100, 100).op("aten::mm", 10, 5, id=7).kernel("a", 150, 5, id=7)

    assert device_of(trace.linked(), "step") == {"a": "1"}


def test_where_there_are_no_steps_no_link_to_one_is_missing():
    assert "event_to_step" not in TraceBuilder().launch("a", 10, (20, 5)).linked().unlinked


def test_shares_are_given_as_counts_and_as_a_share():
    assert Share(1, 3).to_json() == {"num": 1, "num_all": 3, "share": 1 / 3}


@given(any_trace())
def test_links_neither_lose_nor_double_events(trace):
    read = trace.read()
    linked = trace.linked()

    assert sorted(linked.host["event"]) == sorted(read.host["event"])
    assert sorted(linked.device["event"]) == sorted(read.device["event"])
    assert sorted(linked.memory["event"]) == sorted(read.memory["event"])
    # AND whatever is called an op is one, and a launch has the correlation of its kernel
    for table in (linked.host, linked.device, linked.memory):
        assert set(linked.host["kind"].cast(pl.String).gather(table["op"].drop_nulls())) <= {"op"}
    launched = linked.device.filter(pl.col("launch").is_not_null())
    assert launched["correlation"].equals(linked.host["correlation"].gather(launched["launch"]))
    unlinked = linked.unlinked["kernel_to_launch"]
    assert unlinked == Share(linked.device.height - launched.height, linked.device.height)

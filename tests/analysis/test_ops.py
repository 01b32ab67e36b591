"""Ops and modules: own time and all under them, host and device, nothing twice and nothing lost."""

from __future__ import annotations

from collections import defaultdict

import polars as pl
import pytest
from hypothesis import HealthCheck, assume, given, settings

from any_trace import any_trace
from stepscope.analysis.kernels.ops import module_groups, modules, ops
from stepscope.analysis.structure.links import Linked
from trace_builder import AUTOGRAD, TraceBuilder

NODE = "autograd::engine::evaluate_function: MmBackward0"
COLUMNS = ("num_calls", "host_self_ns", "host_total_ns", "device_self_ns", "device_total_ns")


def ops_of(trace: TraceBuilder) -> dict[str | None, tuple[int, ...]]:
    """Calls, host self and total, device self and total of each op."""
    return {row["op"]: tuple(row[name] for name in COLUMNS) for row in ops(trace.linked()).iter_rows(named=True)}


def modules_of(linked: Linked, *columns: str) -> dict[str | None, tuple[int, ...]]:
    return {row["module"]: tuple(row[name] for name in columns) for row in modules(linked).iter_rows(named=True)}


def test_self_is_what_no_op_inside_accounts_for_and_total_is_all():
    trace = TraceBuilder().op("aten::linear", 0, 50).op("aten::addmm", 5, 40).launch("gemm", 10, (100, 30), took=2)
    trace.launch("bias", 47, (130, 7), took=1)

    # THEN a launch belongs to the op that made it, on the host as on the device
    assert ops_of(trace) == {
        "aten::linear": (1, 10_000, 50_000, 7_000, 37_000),
        "aten::addmm": (1, 40_000, 40_000, 30_000, 30_000),
    }


def test_calls_of_one_op_are_added_up_over_threads():
    trace = TraceBuilder().op("aten::mm", 0, 10).op("aten::mm", 20, 5).op("aten::mm", 3, 4, AUTOGRAD)
    trace.launch("a", 1, (50, 2)).launch("b", 4, (60, 3), thread=AUTOGRAD)

    assert ops_of(trace) == {"aten::mm": (3, 19_000, 19_000, 5_000, 5_000)}


def test_an_op_that_calls_itself_counts_once():
    # GIVEN an op inside another inside the first again, and a kernel of the innermost
    trace = TraceBuilder().op("aten::to", 0, 30).op("aten::_to_copy", 5, 20).op("aten::to", 6, 10)
    trace.launch("copy", 8, (50, 9), took=1)

    assert ops_of(trace) == {
        "aten::to": (2, 20_000, 30_000, 9_000, 9_000),
        "aten::_to_copy": (1, 10_000, 20_000, 0, 9_000),
    }


def test_what_python_and_labels_do_inside_an_op_is_its_own_time():
    trace = TraceBuilder().op("my::function", 0, 30).python("f.py(1): g", 5, 20).annotation("label", 6, 10)

    assert ops_of(trace.op("aten::add", 7, 4)) == {
        "my::function": (1, 26_000, 30_000, 0, 0),
        "aten::add": (1, 4_000, 4_000, 0, 0),
    }


def test_work_without_an_op_has_a_row_of_its_own():
    trace = TraceBuilder().op("aten::mm", 0, 10).launch("a", 1, (20, 3)).launch("b", 15, (30, 4)).kernel("c", 40, 5)

    assert ops_of(trace) == {"aten::mm": (1, 10_000, 10_000, 3_000, 3_000), None: (0, 0, 0, 9_000, 9_000)}


def test_kernels_of_an_op_named_by_external_id_count_for_it_and_for_the_ops_around_it():
    trace = TraceBuilder().op("aten::linear", 0, 50, id=1).op("aten::addmm", 5, 40, id=2)

    assert ops_of(trace.launch("gemm", 60, (100, 30), took=2, id=2)) == {
        "aten::linear": (1, 10_000, 50_000, 0, 30_000),
        "aten::addmm": (1, 40_000, 40_000, 30_000, 30_000),
    }


def test_ops_come_with_most_gpu_work_first_and_work_without_an_op_in_its_place():
    trace = TraceBuilder().op("idle", 0, 90).op("small", 100, 5).launch("a", 101, (200, 1))
    trace.op("large", 110, 5).launch("b", 111, (300, 10)).op("busier", 120, 200)

    assert ops(trace.linked())["op"].to_list() == ["large", "small", "busier", "idle"]


# -- modules ----------------------------------------------------------------------------------------------------


def module_trace() -> TraceBuilder:
    """A model of two layers: 10 and 20 µs of forward work, 30 of backward for the second, 1 µs outside, 2 its own."""
    trace = TraceBuilder().annotation("stepscope.module/model", 0, 100)
    trace.annotation("stepscope.module/model.a", 5, 30).op("aten::mm", 10, 20, sequence=1)
    trace.launch("a", 12, (200, 10)).annotation("stepscope.module/model.b", 40, 30)
    trace.op("aten::mm", 45, 20, sequence=2).launch("b", 50, (210, 20)).op("aten::relu", 80, 10)
    trace.launch("own", 82, (230, 2)).op("aten::loss", 110, 10).launch("loss", 112, (240, 1))
    trace.op(NODE, 150, 30, AUTOGRAD, sequence=2, forward_thread=1).op("aten::mm", 152, 20, AUTOGRAD)
    return trace.launch("backward of b", 155, (300, 30), thread=AUTOGRAD)


def test_modules_have_their_own_work_and_all_inside_forward_and_backward():
    found = modules_of(
        module_trace().linked(), "device_self_ns", "device_forward_ns", "device_backward_ns", "device_total_ns"
    )

    assert found == {
        "model": (2_000, 32_000, 30_000, 62_000),
        "model.b": (50_000, 20_000, 30_000, 50_000),
        "model.a": (10_000, 10_000, 0, 10_000),
        None: (1_000, 1_000, 0, 1_000),
    }


def test_modules_come_with_most_work_first():
    assert modules(module_trace().linked())["module"].to_list() == ["model", "model.b", "model.a", None]


def test_the_hosts_time_of_a_module_is_its_own_and_that_of_its_backward():
    found = modules_of(module_trace().linked(), "num_calls", "host_self_ns")

    assert found == {"model": (1, 40_000), "model.a": (1, 30_000), "model.b": (1, 60_000), None: (0, 0)}


def test_a_module_called_twice_has_two_calls():
    trace = TraceBuilder().annotation("stepscope.module/fc", 0, 10).annotation("stepscope.module/fc", 20, 10)

    assert modules_of(trace.linked(), "num_calls", "host_self_ns") == {"fc": (2, 20_000)}


def test_a_name_that_begins_like_a_modules_is_not_inside_it():
    trace = TraceBuilder().annotation("stepscope.module/layer", 0, 10).op("a", 1, 5).launch("a", 2, (100, 1))
    trace.annotation("stepscope.module/layers.0", 20, 10).op("a", 21, 5).launch("b", 22, (110, 3))

    assert modules_of(trace.linked(), "device_total_ns") == {"layer": (1_000,), "layers.0": (3_000,)}


def test_without_modules_there_is_an_empty_table():
    table = modules(TraceBuilder().op("aten::mm", 0, 5).launch("a", 1, (10, 5)).linked())

    assert table.is_empty() and "device_total_ns" in table.columns


def test_modules_that_differ_in_a_number_are_grouped():
    table = pl.DataFrame(
        {
            "module": ["blocks.0.mlp", "blocks.11.mlp", "Linear_3", "Linear_4", "conv2d", None],
            **{name: [1, 2, 4, 8, 16, 32] for name in modules(TraceBuilder().op("a", 0, 1).linked()).columns[1:]},
        }
    )

    assert module_groups(table).select("module", "num_modules", "num_calls", "device_total_ns").rows() == [
        (None, 1, 32, 32),
        ("conv2d", 1, 16, 16),
        ("Linear_*", 2, 12, 12),
        ("blocks.*.mlp", 2, 3, 3),
    ]


# -- any trace --------------------------------------------------------------------------------------------------


def covered(spans: list[tuple[int, int, int]]) -> int:
    """Nanoseconds in which at least one of some spans (thread, start, end) is open, thread by thread."""
    total, reach, last = 0, 0, None
    for thread, start, end in sorted(spans):
        reach = start if thread != last else max(reach, start)
        total += max(0, end - reach)
        reach, last = max(reach, end), thread
    return total


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # what is drawn depends on the modules that are loaded
@given(any_trace())
def test_sums_and_totals_of_ops_are_what_their_definitions_say(trace):
    linked = trace.linked()
    ends = linked.host["end_ns"]
    assume(not (ends > ends.gather(linked.host["parent"])).any())  # events that overlap in part have another rule
    table = {row["op"]: row for row in ops(linked).iter_rows(named=True)}
    calls = linked.host.filter(pl.col("kind") == "op").select(
        pl.col("name").cast(pl.String), "thread", "start_ns", "end_ns"
    )
    by_name: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for name, *span in calls.iter_rows():
        by_name[name].append(tuple(span))

    # THEN self times tile the time in ops, and totals are the time in which an op is open
    assert sum(row["host_self_ns"] for row in table.values()) == covered(
        [s for some in by_name.values() for s in some]
    )
    for name, spans in by_name.items():
        assert table[name]["num_calls"] == len(spans)
        assert table[name]["host_total_ns"] == covered(spans), name

    # AND the device's self times are all GPU work, and totals that of every op around
    assert sum(row["device_self_ns"] for row in table.values()) == int(linked.device["duration_ns"].sum())
    names, parents = linked.host["name"].cast(pl.String).to_list(), linked.host["parent"].to_list()
    is_op = (linked.host["kind"] == "op").to_list()
    totals: dict[str | None, int] = defaultdict(int)
    for op, length in linked.device.select("op", "duration_ns").iter_rows():
        around: set[str | None] = {None} if op is None else set()
        while op is not None:
            around |= {names[op]} if is_op[op] else set()
            op = parents[op]
        for name in around:
            totals[name] += length
    assert {name: row["device_total_ns"] for name, row in table.items() if row["device_total_ns"]} == {
        name: ns for name, ns in totals.items() if ns
    }


@given(any_trace())
def test_the_work_of_modules_adds_up_to_all_gpu_work(trace):
    linked = trace.annotation("stepscope.module/model", 0, 0.1).linked()
    table = modules(linked)

    assert int(table["device_self_ns"].sum()) == int(linked.device["duration_ns"].sum())
    assert (table["device_forward_ns"] + table["device_backward_ns"]).to_list() == table["device_total_ns"].to_list()
    inner = table.filter(pl.col("module") == "model.layer")["device_self_ns"].sum()
    assert (
        table.filter(pl.col("module") == "model").select(pl.col("device_total_ns") - pl.col("device_self_ns")).item()
        == inner
    )


@pytest.mark.parametrize("module", ["a", "a.b", "model.layers.0.self_attn.q_proj"])
def test_one_module_alone_has_all_of_its_work(module):
    trace = TraceBuilder().annotation(f"stepscope.module/{module}", 0, 10).op("a", 1, 5).launch("a", 2, (100, 1))

    assert modules_of(trace.linked(), "device_self_ns", "device_total_ns") == {module: (1_000, 1_000)}

"""The section `modules`: every icicle adds up, what is small is together, names are as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handmade import write_recording
from memories import a_step, tensor, write_memory
from stepscope.document.model import Missing, Node, Table, Text, Tree
from stepscope.document.sections.modules import OUTSIDE, parts
from stepscope.document.sections.trees import MAX_DEPTH, Branch, module_path
from stepscope.session import open_session
from trace_builder import AUTOGRAD, PUBLIC, TraceBuilder, needs_traces

HOSTILE = '</script><b onload="x">\u202e\n=1+1'


def found(trace: TraceBuilder, folder: Path) -> tuple[Any, ...]:
    return parts(open_session(trace.write(folder / "trace.json"), use_cache=False))


def tree(every: tuple[Any, ...], name: str) -> Tree:
    (chosen,) = (part for part in every if isinstance(part, Tree) and part.id == name)
    return chosen


def paths(nodes: tuple[Node, ...]) -> dict[str, float]:
    """Each node by the names from the whole down to it."""
    names: dict[str, str] = {"": ""}
    for node in nodes:
        names[node.id] = f"{names[node.parent]}/{node.name}"
    assert len(names) == len(nodes) + 1, "ids are unique"
    return {names[node.id]: node.value for node in nodes}


def assert_adds_up(nodes: tuple[Node, ...]) -> None:
    values = {node.id: node.value for node in nodes}
    inside = dict.fromkeys(values, 0.0)
    for node in nodes[1:]:
        assert node.parent in values, "a parent comes before its children"
        inside[node.parent] += node.value
    assert all(inside[id] <= values[id] for id in values)


def two_blocks() -> TraceBuilder:
    """A model whose forward has 30 µs of GPU work in two blocks, 5 in its head, 10 outside; 20 of the backward."""
    trace = TraceBuilder().step(1, 0, 500)
    for number, (start, name, runs) in enumerate(
        [(10, "blocks.0.mlp", 10), (30, "blocks.0", 5), (50, "blocks.1.mlp", 15), (70, "head", 5)]
    ):
        trace.annotation(f"stepscope.module/{name}", start, 15)
        trace.op("aten::mm", start + 1, 10, sequence=number, id=number + 1)
        trace.launch("gemm", start + 2, (start + 5, runs), id=number + 1)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 100, 30, AUTOGRAD, sequence=0, forward_thread=1)
    trace.op("aten::mm", 101, 20, AUTOGRAD, id=9).launch("gemm", 102, (110, 20), thread=AUTOGRAD, id=9)
    return trace.annotation("Optimizer.step#SGD.step", 200, 50).op("aten::add_", 201, 5).launch("a", 202, (210, 10))


def test_forward_and_backward_are_apart_and_all_gpu_work_is_there(tmp_path):
    every = found(two_blocks(), tmp_path)
    chart = tree(every, "modules_device")

    assert chart.shape == "icicle"
    assert paths(chart.nodes) == {
        "/GPU work": 65_000,
        "/GPU work/forward": 35_000,
        "/GPU work/forward/blocks": 30_000,
        "/GPU work/forward/blocks/0": 15_000,
        "/GPU work/forward/blocks/0/mlp": 10_000,
        "/GPU work/forward/blocks/1": 15_000,
        "/GPU work/forward/blocks/1/mlp": 15_000,
        "/GPU work/forward/head": 5_000,
        "/GPU work/backward": 20_000,
        "/GPU work/backward/blocks": 20_000,
        "/GPU work/backward/blocks/0": 20_000,
        "/GPU work/backward/blocks/0/mlp": 20_000,
        f"/GPU work/{OUTSIDE}": 10_000,
    }
    assert {node.color for node in chart.nodes if node.name == "mlp"} == {"forward", "backward"}
    assert "35.00 µs (53.8 %) in the forward" in chart.caption
    assert f"10.00 µs (15.4 %) {OUTSIDE}" in chart.caption


def test_the_tables_have_the_figures_of_the_analysis(tmp_path):
    source = open_session(two_blocks().write(tmp_path / "trace.json"), use_cache=False)
    tables = {part.id: part for part in parts(source) if isinstance(part, Table)}
    modules = source.analysis.ranks[0].modules

    for column in ("num_calls", "device_total_ns", "device_backward_ns", "host_self_ns", "host_total_ns"):
        assert tables["modules"].columns[column] == modules[column].to_list()
    assert set(tables["module_groups"].columns["module"]) == {"blocks.*", "blocks.*.mlp", "head", OUTSIDE}
    # Outside the modules, what is not the backward's is no forward.
    outside = tables["modules"].columns["module"].index(OUTSIDE)
    assert tables["modules"].columns["device_forward_ns"][outside] is None


def test_without_a_gpu_it_is_the_hosts_time(tmp_path):
    trace = TraceBuilder().step(1, 0, 100).annotation("stepscope.module/net", 0, 60)
    trace.annotation("stepscope.module/net.fc", 10, 20).op("aten::mm", 12, 8)
    every = found(trace, tmp_path)

    assert paths(tree(every, "modules_host").nodes) == {
        "/host time in modules": 60_000, "/host time in modules/net": 60_000, "/host time in modules/net/fc": 20_000
    }  # fmt: skip
    assert not [part for part in every if isinstance(part, Tree) and part.id == "modules_device"]
    assert all(not name.startswith("device") for part in every if isinstance(part, Table) for name in part.columns)


def test_without_names_it_says_what_to_run(tmp_path):
    (part,) = found(TraceBuilder().op("aten::mm", 0, 5).launch("a", 1, (10, 5)), tmp_path)

    assert isinstance(part, Missing)
    assert "with_stack=True" in part.text and "stepscope run" in part.text


def test_a_recording_without_a_trace_still_has_its_memory(tmp_path):
    write_recording(tmp_path, {}, [])
    write_memory(tmp_path / "memory.json.gz", a_step())

    missing, chart = parts(open_session(tmp_path, use_cache=False))

    assert isinstance(missing, Missing) and "no trace" in missing.text
    assert_adds_up(chart.nodes)
    nodes = paths(chart.nodes)
    assert nodes["/at the peak"] == 4100
    assert nodes["/at the peak/blocks"] == 1000 + 600 + 600 + 1000
    assert nodes["/at the peak/blocks/1"] == 1600 and nodes["/at the peak/blocks/1/mlp"] == 600
    assert nodes[f"/at the peak/{OUTSIDE}"] == 100
    assert nodes["/at the peak/allocator rounding, workspaces and in-kernel temporaries"] == 800
    assert "3.12 KiB (78.0 %) in modules" in chart.caption and "800 B in no tensor" in chart.caption


def test_less_than_the_tensors_say_is_no_part_of_the_tree(tmp_path):
    # GIVEN an allocator that counts less than the tensors have
    allocator = {"start_allocated_bytes": 0, "peak_allocated_bytes": 3000, "peak_reserved_bytes": 6000}
    write_recording(tmp_path, {}, [])
    write_memory(tmp_path / "memory.json.gz", a_step(allocator=allocator))

    *_, chart = parts(open_session(tmp_path, use_cache=False))

    assert chart.nodes[0].value == 3300 and all(node.value > 0 for node in chart.nodes)


# -- trees --------------------------------------------------------------------------------------------------------


def test_what_is_too_small_is_together_and_nothing_is_lost():
    root = Branch()
    root.add(["large"], 10_000)
    for number in range(50):
        root.add(["small", f"leaf{number}"], 1)
        root.add([f"tiny{number}"], 2)
    root.add(["large", "only"], 1)

    nodes = root.nodes("all")

    assert_adds_up(nodes)
    assert paths(nodes) == {
        "/all": 10_151,
        "/all/large": 10_001,
        "/all/large/only": 1,  # alone it keeps its name
        "/all/small": 50,
        "/all/small/50 others": 50,
        "/all/50 others": 100,
    }


def test_what_has_nothing_is_not_drawn():
    root = Branch()
    root.add(["a"], 1)
    root.add(["b"], 0)

    assert [node.name for node in root.nodes("all")] == ["all", "a"]


def test_layers_stay_in_their_order():
    root = Branch()
    for number in (10, 9, 1):
        root.add(["layers", str(number)], 100 + number)

    assert [node.name for node in root.nodes("all")] == ["all", "layers", "1", "9", "10"]


def test_a_name_of_ten_thousand_dots_is_no_deep_tree():
    name = "a." * 10_000
    root = Branch()
    root.add(module_path(name), 5)

    nodes = root.nodes("all")

    assert len(nodes) == MAX_DEPTH + 1
    assert ".".join(node.name for node in nodes[1:]) == name


def test_names_are_as_they_were(tmp_path):
    trace = TraceBuilder().annotation(f"stepscope.module/{HOSTILE}", 0, 50).op("aten::mm", 1, 20)
    every = found(trace.launch("gemm", 2, (10, 5)), tmp_path)

    assert HOSTILE in [node.name for node in tree(every, "modules_device").nodes]
    assert all(HOSTILE in part.columns["module"] for part in every if isinstance(part, Table))
    assert not any("\n" in part.text for part in every if isinstance(part, Text))


def test_a_module_of_a_hostile_name_has_its_memory(tmp_path):
    write_recording(tmp_path, {}, [])
    memory = a_step(allocations=[tensor(1000, "activation", 0, module=HOSTILE)], allocator=None)
    write_memory(tmp_path / "memory.json.gz", memory)

    assert HOSTILE in [
        node.name for node in tree(parts(open_session(tmp_path, use_cache=False)), "modules_memory").nodes
    ]


@pytest.mark.long
@needs_traces
@pytest.mark.parametrize("name", ["qwen0.5b_h100_stacks", "resnet_act_checkpoint_mi300"])
def test_of_a_real_trace_the_whole_is_all_gpu_work(name):
    source = open_session(PUBLIC / f"{name}.json.gz", use_cache=False)
    account = source.analysis.ranks[0]
    nodes = tree(parts(source), "modules_device").nodes

    assert_adds_up(nodes)
    assert nodes[0].value == account.modules["device_self_ns"].sum() == account.kernel_classes["total_ns"].sum()
    assert len(nodes) < 1000
    # No two siblings are both too small to be seen.
    small = [node.parent for node in nodes if node.value < 0.002 * nodes[0].value and "others" not in node.name]
    assert len(small) == len(set(small))

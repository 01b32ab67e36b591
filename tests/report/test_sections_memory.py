"""The section `memory`: the peak of every chart is the account's, the remainder is apart, leaks come first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handmade import write_recording
from memories import a_step, tensor, transformer, write_memory
from stepscope.analysis.memory.account import account
from stepscope.document.model import Bars, Facts, Lines, Missing, Table, Text, Tree
from stepscope.document.sections.memory import parts
from stepscope.errors import Unavailable
from stepscope.session import open_session
from trace_builder import PUBLIC, TRACES, TraceBuilder, needs_traces

HOSTILE = "</script><script>alert(1)\u202e\n=cmd()" + "y" * 10_000


def found(memory: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    write_recording(folder, {}, [])
    write_memory(folder / "memory.json.gz", memory)
    return parts(open_session(folder, use_cache=False))


def one(every: tuple[Any, ...], kind: type, id: str) -> Any:
    (part,) = (part for part in every if isinstance(part, kind) and part.id == id)
    return part


def heights(chart: Lines) -> list[float]:
    return [sum(series.y[i] or 0 for series in chart.series) for i in range(len(chart.series[0].y))]


def paths(chart: Tree) -> dict[str, float]:
    names: dict[str, str] = {"": ""}
    for node in chart.nodes:
        names[node.id] = f"{names[node.parent]}/{node.name}"
    return {names[node.id]: node.value for node in chart.nodes}


def test_the_timeline_is_the_accounts_with_the_peak_marked(tmp_path):
    memory = a_step()
    chart, whole = one(found(memory, tmp_path), Lines, "memory_timeline"), account(memory)

    assert chart.style == "areas"
    assert heights(chart) == [point.allocated_bytes for point in whole.timeline]
    assert max(heights(chart)) == whole.peak_tracked_bytes == 3300
    mark = chart.marks[0]
    assert mark.name == "peak 3.22 KiB in tensors" and mark.x == 3000 and chart.x == "time_ns"
    assert {mark.name for mark in chart.marks[1:]} == {"data", "forward", "backward"}
    at_peak = {series.name: series.y[list(series.x).index(mark.x)] for series in chart.series}
    assert at_peak == {"parameter": 1000, "activation": 1200, "temporary": 1000, "input": 100, "gradient": 0}


def test_what_stays_is_at_the_bottom(tmp_path):
    assert one(found(a_step(), tmp_path), Lines, "memory_timeline").series[0].name == "parameter"


def test_the_remainder_is_apart(tmp_path):
    every = found(a_step(), tmp_path)

    timeline = one(every, Lines, "memory_timeline")
    assert "4.00 KiB: 800 B is in no tensor" in timeline.caption
    bar = one(every, Bars, "memory_at_peak")
    assert {series.name: series.y[0] for series in bar.series}["in no tensor"] == 800
    assert sum(series.y[0] for series in bar.series) == 4100
    tree = paths(one(every, Tree, "memory_tree"))
    assert tree["/at the peak"] == 4100 and tree["/at the peak/in no tensor"] == 800


def test_an_allocator_that_counts_less_has_no_remainder(tmp_path):
    allocator = {"start_allocated_bytes": 0, "peak_allocated_bytes": 3000, "peak_reserved_bytes": 6000}
    every = found(a_step(allocator=allocator), tmp_path)

    assert "does not count all of these tensors" in one(every, Lines, "memory_timeline").caption
    assert all(series.y[0] > 0 for series in one(every, Bars, "memory_at_peak").series)
    assert one(every, Tree, "memory_tree").nodes[0].value == 3300


def test_the_treemap_is_by_owner_then_modules_alike_then_what_made_it(tmp_path):
    chart = one(found(a_step(), tmp_path), Tree, "memory_tree")

    tree = paths(chart)
    assert chart.shape == "treemap"
    assert tree["/at the peak/activation/blocks.*.mlp/aten.mm 150 float32"] == 1200
    assert tree["/at the peak/temporary/blocks.*/aten.add 500 bfloat16"] == 1000
    assert tree["/at the peak/parameter/blocks.*.mlp/250 float32"] == 1000
    assert tree["/at the peak/input/outside every module/aten._to_copy 2×6 int64"] == 100
    assert "2 allocations of aten.mm 150 float32 in blocks.*.mlp: 1.17 KiB" in chart.caption


@pytest.mark.parametrize("memory", [a_step(), transformer(6), transformer(12)], ids=["step", "short", "long"])
def test_every_owner_is_what_the_account_says(memory, tmp_path):
    every, whole = found(memory, tmp_path), account(memory)

    first = one(every, Tree, "memory_tree").nodes[0].id
    of_tree = {node.name: node.value for node in one(every, Tree, "memory_tree").nodes if node.parent == first}
    of_bar = {series.name: series.y[0] for series in one(every, Bars, "memory_at_peak").series}
    for part in whole.live_at_peak.by_owner:
        name = "in no tensor" if "rounding" in (part.name or "") else (part.name or "").replace("_", " ")
        assert of_tree[name] == of_bar[name] == part.bytes
    assert max(heights(one(every, Lines, "memory_timeline"))) == whole.peak_tracked_bytes


def test_tables_have_the_accounts_figures(tmp_path):
    memory = transformer(6)
    every, whole = found(memory, tmp_path), account(memory)

    largest = one(every, Table, "largest_allocations").columns
    assert largest["each_bytes"] == [large.bytes for large in whole.largest]
    assert largest["formula"] == [large.formula for large in whole.largest] and any(largest["formula"])
    stages = one(found(a_step(), tmp_path), Table, "memory_stages").columns
    assert stages["at_most_bytes"] == [stage.peak_bytes for stage in account(a_step()).stages]
    assert stages["has_the_peak"] == [False, False, True, False, False]
    kept = one(found(a_step(), tmp_path), Table, "kept_for_backward").columns
    row = kept["module"].index("blocks.0.mlp")
    assert (kept["activations_bytes"][row], kept["saved_bytes"][row]) == (600, 600)


def test_a_leak_is_the_first_thing(tmp_path):
    every = found(a_step(), tmp_path)

    assert isinstance(every[0], Text) and every[0].text.startswith("Leak: 77 B of earlier steps' graphs")
    assert one(every, Table, "left_alive").columns["held_at"] == ["train.py:9 losses"]
    none = found(a_step(left_alive=[]), tmp_path)
    assert none[0].text.startswith("4.00 KiB is allocated at the peak")
    assert not [part for part in none if isinstance(part, Table) and part.id == "left_alive"]


def test_the_allocators_facts_are_said(tmp_path):
    (facts,) = (part for part in found(a_step(), tmp_path) if isinstance(part, Facts))

    said = {fact.title: fact for fact in facts.rows}
    assert said["allocator"].value.startswith("5.86 KiB reserved") and said["allocator"].detail.endswith("cache: 1")


def test_without_a_clock_the_order_is_the_axis(tmp_path):
    memory = a_step()
    for each in memory["allocations"]:
        each.update(born_ns=None, died_ns=None)
    chart = one(found(memory, tmp_path), Lines, "memory_timeline")

    assert chart.x == "num_allocations_and_releases"
    assert list(chart.series[0].x) == [-1, 0, 1, 2, 3, 4, 5, 6, 7] and chart.marks[0].x == 3


def test_names_are_as_they_were(tmp_path):
    memory = a_step(allocations=[tensor(1000, HOSTILE, 0, op=HOSTILE, module=HOSTILE, caller=HOSTILE)])
    every = found(memory, tmp_path)

    names = [node.name for node in one(every, Tree, "memory_tree").nodes]
    assert HOSTILE in names and f"{HOSTILE} 250 float32" in names
    largest = one(every, Table, "largest_allocations").columns
    assert largest["op"] == largest["called_at"] == [HOSTILE]
    assert all(len(part.text) < 1000 and "\n" not in part.text for part in every if isinstance(part, Text))


def test_memory_that_nothing_was_put_into_is_said_to_be_empty(tmp_path):
    (missing,) = found(a_step(allocations=[]), tmp_path)

    assert isinstance(missing, Missing) and "cuda:0" in missing.text


def test_what_is_not_there_is_said_without_a_path(tmp_path):
    write_recording(tmp_path / "run", {}, [])
    with pytest.raises(Unavailable, match=r"neither a memory window nor a trace.*stepscope run"):
        parts(open_session(tmp_path / "run", use_cache=False))
    path = TraceBuilder().op("aten::mm", 0, 5).write(tmp_path / "trace.json")
    with pytest.raises(Unavailable, match=r"^The trace has no \[memory\] events.*profile_memory=True"):
        parts(open_session(path, use_cache=False))
    write_memory(tmp_path / "run" / "memory.json.gz", {"allocations": 3})
    with pytest.raises(Unavailable, match=r"^memory.json.gz is not a memory file"):
        parts(open_session(tmp_path / "run", use_cache=False))


@needs_traces
@pytest.mark.parametrize("path", [TRACES / "h200" / "gpt2_eager.json.gz", PUBLIC / "qwen0.5b_h100_stacks.json.gz"])
def test_of_a_real_trace_it_is_by_phase_and_the_peak_is_the_accounts(path):
    source = open_session(path, use_cache=False)
    every, whole = parts(source), source.memory.account

    chart = one(every, Lines, "memory_timeline")
    assert chart.title.endswith("by the phase that allocated it")
    assert heights(chart) == [point.allocated_bytes for point in whole.timeline]
    assert max(heights(chart)) == whole.peak_tracked_bytes
    assert one(every, Tree, "memory_tree").nodes[0].value == whole.peak_bytes
    assert any(isinstance(part, Missing) and "stepscope run" in part.text for part in every)

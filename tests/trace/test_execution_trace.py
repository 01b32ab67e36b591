"""Execution traces of PyTorch: what they add to a trace of the profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

from nsight_files import NsightBuilder
from stepscope.errors import UsageError
from stepscope.trace.find import find_traces, open_ranks
from stepscope.trace.tables import Trace
from verbs import run_verb

INPUTS = ["shapes", "dtypes", "strides"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `with_shapes.json`, the same trace as `trace.json` without shapes, and `execution.json`."""
    folder = tmp_path_factory.mktemp("recorded")
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    observer = ExecutionTraceObserver().register_callback(str(folder / "execution.json"))
    with profile(
        activities=[ProfilerActivity.CPU], execution_trace_observer=observer, record_shapes=True
    ) as profiler:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = torch.cat([model(torch.arange(5)), torch.ones(2, 4)])
        result.sum().backward()
        optimizer.step()
    observer.unregister_callback()
    profiler.export_chrome_trace(str(folder / "with_shapes.json"))
    trace = json.loads((folder / "with_shapes.json").read_text())
    for event in trace["traceEvents"]:
        for name in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs"):
            event.get("args", {}).pop(name, None)
    (folder / "trace.json").write_text(json.dumps(trace))
    return folder


def opened(*paths: Path) -> Trace:
    (rank,) = open_ranks(find_traces(paths), use_cache=False)
    return rank.trace


def test_it_fills_in_what_the_profiler_would_have_recorded(recorded: Path) -> None:
    wanted = opened(recorded / "with_shapes.json").host
    bare = opened(recorded / "trace.json").host
    filled = opened(recorded / "trace.json", recorded / "execution.json")
    assert bare["shapes"].null_count() == bare.height
    assert filled.host.schema == bare.schema
    assert filled.host.drop(*INPUTS, "inputs").equals(bare.drop(*INPUTS, "inputs"))
    assert filled.host["shapes"].count() > 100
    assert filled.host.select(INPUTS).rows() == wanted.select(INPUTS).rows()
    # It rounds fractions to six digits: they are left out, and all other values are the profiler's.
    fraction = r'"(\[[^"]*)?-?\d+(\.|e-)[^"]*"'
    rest = wanted["inputs"].cast(pl.String).str.replace_all(fraction, '""')
    assert filled.host["inputs"].cast(pl.String).to_list() == rest.to_list()
    assert filled.facts.has_shapes
    assert filled.warnings[-1] == f"the inputs of {filled.host['shapes'].count():,} ops come from execution.json"


def test_a_folder_with_both_needs_no_names(recorded: Path, tmp_path: Path) -> None:
    for name in ("trace.json", "execution.json"):
        (tmp_path / name).write_bytes((recorded / name).read_bytes())
    assert opened(tmp_path).host["shapes"].count() > 100
    done = run_verb("analyze", tmp_path)
    assert done.returncode == 0 and "come from execution.json" in " ".join(done.stdout.split())


def test_a_trace_with_shapes_keeps_its_own(recorded: Path) -> None:
    own = opened(recorded / "with_shapes.json")
    both = opened(recorded / "with_shapes.json", recorded / "execution.json")
    assert both.host.equals(own.host) and "adds nothing" in both.warnings[-1]


def test_alone_it_says_what_it_is(recorded: Path) -> None:
    with pytest.raises(UsageError, match="is an execution trace"):
        find_traces([recorded / "execution.json"])
    done = run_verb("analyze", recorded / "execution.json")
    assert done.returncode != 0 and "Name the trace of the profiler too" in done.stderr


def test_it_gives_an_export_of_nsight_systems_types_and_strides(tmp_path: Path) -> None:
    text = "aten::mm, seq = 1, op_id = 7, sizes = [[2, 3], [3, 4]]"
    export = NsightBuilder(pid=42).range(text, 10, 20).launch("gemm", 12, runs=(20, 5)).write(tmp_path)
    inputs = {
        "values": [[1], [2]],
        "shapes": [[2, 3], [3, 4]],
        "types": ["Tensor(float)"] * 2,
        "strides": [[3, 1]] * 2,
    }
    node = {"id": 2, "name": "aten::mm", "inputs": inputs, "attrs": [{"name": "rf_id", "value": 7}]}
    file = {"schema": "1.1.1-chakra.0.0.4", "pid": 42, "time": "", "start_ts": 1, "nodes": [node]}
    (tmp_path / "execution.json").write_text(json.dumps(file))
    host = opened(export, tmp_path / "execution.json").host
    assert host.select("name", *INPUTS).row(0) == (
        "aten::mm", "[[2, 3], [3, 4]]", '["float", "float"]', "[[3, 1], [3, 1]]",
    )  # fmt: skip


def change_pid(file: dict[str, Any]) -> None:
    file["pid"] += 1


def change_names(file: dict[str, Any]) -> None:
    for node in file["nodes"]:
        node["name"] += "!"


def repeat_nodes(file: dict[str, Any]) -> None:
    file["nodes"] *= 3


def break_inputs(file: dict[str, Any]) -> None:
    for node in file["nodes"]:
        node["inputs"]["types"] = node["inputs"]["types"][:1]


def without_strides(file: dict[str, Any]) -> None:
    for node in file["nodes"]:
        del node["inputs"]["strides"]


def break_types(file: dict[str, Any]) -> None:
    file["nodes"][0]["inputs"] = "none"


@pytest.mark.parametrize(
    ("change", "num_filled"),
    [
        (change_pid, 0),
        (change_names, 0),
        (break_types, 0),
        (break_inputs, None),
        (repeat_nodes, None),
        (without_strides, None),
    ],
)
def test_one_that_does_not_belong_or_is_broken_fills_nothing_wrong(
    recorded: Path, tmp_path: Path, change: Any, num_filled: int | None
) -> None:
    file = json.loads((recorded / "execution.json").read_text())
    change(file)
    (tmp_path / "execution.json").write_text(json.dumps(file))
    wanted = opened(recorded / "with_shapes.json").host["shapes"].to_list()
    found = opened(recorded / "trace.json", tmp_path / "execution.json").host["shapes"].to_list()
    assert len(found) == len(wanted) and all(one in (None, other) for one, other in zip(found, wanted))
    if num_filled is not None:
        assert len(found) - found.count(None) == num_filled

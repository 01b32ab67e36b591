"""Graph breaks are found in a trace by regions that call one another, in a recording by what torch.compile says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from host_cases import case_of, kernel, recorded, steps
from torch import nn

import stepscope
from stepscope.findings.rules.compiler import graph_breaks
from stepscope.recorder.windows import Windows
from stepscope.session import open_session
from trace_builder import TraceBuilder

BREAK = {"reason": "Data-dependent branching.", "place": "model.py:12 in forward", "count": 3}


def compiled(trace: TraceBuilder, at: float, nested: bool = True) -> float:
    """Two regions of 1 ms, in each 0.6 ms of getting in and 0.4 ms of compiled code that launches 0.2 ms of GPU."""
    first_length = 2000 if nested else 1000
    for number, start in enumerate((at, at + 1000)):
        length = first_length if number == 0 else 1000
        trace.op(f"Torch-Compiled Region: {number}/0", start, length)
        trace.annotation("## Call CompiledFxGraph abc ##", start + 600, 400)
        kernel(trace, start + 700, runs=start + 710, took=200, op="aten::mm")
    trace.call("cudaDeviceSynchronize", at + 2050, 20)
    return 2100


def test_a_region_called_by_another_follows_a_break():
    (finding,) = graph_breaks(case_of(steps(compiled)))

    # The second region's 0.6 ms of getting in, and 0.1 ms until its code does something.
    assert finding.saving_ns == 700_000
    assert "regions call each other" in finding.sentence
    assert "2 compiled regions" in finding.sentence and "700 µs per step (33 % of 2.10 ms)" in finding.sentence
    assert finding.confidence == "medium"


def test_regions_side_by_side_were_compiled_one_by_one():
    assert graph_breaks(case_of(steps(lambda trace, at: compiled(trace, at, nested=False)))) == []


def in_a_row(
    trace: TraceBuilder, at: float, backward_after_each: bool = False, is_differentiated: bool = True
) -> float:
    """Five regions of 1 ms, called from outside with 0.1 ms of Python between them, and their backward of 1 ms."""
    for number in range(5):
        start = at + 1100 * number
        trace.op("Torch-Compiled Region: 1/0", start, 1000)
        if is_differentiated:
            trace.op("CompiledFunction", start + 500, 500)
        trace.annotation("## Call CompiledFxGraph abc ##", start + 600, 400)
        kernel(trace, start + 600, runs=start + 610, took=200)
        if backward_after_each:
            trace.op("autograd::engine::evaluate_function: CompiledFunctionBackward", start + 1010, 50)
    trace.op("autograd::engine::evaluate_function: CompiledFunctionBackward", at + 5500, 900)
    kernel(trace, at + 5600, runs=at + 5610, took=200)
    trace.call("cudaDeviceSynchronize", at + 6450, 20)
    return 6500


def test_pieces_of_a_model_in_a_row_cost_the_way_from_one_to_the_next():
    (finding,) = graph_breaks(case_of(steps(in_a_row)))

    # Four times: 0.1 ms of Python in between, 0.6 ms of getting in.
    assert finding.saving_ns == 4 * 700_000
    assert "breaks within a loop" in finding.sentence


@pytest.mark.parametrize("arguments", [{"backward_after_each": True}, {"is_differentiated": False}])
def test_a_compiled_model_that_is_called_again_and_again_is_no_break(arguments):
    assert graph_breaks(case_of(steps(lambda trace, at: in_a_row(trace, at, **arguments)))) == []


def compiling(folder: Path, **fields: Any) -> Path:
    """A run of 12 steps, and what torch.compile said in it."""
    report = {"num_compiles": 1, "compile_seconds": 1.0, "graph_breaks": [], "recompiles": [], **fields}
    return recorded(folder, report)


def test_the_recording_knows_where_and_why(tmp_path):
    (finding,) = graph_breaks(case_of(None, compiling(tmp_path / "run", graph_breaks=[BREAK])))

    for figure in ("3 times", "model.py:12 in forward", "Data-dependent branching"):
        assert figure in finding.sentence
    assert finding.saving_ns is None and "model.py:12" in finding.fix


def test_a_recording_with_a_trace_counts_regions_side_by_side_too(tmp_path):
    trace = steps(lambda trace, at: compiled(trace, at, nested=False))

    (finding,) = graph_breaks(case_of(trace, compiling(tmp_path / "run", graph_breaks=[BREAK])))

    assert finding.saving_ns == 700_000 and finding.confidence == "high"


def test_what_was_compiled_whole_and_what_was_not_compiled_are_clean(tmp_path):
    assert graph_breaks(case_of(None, compiling(tmp_path / "whole"))) == []
    assert graph_breaks(case_of(None, recorded(tmp_path / "eager"))) == []


def test_too_many_sizes_of_cuda_graphs(tmp_path):
    graphs = {"num_recorded": 40, "num_compiled_functions": 2, "num_distinct_sizes": 20}
    few = {**graphs, "num_distinct_sizes": 2}

    (finding,) = graph_breaks(case_of(None, compiling(tmp_path / "many", cuda_graphs=graphs)))

    assert "for 20 different sizes of one compiled function, 40 graphs" in finding.sentence
    assert graph_breaks(case_of(None, compiling(tmp_path / "few", cuda_graphs=few))) == []


def test_a_report_of_another_shape_is_not_read(tmp_path):
    odd = compiling(tmp_path / "odd", graph_breaks=["?", None, {"count": "many"}], cuda_graphs=[3])

    case = case_of(None, odd)

    assert graph_breaks(case) == []
    assert any("compile.json" in warning for warning in case.recording.warnings)


class Model(nn.Module):
    """Layers; the graph may break in the loop over them, after which it cannot go on, or behind each pair of them."""

    def __init__(self, breaks: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.breaks == "in the loop":
                torch._dynamo.graph_break()
            x = layer(x)
        if self.breaks == "between":
            torch._dynamo.graph_break()
        x = self.layers[0](x)
        if self.breaks == "between":
            torch._dynamo.graph_break()
        return self.layers[1](x).sum()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Dynamo's own, when it goes on after a break
def test_a_real_model_that_breaks(tmp_path):
    found = {}
    for breaks in ("in the loop", "between", "nowhere"):
        torch._dynamo.reset()
        model = Model(breaks)
        compiled_model = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stepscope.record(tmp_path / breaks, windows=Windows(warmup=2, clean=3, trace=2)):
            for _ in range(9):
                compiled_model(torch.ones(4, 8)).backward()
                optimizer.step()
                optimizer.zero_grad()
        found[breaks] = open_session(tmp_path / breaks, use_cache=False).case

    assert graph_breaks(found["nowhere"]) == []
    (given_up,) = graph_breaks(found["in the loop"])
    assert "test_graph_breaks.py" in given_up.sentence and "the function runs eagerly" in given_up.sentence
    assert given_up.saving_ns is None
    # What it costs depends on the machine; that two regions of each step are called by others does not.
    for breaks, nested in (("between", [False, True, True]), ("nowhere", [False])):
        case = found[breaks]
        assert case.compiled_regions["is_nested"].to_list() == nested * case.num_steps

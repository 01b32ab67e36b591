"""The compiler's figures from hand-written reports: guards grouped, stages in order, when compiling has paid."""

from __future__ import annotations

import json
import math

import pytest

from handmade import gpu_recording
from stepscope.analysis.compiler.compile_summary import break_even, compiler_summary, split_guard
from stepscope.border import fields_that_fit
from stepscope.document.sections.compiler import break_even_text, compiler_document
from stepscope.findings.compiler_report import compiler_report
from stepscope.render.terminal import terminal_text
from stepscope.session import open_session
from stepscope.trace.compile_file import SCHEMA

REPORT = {
    "num_compiles": 4,
    "compile_seconds": 20.0,
    "seconds_by_stage": {"kernels": 12.0, "dynamo": 3.0, "inductor": 5.0},
    "num_graphs": 3,
    "graphs": [{"num_ops": 5}, {"num_ops": 7}],
    "graph_breaks": [
        {"reason": "print", "place": "model.py:3 in forward", "count": 1},
        {"reason": "nonzero", "place": "moe.py:9 in forward", "count": 2, "runs_eagerly": True},
    ],
    "recompiles": [
        {"frame": "f (m.py:1)", "failed_guards": ["0/0: tensor 'x' size mismatch at index 0. expected 8, actual 10"]},
        {
            "frame": "f (m.py:1)",
            "failed_guards": ["0/1: tensor 'x' size mismatch at index 0. expected 10, actual 12"],
        },
        {
            "frame": "f (m.py:1)",
            "failed_guards": ["0/2: self.step == 1", "0/1: self.step == 0"],
            "place": "m.py:7 in f",
        },
    ],
    "recompile_limit_hits": [{"frame": "'f' (m.py:1)", "count": 1}],
    "dynamic_dimensions": [{"source": "L['x'].size()[0]", "sizes": ["10"], "place": "m.py:5 in f"}],
    "caches": {"graphs": {"hit": 1, "miss": 3}, "autograd": {"miss": 4}},
    "cuda_graphs": {"num_recorded": 6, "num_compiled_functions": 2, "num_distinct_sizes": 3},
    "cuda_graph_skips": [{"reason": "mutated inputs", "count": 2}],
    "failures": [],
    "compiled_calls": [{"key": "k", "calls": [["aten::mm", "a"], ["triton_x", None]]}],
}


def test_recompiles_are_told_by_guard_with_the_sizes_seen():
    sizes, step = compiler_summary(REPORT).recompiles

    assert (sizes.guard, sizes.values, sizes.count) == ("size 0 of 'x'", ("8", "10", "12"), 2)
    assert (step.guard, step.values, step.place) == ("self.step", ("1",), "m.py:7 in f")


@pytest.mark.parametrize("tensor", ["self.rope.table", "L['self'].rope.table"], ids=["today", "torch 2.6"])
def test_a_size_that_changed_has_the_line_where_it_is_first_used(tensor):
    guard = f"0/0: tensor '{tensor}' size mismatch at index 0. expected 1, actual 8"
    used = {"source": "L['self'].rope.table.size()[0]", "sizes": ["8"], "place": "rope.py:13 in forward"}
    report = {"recompiles": [{"frame": "f (m.py:1)", "failed_guards": [guard]}], "dynamic_dimensions": [used]}

    (found,) = compiler_summary(report).recompiles
    assert found.place == "rope.py:13 in forward" and found.values == ("1", "8")


def test_figures():
    summary = compiler_summary(REPORT)

    assert list(summary.seconds_by_stage) == ["dynamo", "inductor", "kernels"]
    assert (summary.num_graphs, summary.num_ops, summary.num_graph_breaks, summary.num_recompiles) == (3, 12, 3, 3)
    assert summary.graph_breaks[0]["reason"] == "nonzero" and summary.untold == ()
    assert (summary.num_calls, summary.num_placed_calls) == (2, 1)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({"num_compiles": 1}, "older Stepscope"),
        ({"num_compiles": 1, "num_graphs": 1, "seconds_by_stage": {}}, "seconds by stage"),
        (REPORT | {"caches": {"graphs": {"hit": 1}}}, "autograd cache"),
        (REPORT | {"recompiles": [{"frame": "f", "failed_guards": ["x is None"]}]}, "line of every guard"),
    ],
)
def test_what_a_torch_does_not_tell_is_said(report, said):
    assert any(said in text for text in compiler_summary(report).untold)


@pytest.mark.parametrize("name", REPORT)
@pytest.mark.parametrize("nonsense", [None, 3, "x", [1], {"a": None}, [{"failed_guards": 3}], [{"calls": [1]}]])
def test_nonsense_is_survived(name, nonsense):
    report = fields_that_fit(REPORT | {name: nonsense}, SCHEMA, "compile.json", warnings := [])

    assert (name not in report and len(warnings) <= 1) or report[name] == nonsense
    json.dumps(compiler_summary(report).to_json(), allow_nan=False)


def test_a_failure_that_a_graph_break_tells_is_told_once():
    failures = [{"reason": "the same", "place": "moe.py:9"}, {"reason": "another", "place": "moe.py:90"}]
    summary = compiler_summary({**REPORT, "failures": failures})

    assert [failure["reason"] for failure in summary.failures] == ["another"]


def test_guards_of_any_other_form_are_kept():
    assert split_guard("0/3: Unable to find guard") == ("Unable to find guard", [], False)


def test_when_compiling_has_paid():
    assert break_even(2.0, 1e6, 3e6) == 1000
    assert break_even(2.0, 3e6, 1e6) == math.inf and break_even(2.0, None, 1e6) is None
    never = compiler_summary(REPORT, compiled_ns=3e6, eager_ns=1e6)
    assert "never pays" in break_even_text(never)
    assert never.to_json()["break_even"] is None and never.to_json()["pays"] is False
    assert "10,000 steps" in break_even_text(compiler_summary(REPORT, compiled_ns=1e6, eager_ns=3e6))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_screen_of_a_recording_fits(tmp_path, width):
    case = open_session(gpu_recording(tmp_path / "run", REPORT)).case
    text = terminal_text(compiler_document(compiler_report(case)), width)

    assert max(map(len, text.splitlines())) <= width
    for words in ("moe.py:9 in forward", "m.py:7 in f", "seen: 8, 10, 12", "20.0 s", "6 recorded", "mutated inputs"):
        assert words in text
    assert "now run eagerly" in " ".join(text.split())

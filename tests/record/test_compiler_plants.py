"""Real torch.compile over planted causes: each is named with its reason and its line."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import planted_for_compiler as planted

from stepscope.analysis.compiler.compile_summary import compiler_summary
from stepscope.recorder.compiler.compile_watch import CompilerProbe

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
SOURCE = Path(planted.__file__)
TELLS_LINES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


def line_of(mark: str) -> int:
    return next(
        number for number, text in enumerate(SOURCE.read_text().splitlines(), 1) if f"planted: {mark}" in text
    )


def compiled(model, calls, backend="eager", recompile_limit=None):
    """The probe's report of calling a compiled model; `calls` are made one after the other."""
    torch._dynamo.reset()
    probe = CompilerProbe()
    probe.start()
    limit = {} if recompile_limit is None else {"recompile_limit": recompile_limit}
    try:
        with torch._dynamo.config.patch(**limit):
            function = torch.compile(model, backend=backend)
            for call in calls:
                call(function)
    finally:
        probe.stop()
        torch._dynamo.reset()
    return probe.report()


def rows(num):
    return lambda model: model(torch.randn(num, 4)).sum().backward()


def test_a_graph_break_is_named_with_its_line():
    (found,) = compiled(planted.Breaks(), [rows(4)])["graph_breaks"]

    assert f"{SOURCE}:{line_of('graph break')} in forward" == found["place"]
    assert "print" in found["reason"] and found["count"] == 1 and "runs_eagerly" not in found


def test_a_recompile_in_every_step_is_named_with_its_guard_and_its_line():
    model = planted.Counts()

    def step(function):
        rows(4)(function)
        model.step += 1

    report = compiled(model, [step] * 4)

    assert [entry["failed_guards"][0].partition(": ")[2] for entry in report["recompiles"]] in (
        ["self.step == 0", "self.step == 1", "self.step == 2"],
        ["L['self'].step == 0"],  # torch 2.6 makes the number dynamic the second time
    )
    if TELLS_LINES:
        assert {entry["place"] for entry in report["recompiles"]} == {f"{SOURCE}:{line_of('recompile')} in forward"}


def test_the_recompile_limit_and_what_runs_eagerly_since_are_named():
    if not hasattr(torch._dynamo.config, "recompile_limit"):
        pytest.skip("this torch compiles for any number the second time")
    model = planted.Counts()

    def step(function):
        rows(4)(function)
        model.step += 1

    report = compiled(model, [step] * 5, recompile_limit=2)

    (hit,) = report["recompile_limit_hits"]
    assert str(SOURCE) in hit["frame"] and "forward" in hit["frame"]
    # What torch then refuses to compile is no compile, no recompile and no failure of its own.
    assert (report["num_compiles"], len(report["recompiles"]), report["failures"]) == (2, 1, [])
    assert {str(SOURCE) in entry["frame"] for entry in (*report["frames"], *report["recompiles"])} == {True}


def test_a_buffer_that_is_registered_again_is_named_with_its_line():
    (found,) = compiled(planted.Rotary(), [rows(4)] * 3)["recompiles"]

    assert "_non_persistent_buffers_set" in found["failed_guards"][0]
    if TELLS_LINES:
        assert found["place"] == f"{SOURCE}:{line_of('buffer')} in forward"


@pytest.mark.skipif(not TELLS_LINES, reason="this torch does not tell the line")
def test_a_buffer_of_another_size_is_named_with_its_line_in_a_second_recording_too():
    for _ in range(2):  # torch says the name of a file once in a process
        report = compiled(planted.GrowingRotary(), [rows(4)] * 3)

        (found,) = compiler_summary(report).recompiles
        assert "cosines" in found.guard and found.values == ("1", "4")
        assert found.place == f"{SOURCE}:{line_of('longer buffer')} in forward"


def test_a_loop_over_experts_is_named_with_its_line():
    report = compiled(planted.Experts(), [rows(8)])
    found = report["graph_breaks"][0]

    assert found["place"] == f"{SOURCE}:{line_of('data-dependent shape')} in forward"
    assert "nonzero" in found["reason"] and found.get("runs_eagerly", not TELLS_LINES)


def test_sizes_that_change_are_dynamic_dimensions():
    report = compiled(planted.Breaks().second, [rows(4), rows(6), rows(7)])

    (again,) = report["recompiles"]
    (dynamic,) = report["dynamic_dimensions"]
    assert "expected 4, actual 6" in again["failed_guards"][0]
    assert dynamic["sizes"] == ["6"] and dynamic["source"].endswith(".size()[0]")


class Products(torch.nn.Module):
    """Products alone: library calls, nothing for a C++ compiler to compile."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.long
def test_calls_of_compiled_code_have_their_modules(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(8, 8, requires_grad=True)
    report = compiled(Products(), [lambda model: model(x).backward(torch.ones(8, 8))], backend="inductor")

    forward, backward = report["compiled_calls"]
    assert forward["calls"] == [["aten::mm", "blocks.0"], ["aten::mm", "blocks.1"]]
    assert backward["is_backward"] and len(backward["calls"]) == 4
    if TELLS_LINES:
        assert {module for _, module in backward["calls"]} == {"blocks.0", "blocks.1"}
    assert forward["key"] and backward["key"] and forward["key"] != backward["key"]
    assert set(report["seconds_by_stage"]) >= {"dynamo", "autograd", "inductor"}
    assert sum(report["seconds_by_stage"].values()) == pytest.approx(report["compile_seconds"], abs=0.01)
    assert report["caches"]["graphs"] == {"miss": 2} and report["num_graphs"] == 1

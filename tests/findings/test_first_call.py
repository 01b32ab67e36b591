"""First-call cost in what should be the steady state."""

from __future__ import annotations

import pytest
from recorded_cases import recorded

from stepscope.errors import Unavailable
from stepscope.findings.rules.step_times import first_call
from stepscope.session import open_session
from trace_builder import TraceBuilder


def test_clean_steps_that_had_not_settled(tmp_path):
    case = recorded(tmp_path, [30.0, 25.0, 20.0, 15.0, *[10.0] * 16], windows={"warmup": 5, "clean": 20})

    (finding,) = first_call(case)

    assert finding.saving_ns is None
    assert finding.sentence.startswith("Of 20 clean steps, the first 4 were still warming up: the first took 30.0 ms")
    assert finding.fix == "stepscope run --warmup 9 --clean 20 train.py --lr 0.1"
    assert finding.evidence[0].rows[0]["mean_ns"] == 12.5e6


@pytest.mark.parametrize(
    "times",
    [
        pytest.param([10.0] * 20, id="steady"),
        pytest.param([30.0, 30.0, *[10.0] * 18], id="two, which may be chance"),
        pytest.param([10.0, 30.0] * 10, id="noise"),
        pytest.param([30.0] * 3 + [10.0] * 4, id="too few to say"),
    ],
)
def test_steps_that_have_settled(tmp_path, times):
    assert first_call(recorded(tmp_path, times)) == []


def traced(num_steps, load_us, num_loading=1):
    """Steps of one op, the first of which take so long to load its kernel."""
    trace = TraceBuilder()
    for step in range(num_steps):
        begin = 10_000 * step
        load = load_us if step < num_loading else 0
        trace.step(step + 1, begin, 5000 + load)
        if load:
            trace.call("cuModuleLoadData", begin + 50, load)
        trace.op("aten::mm", begin + load + 100, 40, id=step + 1)
        trace.launch("gemm", begin + load + 110, runs=(begin + load + 120, 4000), id=step + 1)
    return trace


def test_the_only_step_of_a_trace_loads_its_kernels(tmp_path):
    (finding,) = first_call(open_session(traced(1, 3000).write(tmp_path / "trace.json"), use_cache=False).case)

    assert "only one step" in finding.sentence
    assert finding.saving_ns == pytest.approx(3e6, rel=0.05)


@pytest.mark.parametrize(("num_steps", "load_us", "num_loading"), [(1, 0, 0), (3, 3000, 1), (3, 3000, 3)])
def test_a_trace_of_steady_steps(tmp_path, num_steps, load_us, num_loading):
    trace = traced(num_steps, load_us, num_loading)

    assert first_call(open_session(trace.write(tmp_path / "trace.json"), use_cache=False).case) == []


def test_without_anything(tmp_path):
    with pytest.raises(Unavailable):
        first_call(recorded(tmp_path, []))

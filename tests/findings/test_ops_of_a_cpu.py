"""Rules that read kernels on a GPU read ops on a CPU: each op for its own time, within the rows of the ledger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from host_cases import case_of
from recorded_cases import recorded

from handmade import MS
from stepscope.errors import ABOUT_GPUS, Unavailable
from stepscope.findings.diagnose import diagnose
from stepscope.findings.rules.casts_and_copies import needless_copies
from stepscope.findings.rules.fusion import parameter_loop, unfused_elementwise, unfused_optimizer
from stepscope.findings.rules.launches import launch_bound
from stepscope.findings.rules.step_times import host_work_between_steps
from stepscope.session.case import Case
from trace_builder import TraceBuilder

FLAGS = {"num_threads": 1, "num_cores": 8, "cpu.bf16": False}
STEP_US = 10_000
LARGE = [1024, 256]  # 1 MiB in float32

Ops = Callable[[TraceBuilder, int], None]  # writes the ops of a step that begins there


def of_ops(folder: Path, write: Ops, phase: str, ms: float = 10.0, where: str = "other") -> Case:
    """A recording on a CPU whose two traced steps are as long as its clean ones, all of them in one phase."""
    recorded(folder, [ms] * 20, flags=FLAGS, where=where)
    trace = TraceBuilder()
    for step in (0, 1):
        at = STEP_US * step
        trace.step(step + 1, at, STEP_US).annotation(f"stepscope.phase/{phase}", at, STEP_US - 5)
        write(trace, at)
    return case_of(trace, folder)


def op(trace: TraceBuilder, name: str, at: float, took: float, *dims: list[int]) -> None:
    shapes = {"Input Dims": list(dims), "Input type": ["float"] * len(dims)}
    trace.op(name, at, took, id=len(trace.events) + 1, **shapes)


def test_views_do_nothing_and_the_inner_op_does_the_work(tmp_path):
    def write(trace, at):
        op(trace, "aten::linear", at, 1000, LARGE, [64, 256])
        op(trace, "aten::t", at + 10, 20, [64, 256])
        op(trace, "aten::mm", at + 50, 900, LARGE, [256, 64])
        op(trace, "aten::mul", at + 2000, 100, [], [])

    case = of_ops(tmp_path, write, "forward")

    assert case.work["op"].cast(str).to_list() == ["aten::mm"] * 2
    assert case.work["duration_ns"].to_list() == [900_000] * 2
    rate = 2 * 1024 * 256 * 64 / 900e-6
    assert case.device.peak_flops["fp32"] == pytest.approx(rate / 0.6), "as fast as its own products"


def test_a_long_op_of_no_known_class_is_not_removed_with_what_is_in_it(tmp_path):
    def write(trace, at):
        op(trace, "aten::mkldnn_rnn_layer_backward", at, 8000, LARGE)
        op(trace, "aten::clone", at + 100, 700, LARGE)
        op(trace, "aten::copy_", at + 100, 650, LARGE, LARGE)
        op(trace, "aten::mul", at + 8100, 700, LARGE)

    for finding in unfused_elementwise(of_ops(tmp_path, write, "forward")):
        assert finding.saving_ns < 1.4 * MS


def test_a_chain_of_ops_is_no_shorter_than_its_longest(tmp_path):
    def write(trace, at):
        for start, took in ((0, 1000), (1500, 1000), (3000, 3000), (6500, 1000)):
            op(trace, "aten::tanh" if took > 1000 else "aten::mul", at + start, took, LARGE)

    (finding,) = unfused_elementwise(of_ops(tmp_path, write, "forward"))

    assert finding.saving_ns == pytest.approx(3 * MS, rel=0.01), "the others are gone, without their pauses"
    assert "4 elementwise ops per step" in finding.sentence


def test_outside_of_the_passes_nothing_would_be_compiled(tmp_path):
    def write(trace, at):
        for number in range(4):
            op(trace, "aten::mul", at + 1500 * number, 1000, LARGE)

    assert unfused_elementwise(of_ops(tmp_path, write, "between")) == []


def loop(trace: TraceBuilder, at: float) -> None:
    """An average of 90 small weights of three shapes, 50 µs each with the Python code after it."""
    for number in range(90):
        op(trace, "aten::lerp_", at + 50 * number, 20, *[[8, 8 * (1 + number % 3)]] * 2)


def test_a_loop_over_parameters_saves_its_python_code_too(tmp_path):
    (finding,) = parameter_loop(of_ops(tmp_path, loop, "between"))

    # All but the first call of 90: from one to the end of the next. The first takes no longer than before.
    assert finding.saving_ns == pytest.approx((88 * 50 + 20) * 1000, rel=0.01)
    assert "90 ops per step" in finding.sentence


def test_an_optimizer_that_is_a_loop(tmp_path):
    def write(trace, at):
        for number in range(30):
            op(trace, "aten::mul_", at + 200 * number, 200, [512, 512])

    (finding,) = unfused_optimizer(of_ops(tmp_path, write, "optimizer"))

    assert 2 * MS < finding.saving_ns < 10 * MS
    assert "30 ops per step take" in finding.sentence and "GPU" not in finding.sentence


def test_copies_that_the_program_asks_for(tmp_path):
    def write(trace, at):
        op(trace, "aten::contiguous", at, 1000, LARGE)
        op(trace, "aten::clone", at + 10, 980, LARGE)
        op(trace, "aten::copy_", at + 20, 950, LARGE, LARGE)

    (finding,) = needless_copies(of_ops(tmp_path, write, "forward"))

    assert finding.saving_ns == pytest.approx(1 * MS, rel=0.01), "with what is around the copy"


def test_rules_about_gpus_do_not_apply(tmp_path):
    with pytest.raises(Unavailable, match=ABOUT_GPUS):
        launch_bound(of_ops(tmp_path, loop, "forward"))


@pytest.mark.parametrize("phase", ["forward", "optimizer", "between"])
def test_no_finding_claims_more_than_its_rows_hold(tmp_path, phase):
    diagnosis = diagnose(of_ops(tmp_path, loop, phase, where="before_forward", ms=20.0))
    held = {row.id: row.ns for row in diagnosis.ledger.rows}

    assert sum(diagnosis.ledger.parts.values()) == diagnosis.ledger.total_ns
    for finding in diagnosis.findings:
        assert all(ns <= held[row] + 1 for row, ns in finding.claims.items())
        assert (finding.saving_ns or 0) <= sum(finding.claims.values()) + 1
    assert diagnosis.gpu_busy_share is None and diagnosis.ledger.limit_share is None


def test_the_script_s_functions_between_steps_are_named(tmp_path):
    def write(trace, at):
        trace.python("train.py(3): <module>", at, STEP_US - 10)
        trace.python("train.py(12): auc", at + 100, 8000)
        trace.python("numpy/lib/function_base.py(9): sort", at + 200, 5000)

    case = of_ops(tmp_path, write, "between", ms=20.0, where="before_forward")
    (finding,) = host_work_between_steps(case)

    assert "the lines that take it: train.py(12): auc, train.py(3): <module>" in finding.sentence
    (lines, *_) = [one for one in finding.evidence if one.table == "lines between steps"]
    assert lines.rows[0] == {"caller": "train.py(12): auc", "duration_ns": 8 * MS}

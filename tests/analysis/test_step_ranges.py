"""Steps from ranges that the user named, in an export of Nsight Systems or in a trace of the profiler."""

from __future__ import annotations

from pathlib import Path

from nsight_files import NsightBuilder, training_run
from parametrized import parametrized
from stepscope.analysis.ranks.rank_account import account
from stepscope.analysis.structure.links import link
from stepscope.trace.reader import read_trace
from trace_builder import TraceBuilder


@parametrized(
    ("label", "numbers"),
    [
        ("step {}", [0, 1, 2, 3]),
        ("Iteration: {}", [0, 1, 2, 3]),
        ("train_step_{}", [0, 1, 2, 3]),
        ("global_step=1{}", [10, 11, 12, 13]),
        ("train_step", [0, 1, 2, 3]),
    ],
    quick=2,
)
def test_ranges_named_like_steps_are_steps(tmp_path: Path, label: str, numbers: list[int]) -> None:
    result = account(read_trace(training_run(label=label).write(tmp_path)), 0)
    assert (result.step_source, result.steps["step"].to_list()) == ("range", numbers)
    assert result.steps["duration_ns"].to_list() == [990_000] * 4
    assert result.steps["num_kernels"].to_list() == [4] * 4


def test_the_profilers_own_labels_come_first(tmp_path: Path) -> None:
    export = training_run(label="ProfilerStep#{}").range("step 0", 0, 3000)
    assert link(read_trace(export.write(tmp_path))).steps.source == "ProfilerStep"


def test_ranges_that_are_not_named_like_steps_are_none_where_ops_tell_more(tmp_path: Path) -> None:
    assert link(read_trace(training_run(label="batch of data").write(tmp_path))).steps.source == "optimizer"


def test_a_phase_called_step_fills_too_little_time() -> None:
    trace = TraceBuilder()
    for at in (0, 1000, 2000):
        trace.op("aten::mm", at, 100).annotation("step", at + 500, 100)
        trace.annotation("Optimizer.step#SGD.step", at + 500, 100)
    assert trace.linked().steps.source == "optimizer"


def test_numbers_that_begin_again_are_counted_on() -> None:
    trace = TraceBuilder()
    for at, number in ((0, 0), (100, 1), (200, 0), (300, 1)):
        trace.annotation(f"epoch {at // 200} step {number}", at, 90).annotation(f"step {number}", at + 1, 80)
    assert trace.linked().steps.table.select("step", "start_ns").rows() == [
        (0, 1000), (1, 101_000), (2, 201_000), (3, 301_000),
    ]  # fmt: skip


def test_without_ops_the_outermost_range_that_fills_most_time_is_the_step(tmp_path: Path) -> None:
    export = NsightBuilder()
    for at in (0, 100, 200):
        export.range("work item", at, 80).range("inner", at + 5, 70).range("backward", at + 81, 18)
        export.launch("kernel", at + 10, runs=(at + 20, 30))
    steps = link(read_trace(export.write(tmp_path))).steps
    assert steps.source == "range" and steps.main_thread is not None
    assert steps.table["start_ns"].to_list() == [0, 100_000, 200_000]


def test_without_ops_a_phase_is_no_step(tmp_path: Path) -> None:
    export = NsightBuilder()
    for at in (0, 100, 200):
        export.range("forward", at, 30).range("backward", at + 30, 65).launch("kernel", at + 10, runs=(at + 20, 30))
    assert link(read_trace(export.write(tmp_path))).steps.source == "none"


def test_without_ops_ranges_that_are_rare_are_no_steps(tmp_path: Path) -> None:
    export = NsightBuilder().range("setup", 0, 80).range("teardown", 100, 80).launch("kernel", 10, runs=(20, 30))
    assert link(read_trace(export.write(tmp_path))).steps.source == "none"

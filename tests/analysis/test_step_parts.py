"""Where a step goes: rows that sum to what they are of."""

from __future__ import annotations

import polars as pl
import pytest

from handmade import gpu_recording
from stepscope import read
from stepscope.analysis.compiler.compiled_regions import regions_by_name
from stepscope.analysis.costs.flops import StepFlops
from stepscope.analysis.precision.casts import casts_by_use, flops_by_dtype, products_by_dtype
from stepscope.analysis.time.step_parts import gpu_rows_of_trace, gpu_split, host_rows, host_rows_of_trace, waiting_ns
from trace_builder import TraceBuilder


@pytest.fixture
def trace() -> TraceBuilder:
    """Two steps of 100 µs, 40 and 20 µs of GPU work in each, and work that nobody launched."""
    built = TraceBuilder().step(1, 0, 100).step(2, 100, 100)
    for start in (0, 100):
        built.op("aten::mm", start + 10, 20, id=start + 5).launch(
            "gemm", start + 12, runs=(start + 30, 40), id=start + 5
        )
        built.annotation("Optimizer.step#SGD.step", start + 80, 15)
        built.launch("add", start + 82, runs=(start + 90, 20))
    return built.kernel("orphan", 250, 10)


def test_the_rows_of_a_trace_sum_to_its_window_and_to_its_steps(trace):
    account = trace.account()
    gpu, host = gpu_rows_of_trace(account), host_rows_of_trace(account)

    assert sum(row.share for row in gpu) == pytest.approx(1) and sum(row.share for row in host) == pytest.approx(1)
    assert sum(row.ns for row in gpu) * 2 == account.gpu_time.window_ns == 230_000
    assert sum(row.ns for row in host) * 2 == 200_000
    parts = {row.name: row.ns for row in gpu}
    assert (parts["optimizer"], parts["unattributed"]) == (20_000, 5_000)
    assert parts["idle"] * 2 == account.gpu_time.idle_ns


def test_a_trace_without_gpu_work_has_no_gpu_rows():
    account = TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20).account()

    assert gpu_rows_of_trace(account) == [] and gpu_split(account.gpu_time) == []
    assert sum(row.ns for row in host_rows_of_trace(account)) == 100_000


def test_what_the_gpu_did_sums_to_its_window(trace):
    rows = gpu_split(trace.kernel("ncclKernel_AllReduce", 262, 8).account().gpu_time)

    assert {row.name: row.ns for row in rows}["communication"] == 8000
    assert sum(row.share for row in rows) == pytest.approx(1)


def test_a_recordings_host_rows_sum_to_the_host_and_waiting_to_idle(tmp_path):
    summary = read(gpu_recording(tmp_path / "run")).summary
    rows = {row.name: row for row in host_rows(summary.phases)}

    assert sum(row.ns for row in rows.values()) == 10_000_000 and rows["forward"].share == 0.4
    idle, unattributed = (
        next(row.ns for row in summary.rows if row.name == name) for name in ("idle", "unattributed")
    )
    assert sum(waiting_ns(phase) or 0 for phase in summary.phases) == idle + unattributed


def test_flops_by_dtype_are_shares_of_what_was_executed():
    flops = StepFlops(
        model_flops=90, hardware_flops=100, recomputed_flops=10, model_flops_by_dtype={"bf16": 70, "fp32": 20},
        hardware_flops_by_dtype={"fp32": 20, "bf16": 80}, has_backward=True, formula_flops=None,
        num_active_parameters=None, uncounted_ops=(), num_uncounted_calls=0, hidden=None,
    )  # fmt: skip

    assert flops_by_dtype(flops) == [
        {"dtype": "bf16", "model_flops": 70, "executed_flops": 80, "share": 0.8},
        {"dtype": "fp32", "model_flops": 20, "executed_flops": 20, "share": 0.2},
    ]


def test_products_casts_and_regions_are_a_steps():
    calls = pl.DataFrame(
        {"dtype": ["float32", "bfloat16", "bfloat16"], "peak_dtype": ["tf32", "bf16", "bf16"],
         "duration_ns": [10, 20, 10], "flops": [100, 400, 200]}
    )  # fmt: skip
    rows = products_by_dtype(calls, 2).to_dicts()
    assert [(row["peak_dtype"], row["num_calls"], row["duration_ns"], row["time_share"]) for row in rows] == [
        ("bf16", 1.0, 15.0, 0.75),
        ("tf32", 0.5, 5.0, 0.25),
    ]
    assert rows[0]["flops_per_s"] == 600 * 1e9 / 30

    casts = pl.DataFrame(
        {"source": ["float32"] * 2, "target": ["bfloat16"] * 2, "is_autocast": [True] * 2, "is_weight": [True] * 2,
         "phase": ["forward"] * 2, "root_op": ["aten::linear"] * 2, "duration_ns": [3, 5]}
    )  # fmt: skip
    assert casts_by_use(casts, 2).select("num_casts", "duration_ns").rows() == [(1.0, 4.0)]

    first = "Torch-Compiled Region: 0/0"
    regions = pl.DataFrame(
        {
            "name": [first, "Torch-Compiled Region: 1/0", first],
            "is_nested": [False, True, False],
            "start_ns": [0, 1, 10],
            "end_ns": [4, 3, 18],
        }
    )
    assert regions_by_name(regions, 2, {}).rows() == [
        ("compiled region 0/0", False, 1.0, 6.0),
        ("compiled region 1/0", True, 0.5, 1.0),
    ]

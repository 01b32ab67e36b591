"""Figures above what the device can do."""

from __future__ import annotations

import json

import pytest
from recorded_cases import GPU, recorded

from handmade import flops_facts, op_flops, sample
from stepscope.errors import Unavailable
from stepscope.findings.rules.machine import impossible_mfu
from stepscope.findings.rules.matrix_products import gemm_calls
from stepscope.session import open_session
from trace_builder import TraceBuilder

PEAK = 989_400_000_000_000
"""Of the H200 in bf16, a second."""


def utilized(folder, share, dtype="bf16", peak=PEAK, formula_share=1.0, is_gpu=True, environment=GPU):
    """Steps of 10 ms with so much of a peak's FLOPs, by an op-by-op count and by the formula."""
    total = round(share * peak / 100)
    per_token = 2 * 512
    weights = [{"num_elements": round(formula_share * total / 3) // per_token, "forward_flops": total // 3,
                "looked_up": False, "used": True}]  # fmt: skip
    flops = flops_facts(
        by_op=[op_flops("forward", total // 3, dtype), op_flops("backward", total - total // 3, dtype)],
        model_flops_by_dtype={dtype: total}, weights=weights,
    )  # fmt: skip
    case = recorded(folder, [10.0] * 8, is_gpu=is_gpu, flops=flops, environment=environment)
    lines = (folder / "samples.jsonl").read_text()
    (folder / "samples.jsonl").write_text(lines + json.dumps(sample(8, "memory")) + "\n")
    return open_session(case.path, use_cache=False).case


def test_mfu_above_one(tmp_path):
    (finding,) = impossible_mfu(utilized(tmp_path, 1.5))

    assert finding.sentence.startswith(
        "MFU is 150 %, which is impossible: 1.48e+03 TFLOP/s against a limit of bf16 989"
    )
    assert "The peak or the FLOPs are wrong" in finding.sentence
    assert finding.saving_ns is None


def test_the_clock_of_a_host_that_runs_ahead(tmp_path):
    case = utilized(tmp_path, 1.5, is_gpu=False)

    assert "The time is wrong: 10.0 ms is host time" in impossible_mfu(case)[0].sentence


def test_float32_that_must_have_been_tf32(tmp_path):
    (finding,) = impossible_mfu(utilized(tmp_path, 2.0, dtype="fp32", peak=66_900_000_000_000))

    assert "The dtype is wrong" in finding.sentence


def test_flops_that_are_more_than_the_formula_s(tmp_path):
    (finding,) = impossible_mfu(utilized(tmp_path, 1.5, formula_share=0.5))

    assert "The FLOPs are wrong: 2.0 times 6·N·tokens" in finding.sentence


def test_half_of_the_peak(tmp_path):
    assert impossible_mfu(utilized(tmp_path, 0.5)) == []


def traced(duration_us):
    """One product of 2 · 4096³ FLOPs in bf16: 138.9 µs at the dense peak."""
    trace = TraceBuilder(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])
    shapes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    trace.step(1, 0, 1000).op("aten::mm", 10, 20, id=1, **shapes)
    return trace.launch("nvjet_tst_bf16", 12, runs=(30, duration_us), id=1)


@pytest.mark.parametrize(("duration_us", "num"), [(100, 1), (200, 0), (20, 0)])
def test_a_product_that_is_faster_than_the_device(tmp_path, duration_us, num):
    found = impossible_mfu(open_session(traced(duration_us).write(tmp_path / "trace.json"), use_cache=False).case)

    assert len(found) == num
    if num:
        assert "aten::mm in bf16 at 139 % of its 989 TFLOP/s" in found[0].sentence


def test_a_convolution_may_multiply_less_than_is_counted(tmp_path):
    """2 · 32 · 256 · 256 · 9 · 14² FLOPs in float32 take 111 µs at the dense peak; Winograd's way takes fewer."""
    trace = TraceBuilder(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])
    shapes = {
        "Input Dims": [[32, 256, 14, 14], [256, 256, 3, 3], [], [], [], [], [], []],
        "Input type": ["float", "float"],
        "Concrete Inputs": ["", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"],
    }
    trace.step(1, 0, 1000).op("aten::cudnn_convolution", 10, 20, id=1, **shapes)
    trace.launch("scudnn_winograd_128x128", 12, runs=(30, 60), id=1)
    case = open_session(trace.write(tmp_path / "trace.json"), use_cache=False).case

    (call,) = gemm_calls(case).iter_rows(named=True)
    assert call["flops"] / call["duration_ns"] * 1e9 > 1.02 * case.device.peak_flops["fp32"]
    assert impossible_mfu(case) == []


def test_without_a_peak(tmp_path):
    with pytest.raises(Unavailable, match=r"The peak of Unheard 9 is unknown.*doctor --measure"):
        impossible_mfu(utilized(tmp_path, 1.5, environment={**GPU, "device_name": "Unheard 9"}))


def test_without_flops(tmp_path):
    with pytest.raises(Unavailable, match="FLOPs were not counted"):
        impossible_mfu(recorded(tmp_path, [10.0] * 8))

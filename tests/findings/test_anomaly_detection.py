"""NaN looked for at every op is found, autograd's or one's own; one look at the loss is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from host_cases import case_of, copy, kernel, steps
from torch import nn

import stepscope
from stepscope.findings.rules.waits import anomaly_detection, synchronization
from stepscope.recorder.windows import Windows
from stepscope.session import open_session
from trace_builder import TraceBuilder


def checked(trace: TraceBuilder, at: float, num: int = 4) -> float:
    """Kernels of 1 ms, each followed by a test whose answer is waited for, 200 µs of the host each time."""
    for _ in range(num):
        kernel(trace, at, runs=at + 10, took=1000)
        kernel(trace, at + 50, runs=at + 1010, took=5, op="aten::isnan")
        kernel(trace, at + 80, runs=at + 1015, took=5, op="aten::any")
        copy(trace, "DtoH (Device -> Pinned)", at + 110, 920, (at + 1020, 2), 1, "aten::item")
        trace.call("cudaStreamSynchronize", at + 120, 910)
        at += 1200
    trace.call("cudaDeviceSynchronize", at, 20)
    return 1200.0 * num + 50


def test_checks_of_ones_own():
    case = case_of(steps(checked))

    (finding,) = anomaly_detection(case)

    # Left: 4 kernels of 1 ms with pauses of 1.5 µs between them, 10 µs before the first; the host is done long before
    # and waits for the last at its end, of which 50 µs are its own.
    left = 10_000 + 4 * 1_000_000 + 3 * 1_500 + 50_000
    assert finding.saving_ns == pytest.approx(4_850_000 - left, abs=5_000)
    assert "The program runs 4 NaN checks per step" in finding.sentence
    assert "3.92 ms of host time" in finding.sentence  # from 50 to 1,030, four times
    assert synchronization(case) == []


def test_one_look_at_the_loss_is_healthy():
    assert anomaly_detection(case_of(steps(lambda trace, at: checked(trace, at, num=1)))) == []


@pytest.mark.long
def test_detect_anomaly_in_a_real_run(tmp_path: Path):
    """GIVEN a model trained under detect_anomaly, and the same without it."""
    found = {}
    for name, is_on in (("on", True), ("off", False)):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stepscope.record(tmp_path / name, windows=Windows(warmup=2, clean=3, trace=2)):
            for _ in range(9):
                with torch.autograd.set_detect_anomaly(is_on):
                    model(torch.ones(4, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found[name] = anomaly_detection(open_session(tmp_path / name, use_cache=False).case)

    assert found["off"] == []
    (finding,) = found["on"]
    assert "torch.autograd.detect_anomaly runs" in finding.sentence
    assert "to record a stack trace at" in finding.sentence
    assert finding.fix.startswith("torch.autograd.set_detect_anomaly(False)")
    rows = finding.evidence[0].rows
    assert all(row["is_autograd"] for row in rows)
    # Of a layer's product: its weight's gradient, its bias's, its input's. Which takes longest, the machine decides.
    assert max(row["num_checks"] for row in rows) >= 2

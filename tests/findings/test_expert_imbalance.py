"""Experts of a mixture: places that no token fills, tokens that find no place, one expert that gets most."""

from __future__ import annotations

import pytest

from stepscope.analysis.kernels.product_loops import Router, looped_experts, routers
from stepscope.errors import Unavailable
from stepscope.findings.rules.experts_and_scatters import expert_imbalance
from stepscope.session import open_session
from trace_builder import TraceBuilder


class Steps:
    """Ops in a row, each with a kernel that the host need not wait for: a step that the GPU binds."""

    def __init__(self):
        self.trace = TraceBuilder(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])
        self.trace.step(1, 0, 300)
        self.num = 0
        self.free_us = 100.0

    def op(self, name, shapes, kernel_us, **args):
        self.num += 1
        at = 10.0 * self.num
        self.trace.op(name, at, 6, id=self.num, **{"Input Dims": shapes, **args})
        self.trace.launch(
            "kernel" if "mm" not in name else "gemm", at + 1, runs=(self.free_us, kernel_us), id=self.num
        )
        self.free_us += kernel_us
        return self

    def topk(self, num_tokens, num_experts, num_chosen):
        values = {"Concrete Inputs": ["", str(num_chosen), "-1", "True", "True"]}
        return self.op("aten::topk", [[num_tokens, num_experts], [], [], [], []], 10, **values)

    def case(self, folder):
        return open_session(self.trace.write(folder / "trace.json"), use_cache=False).case


def padded(capacity, num_tokens=1024, num_experts=8, num_chosen=2):
    steps = Steps().topk(num_tokens, num_experts, num_chosen)
    steps.op("aten::bmm", [[num_experts, capacity, 64], [num_experts, 64, 256]], 1000)
    steps.op("aten::gelu", [[num_experts, capacity, 256]], 500)
    steps.op("aten::bmm", [[num_experts, capacity, 256], [num_experts, 256, 64]], 1000)
    return steps.op("aten::add", [[num_tokens, 64], [num_tokens, 64]], 300)


def test_places_for_the_busiest_expert(tmp_path):
    (finding,) = expert_imbalance(padded(1024).case(tmp_path))

    # 2,048 of 8,192 places can be filled: three quarters of 2,500 µs on them.
    assert finding.saving_ns == pytest.approx(0.75 * 2.5e6, rel=0.01)
    assert "8 experts have 1,024 slots each, 8,192 in total, but 1,024 tokens go to 2" in finding.sentence
    assert "At least 75 %" in finding.sentence and "2 matrix products per step" in finding.sentence


def test_a_usual_capacity_factor(tmp_path):
    assert expert_imbalance(padded(320).case(tmp_path)) == []


def test_tokens_that_find_no_place(tmp_path):
    (finding,) = expert_imbalance(padded(128).case(tmp_path))

    assert finding.saving_ns is None
    assert "At least 50 %" in finding.sentence and "1,024 tokens need 2,048 slots" in finding.sentence
    assert "320" in finding.fix


def test_a_batched_product_that_is_no_mixture(tmp_path):
    steps = Steps().op("aten::bmm", [[8, 1024, 64], [8, 64, 1024]], 1000)

    assert expert_imbalance(steps.case(tmp_path)) == []


def looped(*layers, width=64):
    steps = Steps()
    for loads in layers:
        for load in loads:
            steps.op("aten::addmm", [[4 * width], [load, width], [width, 4 * width]], load / 4)
        steps.op("aten::add", [[1024, width], [1024, width]], 50)
    return steps


def test_an_expert_that_gets_most_tokens(tmp_path):
    (finding,) = expert_imbalance(
        looped([900, 20, 60, 44, 1, 1, 1, 1], [850, 100, 30, 40, 1, 1, 1, 5]).case(tmp_path)
    )

    assert finding.saving_ns is None
    assert "The busiest of 8 experts gets 900 of 1,028 tokens" in finding.sentence
    assert "median over 2 layers" in finding.sentence


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([[130, 120, 140, 122], [128, 126, 130, 128]], id="a balanced mixture"),
        pytest.param([[900, 20, 61], [850, 100, 32]], id="sums that differ: no mixture"),
        pytest.param([[512, 512, 512, 512]], id="one size"),
    ],
)
def test_products_that_are_well(tmp_path, layers):
    assert expert_imbalance(looped(*layers).case(tmp_path)) == []


def test_layers_are_found_by_their_sums_and_by_a_router(tmp_path):
    work = looped([7, 1, 2], [6, 4]).case(tmp_path).work

    assert [one.loads for one in looped_experts(work, [])] == [((7, 1, 2), (6, 4))]
    (tmp_path / "one").mkdir()
    work = looped([7, 1, 2]).case(tmp_path / "one").work
    assert looped_experts(work, []) == []
    assert [one.loads for one in looped_experts(work, [Router(5, 4, 2)])] == [((7, 1, 2),)]


def test_a_sampler_is_no_router(tmp_path):
    work = Steps().topk(8, 50_000, 40).topk(2, 8, 2).case(tmp_path).work

    assert routers(work) == []


def test_without_shapes(tmp_path):
    trace = TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20, id=1).launch("gemm", 12, runs=(30, 40), id=1)
    with pytest.raises(Unavailable, match="record_shapes"):
        expert_imbalance(open_session(trace.write(tmp_path / "trace.json"), use_cache=False).case)

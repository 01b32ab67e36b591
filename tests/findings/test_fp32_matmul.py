"""Products in float32: TF32 where the device has it, half precision where it has not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from device_cases import BF16, FP32, Program

from stepscope.analysis.costs.attainable_rates import GEMM_SHARE
from stepscope.devices import find_device
from stepscope.document.findings import findings_part
from stepscope.errors import Unavailable
from stepscope.findings.diagnose import Diagnosis
from stepscope.findings.rules.matrix_products import fp32_matmul
from stepscope.session.case import Case
from trace_builder import PUBLIC, needs_traces

SIZE = 4096
FLOPS = 2 * SIZE**3


def products(device: str, dtype: str = FP32, took_us: float = 15_000) -> Case:
    """Four square products, each at about 9 TFLOP/s."""
    program = Program(deviceProperties=[{"name": device}])
    for _ in range(4):
        program.op("aten::mm", [[SIZE, SIZE], [SIZE, SIZE]], took_us, dtype, kernels=["volta_sgemm_128x64_nn"])
    return program.case()


@pytest.mark.parametrize(
    ("device", "dtype", "name", "fix"),
    [
        ("NVIDIA H200", "tf32", "TF32", 'torch.set_float32_matmul_precision("high")'),
        ("NVIDIA A100-PG509-200", "tf32", "TF32", 'torch.set_float32_matmul_precision("high")'),
        ("AMD Instinct MI250X", "bf16", "bfloat16", 'with torch.autocast("cuda", torch.bfloat16)'),
        ("Tesla V100-DGXS-32GB", "fp16", "float16", 'with torch.autocast("cuda", torch.float16)'),
    ],
)
def test_the_advice_is_what_the_device_has(device, dtype, name, fix):
    (finding,) = fp32_matmul(products(device))

    expected_ns = FLOPS / (find_device(device).peak_flops[dtype] * GEMM_SHARE) * 1e9
    assert finding.saving_ns == pytest.approx(4 * (15_000_000 - expected_ns), rel=0.001)
    assert finding.fix.startswith(fix)
    assert f"in {name}." in finding.sentence and f"60 % of the {name} peak" in finding.derived
    assert finding.upper_bound == (dtype != "tf32")  # what is cast for it is not counted
    assert ("GradScaler" in finding.fix) == (dtype == "fp16")
    # `stepscope verify --fix fp32_matmul` switches TF32 on, and nothing else.
    diagnosis = Diagnosis(1e9, True, (replace(finding, id="fp32_matmul"),), (), (), (), "", 0.9, ())
    (card,) = findings_part(diagnosis, "runs/mine").cards
    assert card.prove is not None
    assert (card.prove == "stepscope verify runs/mine --fix fp32_matmul") == (dtype == "tf32")


def test_products_in_half_precision_are_clean():
    assert fp32_matmul(products("NVIDIA H200", BF16, 400)) == []


def test_a_device_of_which_nothing_faster_is_known():
    with pytest.raises(Unavailable, match="unknown"):
        fp32_matmul(products("Quadro GP100"))


@needs_traces
@pytest.mark.parametrize("name", ["NVIDIA A100-PG509-200", "Tesla V100-DGXS-32GB"])
def test_devices_of_public_traces_are_in_the_table(name):
    device = find_device(name)

    assert device is not None and PUBLIC.is_dir()
    assert (device.compute_capability, device.num_processors) in [((8, 0), 108), ((7, 0), 80)]

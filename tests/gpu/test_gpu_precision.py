"""Precision on a real GPU: CUDA's autocast audited, its lists, the switches, and the comparison of dtypes.

Run with `python -m pytest tests/gpu -m gpu`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

import stepscope
from stepscope.recorder.precision import autocast_policy as policy
from stepscope.recorder.precision import dtype_audit

ROOT = Path(__file__).parents[2]


def toy():
    spec = importlib.util.spec_from_file_location("toy_precision", ROOT / "examples" / "toy_precision.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, batch = module.build()
    return model.cuda(), {name: tensor.cuda() for name, tensor in batch().items()}


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_the_toy_model_has_its_published_dtypes(low):
    model, batch = toy()
    targets = batch["targets"]
    audit = stepscope.audit(
        model, batch["x"], autocast=low, loss=lambda logits: torch.nn.functional.cross_entropy(logits, targets)
    )
    name = str(low).removeprefix("torch.")

    assert set(audit.facts["parameters"]) == {"float32"}
    assert audit.module("fc1")["outputs"] == [name]
    assert audit.module("relu")["outputs"] == [name]
    assert audit.module("ln")["outputs"] == ["float32"]
    assert audit.module("fc2")["outputs"] == [name]
    assert (audit.facts["logits"], audit.facts["loss"]) == (name, "float32")
    assert [row["dtype"] for row in audit.facts["gradients"]] == ["float32"]

    listed = {one.detail: one.ops for one in audit.stayed if one.reason == dtype_audit.FP32_LIST}
    assert ("native_layer_norm",) in listed.values()
    assert listed["nll_loss"] == ("nll_loss_forward",)
    # log_softmax is on the list too, but cross_entropy_loss asks for the dtype of the logits, which CUDA's autocast
    # then leaves alone.
    (softmax,) = [row for row in audit.facts["ops"] if row["op"] == "aten._log_softmax"]
    assert (softmax["inputs"], softmax["output"], softmax["reason"]) == ([name], name, None)
    assert audit.facts["norms"] == [] and audit.facts["error"] is None
    assert audit.weight_casts.parameter_bytes == (20 * 10 + 10 * 5) * 4 == 2 * audit.weight_casts.cast_bytes


def test_autocasts_casts_of_weights_are_half_the_bytes_of_the_parameters_of_a_model():
    from stepscope.workloads.registry import find

    workload = find("cs336")
    with torch.device("cuda"):
        built = workload.build(workload.configure("tiny"))
        batch = built.batch()
    audit = stepscope.audit(built.module, named_inputs=batch, autocast=torch.bfloat16, micro_batches=2)

    weights = audit.weight_casts
    products = [p for name, p in built.module.named_parameters() if p.dim() == 2 and "embedding" not in name]
    assert weights.num_parameters == len(products)
    assert weights.parameter_bytes == sum(p.numel() * 4 for p in products) == 2 * weights.cast_bytes
    assert weights.num_repeated == len(products)


LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": policy.LOW,
    "AT_FORALL_FP32": policy.FLOAT32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": policy.FLOAT32,
    "AT_FORALL_PROMOTE": policy.WIDEST,
}


def test_the_answers_are_those_of_torchs_own_lists():
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.is_file():
        pytest.skip("this torch came without its headers")
    checked, other = 0, []
    for macro, answer in LISTS.items():
        body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)+.*)", header.read_text())
        for name, overload in re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1)):
            listed = f"{name}.{overload}" if overload else name
            if listed not in policy._listed("cuda") or "dimname" in overload.lower():
                continue  # a name of a dimension cannot be made up
            checked += 1
            if policy._asked(listed, "cuda", torch.bfloat16) != answer:
                other.append((listed, answer, policy._asked(listed, "cuda", torch.bfloat16)))
    torch.cuda.synchronize()  # nothing that was asked has run

    assert checked > 80 and not other, other
    assert policy.policy("cuda", "log_softmax", torch.bfloat16) == policy.FLOAT32
    assert policy.policy("cuda", "binary_cross_entropy", torch.float16) == policy.REFUSED


@pytest.mark.filterwarnings("ignore")
def test_a_norm_of_bf16_with_a_float32_weight_loses_the_fused_kernel():
    if not hasattr(torch.ops.aten, "_fused_rms_norm"):
        pytest.skip("this torch has no fused rms_norm")
    norm = torch.nn.RMSNorm(64, device="cuda")
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    (found,) = stepscope.audit(norm, x).facts["norms"]
    assert not found["is_fused"] and found["loses_fused"] and "aten.rsqrt" in found["ops"]
    assert not stepscope.audit(norm.bfloat16(), x).facts["norms"]


def test_tf32_is_switched_on_and_off_and_seen_in_the_result():
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()

    def error():
        return float((a @ b - exact).norm() / exact.norm())

    with stepscope.configure_precision(allow_tf32=False):
        precise = error()
    with stepscope.configure_precision(allow_tf32=True) as change:
        rough = error()
        assert change.settings["cudnn.allow_tf32"] is True
    assert precise < 1e-6 < 1e-5 < rough < 1e-2


def test_the_comparison_of_dtypes(tmp_path):
    # Enough of a batch that the peak is where the backward begins, with every weight's cast alive.
    sizes = ["--preset", "small", "--set", "batch=8", "--set", "seq_len=256", "--mode", "forward+backward"]
    command = [sys.executable, "-m", "stepscope", "bench", "--check", "precision", "cs336", *sizes]
    done = subprocess.run(
        [*command, "--device", "cuda", "--steps", "5", "-o", str(tmp_path / "sweep"), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    found = json.loads(done.stdout)
    rows = {row["dtype"]: row for row in found["rows"]}

    assert set(rows) == {"fp32", "tf32", "bf16", "fp16", "autocast_bf16", "autocast_fp16"}
    for dtype in ("fp32", "tf32", "bf16", "autocast_bf16"):
        assert rows[dtype]["status"] == "ok", rows[dtype]
        assert {"forward", "backward"} <= rows[dtype]["phase_ns"].keys()
    assert rows["fp32"]["gradient_deviation"] == 0
    assert 0 < rows["tf32"]["gradient_deviation"] < rows["bf16"]["gradient_deviation"] < 1
    weights = rows["autocast_bf16"]["memory_bytes"]["autocast_weight_cast"]
    assert 0 < weights < rows["autocast_bf16"]["memory_bytes"]["parameter"] / 2
    products = {dtype: rows[dtype]["class_ns"]["gemm"] for dtype in ("fp32", "autocast_bf16")}
    assert products["autocast_bf16"] < products["fp32"]
    assert rows["autocast_bf16"]["class_ns"]["cast"] > 0 == rows["fp32"]["class_ns"].get("cast", 0)

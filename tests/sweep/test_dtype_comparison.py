"""`stepscope bench --check precision`: a workload in each dtype, held against fp32, and the reason in sentences."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from sweep_runs import exit_code

from stepscope.analysis.precision.dtype_comparison import class_ns, compare_dtypes
from stepscope.document.precision import dtypes_document, sentences
from stepscope.render.terminal import terminal_text
from stepscope.sweep.checks.precision_probe import at_peak, deviation
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

ROOT = Path(__file__).parents[2]
# The gradient of the weight is x, which bf16 rounds to 1, and fp16 keeps.
SUM = """
import torch
class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
    def forward(self, x):
        return (self.weight * x).sum()
def build():
    return Sum(), lambda: torch.full((4,), 1 + 2**-9)
"""


@pytest.mark.long
def test_the_toy_model_in_some_dtypes(tmp_path):
    folder = tmp_path / "sweep"
    words = [
        "bench",
        "--check",
        "precision",
        f"{ROOT / 'examples' / 'toy_precision.py'}:build",
        "--device",
        "cpu",
        "--steps",
        "6",
    ]
    words += ["--dtype", "bf16,fp32,tf32,fp16,autocast_bf16", "-o", str(folder), "--quiet", "--json"]
    done = subprocess.run([sys.executable, "-m", "stepscope", *words], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    rows = {row["dtype"]: row for row in json.loads(done.stdout)["rows"]}
    assert list(rows) == ["fp32", "bf16", "tf32", "fp16", "autocast_bf16"]
    lines = (folder / "results.jsonl").read_text().splitlines()
    text = terminal_text(dtypes_document(compare_dtypes(map(json.loads, lines), {})), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert any(line.split()[:2] == ["tf32", "skipped"] and "NVIDIA" in line for line in text.splitlines())
    fp32, autocast = rows["fp32"], rows["autocast_bf16"]
    assert (fp32["loss_difference"], fp32["gradient_deviation"], fp32["num_casts"]) == (0, 0, 0)
    assert fp32["slowdown"] == 1 and "cast" not in fp32["class_ns"]
    # Forward: two weights, their inputs' first, the logits; backward: as many gradients, less that of the batch.
    assert autocast["num_casts"] == 7 and autocast["class_ns"]["cast"] > 0
    assert 0 < rows["fp16"]["gradient_deviation"] < rows["bf16"]["gradient_deviation"] < 0.1
    for row in (fp32, autocast):
        assert set(row["phase_ns"]) == {"forward", "backward", "optimizer"} and row["status"] == "ok"
        assert row["memory_bytes"]["parameter"] == 1080 and row["memory_bytes"]["gradient"] == 1080
    assert rows["bf16"]["memory_bytes"]["parameter"] == 540


@pytest.mark.parametrize(("dtype", "relative"), [("bf16", 2**-9 / (1 + 2**-9)), ("fp16", 0.0), ("fp32", 0.0)])
def test_the_deviation_of_a_gradient_is_known(dtype, relative, tmp_path):
    (tmp_path / "own.py").write_text(SUM)
    workload = find(f"{tmp_path / 'own.py'}:build")
    (point,) = Grid(workload, {"device": "cpu"}).points([{"dtype": [dtype]}])

    found = deviation(workload, point.config, point.run)

    assert found["gradients"]["relative"] == pytest.approx(relative, rel=1e-6)
    assert found["gradients"]["largest"] == pytest.approx(relative, rel=1e-6)
    assert found["loss"] - found["loss_fp32"] == pytest.approx(-4 * 2**-9 if dtype == "bf16" else 0.0)
    assert found["gradients"]["num_not_finite"] == 0


def test_an_overflow_is_told(tmp_path):
    (tmp_path / "own.py").write_text(SUM.replace("1 + 2**-9", "1e6"))
    workload = find(f"{tmp_path / 'own.py'}:build")
    (point,) = Grid(workload, {"device": "cpu"}).points([{"dtype": ["fp16"]}])

    found = deviation(workload, point.config, point.run)

    assert found["loss"] is None and found["gradients"]["relative"] is None
    assert found["gradients"]["num_not_finite"] == 4


def test_what_is_alive_at_the_peak():
    def tensor(num_bytes, owner, born, died):
        return {"bytes": num_bytes, "owner": owner, "born": born, "died": died}

    found = at_peak(
        [
            tensor(100, "parameter", None, None),
            tensor(50, "activation", 0, 5),
            tensor(80, "temporary", 1, 2),
            tensor(60, "gradient", 3, None),
            tensor(90, "gradient", 6, None),
        ]
    )

    assert found == {"gradient": 150, "parameter": 100}


def row(dtype, median_ns=None, work=(), status="ok", **fields):
    made = {
        "workload": "w", "preset": None, "config": {"batch": 1},
        "run": {"dtype": dtype, "mode": "step", "device": "cuda"},
        "status": status, "reason": fields.pop("reason", None), "precision": {**fields, "work": list(work)},
    }  # fmt: skip
    return made if median_ns is None else {**made, "samples_device_ns": [median_ns] * 7}


def work(op, kernel, duration_ns, is_cast=False):
    return {"op": op, "kernel": kernel, "is_cast": is_cast, "num_calls": 1, "duration_ns": duration_ns}


FP32 = row(
    "fp32", 10_000_000, [work("aten::mm", "sgemm", 6_000_000), work("aten::mul", "elementwise_kernel", 4_000_000)]
)
SLOW = row(
    "autocast_bf16",
    13_000_000,
    [
        work("aten::mm", "nvjet", 2_000_000),
        work("aten::mul", "elementwise_kernel", 4_050_000),
        work("aten::copy_", "copy_kernel", 6_500_000, is_cast=True),
    ],
    num_casts=40,
)


def test_slower_comes_with_its_reason():
    (comparison,) = compare_dtypes([SLOW, FP32], {})

    assert [one.dtype for one in comparison.rows] == ["fp32", "autocast_bf16"]
    (sentence,) = sentences(comparison)
    for figure in ("1.30× slower than fp32", "casts +6.5 ms", "products −4.0 ms", "40 casts per step"):
        assert figure in sentence


def test_less_work_that_is_no_shorter_step_is_explained():
    starved = row("tf32", 9_900_000, [work("aten::mm", "nvjet", 2_000_000)])
    (comparison,) = compare_dtypes([FP32, starved], {})

    (sentence,) = sentences(comparison)
    assert "products −4.0 ms" in sentence
    assert "2.00 ms of 9.90 ms" in sentence and "waits for the host" in sentence


def test_a_difference_within_the_noise_is_said_to_be_none():
    noisy = {**FP32, "samples_device_ns": [8_000_000, 9_000_000, 10_000_000, 10_100_000, 11_000_000, 12_000_000]}
    near = {**noisy, "run": {**noisy["run"], "dtype": "tf32"}, "samples_device_ns": noisy["samples_device_ns"][1:]}
    (comparison,) = compare_dtypes([noisy, near], {})

    (sentence,) = sentences(comparison)
    assert "not significant" in sentence


@pytest.mark.parametrize(("number", "said"), [(1, "1 element of the fp32 results is"), (3, "3 elements of the fp32")])
def test_results_that_are_not_finite_are_told_of_fp32_too(number, said):
    asked = {**FP32["precision"], "deviation": {"gradients": {"num_not_finite": number}}}
    (comparison,) = compare_dtypes([{**FP32, "precision": asked}], {})

    (sentence,) = sentences(comparison)
    assert sentence.startswith(said) and "not finite" in sentence


def test_as_fast_is_neither_faster_nor_slower():
    same = {**FP32, "run": {**FP32["run"], "dtype": "tf32"}}
    (comparison,) = compare_dtypes([FP32, same], {})

    (sentence,) = sentences(comparison)
    assert sentence.startswith("tf32 is as fast as fp32")


def test_rows_that_failed_are_told_and_without_fp32_nothing_is_compared():
    lost = row("fp32", status="oom", reason="asked for 9.00 GiB where 1.00 GiB was free")
    (comparison,) = compare_dtypes([lost, SLOW], {})
    text = terminal_text(dtypes_document([comparison]))

    assert any(line.split()[:2] == ["fp32", "oom"] and "9.00 GiB" in line for line in text.splitlines())
    assert "fp32 was not measured" in text
    assert comparison.to_json()["rows"][1]["slowdown"] is None


def test_configurations_are_compared_apart():
    other = {**FP32, "config": {"batch": 2}}

    assert [len(one.rows) for one in compare_dtypes([FP32, other, SLOW], {})] == [2, 1]


def test_views_are_no_work_of_a_gpu_but_time_of_a_host():
    assert class_ns([work("aten::view", "", 5), work("aten::permute", "", 6)]) == {"views": 11}


@pytest.mark.parametrize(
    ("words", "said"),
    [(["cs336", "--dtype", "fp8"], "fp8"), (["cs336", "--timeout", "0"], "--timeout"), (["nope"], "nope")],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert exit_code(["bench", "--check", "precision", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1

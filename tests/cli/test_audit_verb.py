"""`stepscope bench --check dtypes` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from stepscope.cli.main import main
from verbs import run_verb

ROOT = Path(__file__).parents[2]
SMALL = ("--set", "batch=1", "--set", "seq_len=8")
TOY = f"{ROOT / 'examples' / 'toy_precision.py'}:build"


@pytest.mark.long
def test_the_example_from_a_shell_in_eighty_columns():
    words = ["bench", "--check", "dtypes", TOY, "--dtype", "autocast_bf16", "--micro-batches", "2", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *words], capture_output=True, text=True, env={"COLUMNS": "80"}
    )

    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    words_of = [line.split() for line in lines]
    assert ["ln", "1", "LayerNorm", "fp32", "bf16", "bf16"] in words_of
    assert ["logits", "bf16"] in words_of and ["loss", "fp32"] in words_of
    weights = "fp32 → bf16 2 + 2 2.93 KiB forward weight autocast, linear"
    assert weights.split() in words_of
    assert "2 casts of them repeat" in " ".join(done.stdout.split())


def test_a_model_of_ours_as_json(capsys):
    assert (
        main(
            [
                "bench",
                "--check",
                "dtypes",
                "cs336",
                "--preset",
                "tiny",
                *SMALL,
                "--dtype",
                "bf16",
                "--device",
                "cpu",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)

    assert found["schema_version"] == 1 and found["dtype"] == "bf16" and found["autocast"] is None
    assert set(found["parameters"]) == {"bfloat16"} and found["weight_casts"]["num_casts"] == 0
    assert found["logits"] == "bfloat16" and found["gradients"][0]["dtype"] == "bfloat16"
    assert found["cast_bytes"] == sum(row["read_bytes"] + row["written_bytes"] for row in found["casts"])


@pytest.mark.parametrize("dtype", ["fp16", "autocast_fp16"])
def test_half_precision_on_a_cpu(dtype, capsys):
    assert main(["bench", "--check", "dtypes", TOY, "--dtype", dtype, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert found["logits"] == "float16" and found["low_dtype"] == "float16"
    assert set(found["parameters"]) == {"float16" if dtype == "fp16" else "float32"}


@pytest.mark.parametrize("mode", ["inference", "forward", "forward+backward"])
def test_modes_without_an_optimizer(mode, capsys):
    assert main(["bench", "--check", "dtypes", TOY, "--mode", mode, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert found["optimizer_state"] == [] and bool(found["gradients"]) == ("backward" in mode)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "Unknown workload 'nope'"),
        ([TOY, "--dtype", "fp8"], "fp8"),
        ([TOY, "--dtype", "tf32", "--device", "cpu"], "tf32 needs an NVIDIA GPU"),
        ([TOY, "--dtype", "fp32,bf16"], "one point, not 2"),
        ([TOY, "--micro-batches", "0"], "--micro-batches"),
        (["{whole}:step"], "is a complete training step"),
        (["{whole}:broken"], "RuntimeError"),
        (["{whole}:bare"], "needs no gradient"),
    ],
)
def test_mistakes_are_one_line(words, said, tmp_path):
    whole = tmp_path / "whole.py"
    whole.write_text(
        "import torch\n"
        "def step():\n    return lambda: None\n"
        "def broken():\n    return torch.nn.Linear(2, 2), lambda: torch.ones(2, 3)\n"
        "def bare():\n    return torch.nn.Flatten(0), lambda: torch.ones(1)\n"
    )

    done = run_verb("bench", "--check", "dtypes", *(word.format(whole=whole) for word in words))
    error = done.stderr
    assert done.returncode == 2
    assert said in error and len(error.splitlines()) == 1

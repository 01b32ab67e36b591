"""`stepscope doctor` as a user runs it: with torch, without it, and beside a driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope import devices
from stepscope.cli import doctor
from stepscope.cli.main import main
from stepscope.recorder.machine.cpu import cpu_name
from stepscope.version import __version__

SOURCE_FOLDER = Path(__file__).parents[2] / "src"
sys.path.append(str(Path(__file__).parents[1] / "record"))

from fake_nvml import build_fake_nvml

WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
"""

CEILINGS = devices.Ceilings("NVIDIA H200", {"bf16": 791_520_000_000_000}, 4_320_000_000_000, "2025-01-02", "2.6.0")


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("STEPSCOPE_NVML_LIBRARY", "libthere-is-none.so")


@pytest.fixture
def run(tmp_path):
    def doctor_process(*options, torch=True):
        folders = [str(SOURCE_FOLDER), os.environ.get("PYTHONPATH", "")]
        if not torch:
            (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
            folders.insert(0, str(tmp_path))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "stepscope", "doctor", *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return doctor_process


@pytest.mark.long
def test_json_with_torch(run):
    torch = pytest.importorskip("torch")
    finished = run("--json")

    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["stepscope"] == __version__
    assert report["torch"] == {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    assert report["nvml"] is None
    assert "libthere-is-none.so" in report["nvml_problem"]
    cpu = {"device": "cpu", "name": cpu_name(), "memory_bytes": None, "peaks": None, "ceilings": None}
    assert report["devices"] == [cpu]


def test_json_without_torch(run):
    finished = run("--json", torch=False)

    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["torch"] is None
    assert report["torch_problem"] == "not installed: pip install torch"
    assert [device["device"] for device in report["devices"]] == ["cpu"]


def test_text_without_torch_says_what_to_install_and_what_to_run(run):
    finished = run(torch=False)

    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert f"stepscope {__version__}" in lines
    assert "torch     not installed: pip install torch" in lines
    assert f"  peaks   no peak known for {cpu_name()!r}: run stepscope doctor --measure" in lines


def test_what_does_not_work_names_the_next_step(run, tmp_path):
    cache = tmp_path / "open to all"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPSCOPE_CACHE", str(cache))
        report = json.loads(run("--json", torch=False).stdout)
    without = {each["what"]: each["next"] for each in report["abilities"] if not each["works"]}

    assert without["measure a script on the CPU"] == "`pip install torch`"
    assert all(without.values()) and len(without) < len(report["abilities"])
    assert len(report["repaired"]) == 1 and cache.stat().st_mode & 0o777 == 0o700


def test_measuring_without_torch_is_one_line(run):
    finished = run("--measure", torch=False)

    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr == "stepscope doctor: --measure needs torch: not installed: pip install torch\n"


def test_a_gpu_that_torch_does_not_use_is_shown(run, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_NVML_LIBRARY", build_fake_nvml(tmp_path))
    devices.save_ceilings(CEILINGS)
    report = json.loads(run("--json", torch=False).stdout)
    text = run(torch=False).stdout

    assert report["nvml"] == {"driver": "580.95.05"}
    gpu, cpu = report["devices"]
    assert gpu["device"] == "gpu" and cpu["device"] == "cpu"
    assert gpu["memory_bytes"] == 150_754_820_096
    assert gpu["peaks"]["flops"]["bf16"] == 989_400_000_000_000
    assert gpu["peaks"]["source"] == devices.find_device("NVIDIA H200").source
    assert gpu["ceilings"]["copy_bytes_per_s"] == 4_320_000_000_000
    assert "nvml      driver 580.95.05" in text
    assert "gpu       NVIDIA H200, 140.4 GiB (torch does not use it)" in text
    assert gpu["peaks"]["source"] in text


def test_an_unknown_gpu_is_not_guessed(run, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_NVML_LIBRARY", build_fake_nvml(tmp_path))
    monkeypatch.setenv("FAKE_NVML_NAME", "NVIDIA H100 80GB")
    text = run(torch=False).stdout

    assert "no peak known for 'NVIDIA H100 80GB': run stepscope doctor --measure" in text
    assert "the table has NVIDIA H100 80GB HBM3" in text
    assert "989.4" not in text


def test_measure_keeps_the_ceilings_and_sets_them_against_the_peak(capsys, monkeypatch):
    pytest.importorskip("torch")
    from stepscope.recorder.machine import ceilings

    def measured(device, progress):
        progress("copy")
        assert device == "cpu"
        return {
            "matmul_flops": dict(CEILINGS.matmul_flops),
            "matmul_sizes": {"bf16": 8192},
            "copy_bytes_per_s": CEILINGS.copy_bytes_per_s,
            "left_out": {"fp16": "too slow"},
            "torch_version": "2.6.0",
        }

    monkeypatch.setattr(ceilings, "measure_ceilings", measured)
    monkeypatch.setattr(doctor, "_look_at_torch", lambda torch: ([], None))
    monkeypatch.setattr(doctor, "cpu_name", lambda: "NVIDIA H200")  # a name whose peaks are known

    assert main(["doctor", "--measure"]) == 0

    shown = capsys.readouterr()
    rows = {line.split()[0]: line.split()[1:] for line in shown.out.splitlines() if line.strip()}
    assert rows["bf16"] == ["989.4", "TFLOP/s", "791.5", "TFLOP/s", "80.0%"]
    assert rows["memory"] == ["4.8", "TB/s", "4.3", "TB/s", "90.0%"]
    assert rows["fp8"] == ["1978.9", "TFLOP/s", "-"]
    assert "NVIDIA H200: copy" in shown.err
    assert "NVIDIA H200: fp16 left out: too slow" in shown.err
    stored = devices.load_ceilings("NVIDIA H200")
    assert stored is not None
    assert stored.matmul_flops == CEILINGS.matmul_flops

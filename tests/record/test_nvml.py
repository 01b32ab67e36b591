"""NVML through a real shared library with known answers, and where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import UUID, build_fake_nvml

from stepscope.recorder.machine.nvml import THROTTLE_REASONS, Nvml, NvmlUnavailable

SOURCE_FOLDER = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module", params=["new", "old"])
def library(request, tmp_path_factory):
    defines = ["OLD_DRIVER"] if request.param == "old" else []
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"), *defines)


@pytest.fixture
def gpu(library):
    nvml = Nvml(library)
    yield nvml.gpu(f"GPU-{UUID}")
    nvml.close()


def readings(gpu):
    return [
        gpu.busy_shares(),
        gpu.power_watts(),
        gpu.energy_joules(),
        gpu.sm_clock_mhz(),
        gpu.memory_clock_mhz(),
        gpu.throttle_reasons(),
        gpu.memory_bytes(),
        gpu.compute_processes(),
    ]


def test_every_reading(gpu, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_THROTTLE", str(0x4 | 0x40))

    assert gpu.name() == "NVIDIA H200"
    assert gpu.busy_shares() == (0.97, 0.4)
    assert gpu.power_watts() == 512.345
    assert gpu.energy_joules() == 9876543210.123
    assert gpu.sm_clock_mhz() == 1980
    assert gpu.memory_clock_mhz() == 3201
    assert gpu.throttle_reasons() == ["sw_power_cap", "hw_thermal_slowdown"]
    assert gpu.memory_bytes() == (81_604_378_624, 150_754_820_096)


def test_the_limits_that_a_driver_tells(gpu, request):
    default = {"default_power_limit_watts": 700.0} if "new" in request.node.name else {}

    assert gpu.limits() == {"max_sm_clock_mhz": 1980, "power_limit_watts": 600.0, **default}


def test_all_processes_are_listed_even_when_they_are_many(gpu):
    processes = gpu.compute_processes()

    assert len(processes) == 20
    assert processes[0] == {"pid": os.getpid(), "name": None, "used_bytes": 1 << 33}
    assert processes[1] == {"pid": 4242, "name": "python train.py", "used_bytes": 1 << 33}
    assert processes[2] == {"pid": 1002, "name": None, "used_bytes": None}


@pytest.mark.parametrize("bit", THROTTLE_REASONS)
def test_each_throttle_reason_has_its_word(gpu, monkeypatch, bit):
    monkeypatch.setenv("FAKE_NVML_THROTTLE", str(bit))

    assert gpu.throttle_reasons() == [THROTTLE_REASONS[bit]]


def test_clocks_at_their_highest_have_no_reason(gpu):
    assert gpu.throttle_reasons() == []


@pytest.mark.parametrize("code", [3, 4, 13], ids=["not supported", "no permission", "function not found"])
def test_what_the_gpu_does_not_offer_is_none(gpu, monkeypatch, code):
    monkeypatch.setenv("FAKE_NVML_CODE", str(code))

    assert readings(gpu) == [None] * 8


def test_a_lost_gpu_is_unavailable(gpu, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_CODE", "15")

    with pytest.raises(NvmlUnavailable, match="GPU is lost"):
        gpu.power_watts()
    with pytest.raises(NvmlUnavailable, match="GPU is lost"):
        gpu.compute_processes()


def test_the_driver_and_its_gpus(library):
    nvml = Nvml(library)

    assert nvml.driver_version() == "580.95.05"
    assert nvml.gpu_uuids() == [f"GPU-{UUID}"]
    assert nvml.gpu(UUID).name() == "NVIDIA H200"  # as torch spells it
    nvml.close()
    nvml.close()


def test_an_unknown_gpu_is_unavailable(library):
    with pytest.raises(NvmlUnavailable, match="knows no GPU GPU-0000"):
        Nvml(library).gpu("GPU-0000")


def test_a_driver_that_does_not_start_is_unavailable(library, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_INIT", "9")

    with pytest.raises(NvmlUnavailable) as caught:
        Nvml(library)
    assert str(caught.value) == "NVML does not start: Driver Not Loaded"


def test_the_variable_names_the_library(library, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_NVML_LIBRARY", library)

    assert Nvml().driver_version() == "580.95.05"


def test_no_library_is_unavailable(monkeypatch):
    monkeypatch.setenv("STEPSCOPE_NVML_LIBRARY", "libthere-is-no-such-library.so.1")

    with pytest.raises(NvmlUnavailable, match="libthere-is-no-such-library"):
        Nvml()


def test_a_library_that_is_not_nvml_is_unavailable(tmp_path):
    import _ctypes

    with pytest.raises(NvmlUnavailable, match="error 13"):
        Nvml(_ctypes.__file__)


def test_needs_nothing_but_the_standard_library():
    code = f"""
import sys

class OnlyTheStandardLibrary:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in sys.stdlib_module_names | {{"stepscope"}}:
            raise ImportError(name)

sys.meta_path.insert(0, OnlyTheStandardLibrary())
sys.path.insert(0, {str(SOURCE_FOLDER)!r})
import stepscope.recorder.machine.counters, stepscope.recorder.machine.cpu, stepscope.recorder.machine.nvml
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-I", "-c", code], check=True)

"""The peaks table keeps its promises, and ceilings survive a round trip and a broken file."""

from __future__ import annotations

import dataclasses
import json

import pytest

from stepscope.devices import (
    Ceilings,
    ceilings_path,
    find_device,
    known_devices,
    load_ceilings,
    nearest_names,
    save_ceilings,
)
from stepscope.devices.limits import DTYPES
from stepscope.errors import StepscopeError

# What the makers print with 2:4 sparsity, in TFLOP/s by dtype: the numbers that must never be in the table.
WITH_SPARSITY = {
    "NVIDIA H200": {"tf32": 989, "bf16": 1979, "fp16": 1979, "fp8": 3958, "int8": 3958},
    "NVIDIA H200 NVL": {"tf32": 835, "bf16": 1671, "fp16": 1671, "fp8": 3341, "int8": 3341},
    "NVIDIA H100 80GB HBM3": {"tf32": 989, "bf16": 1979, "fp16": 1979, "fp8": 3958, "int8": 3958},
    "NVIDIA H100 PCIe": {"tf32": 756, "bf16": 1513, "fp16": 1513, "fp8": 3026, "int8": 3026},
    "NVIDIA H100 NVL": {"tf32": 835, "bf16": 1671, "fp16": 1671, "fp8": 3341, "int8": 3341},
    "NVIDIA GH200 480GB": {"tf32": 989, "bf16": 1979, "fp16": 1979, "fp8": 3958, "int8": 3958},
    "NVIDIA B200": {"tf32": 2250, "bf16": 4500, "fp16": 4500, "fp8": 9000, "int8": 9000},
    "NVIDIA A100-SXM4-80GB": {"tf32": 312, "bf16": 624, "fp16": 624, "int8": 1248},
    "NVIDIA A10": {"tf32": 125, "bf16": 250, "fp16": 250, "int8": 500},
    "NVIDIA A10G": {"tf32": 70, "bf16": 140, "fp16": 140, "int8": 280},
    "NVIDIA A30": {"tf32": 165, "bf16": 330, "fp16": 330, "int8": 661},
    "NVIDIA A40": {"tf32": 149.6, "bf16": 299.4, "fp16": 299.4, "int8": 598.6},
    "NVIDIA L4": {"tf32": 120, "bf16": 242, "fp16": 242, "fp8": 485, "int8": 485},
    "NVIDIA L40": {"tf32": 181, "bf16": 362.1, "fp16": 362.1, "fp8": 724, "int8": 724},
    "NVIDIA L40S": {"tf32": 366, "bf16": 733, "fp16": 733, "fp8": 1466, "int8": 1466},
    "NVIDIA GeForce RTX 3090": {"tf32": 71, "bf16": 142, "fp16": 142, "int8": 568},
    "NVIDIA GeForce RTX 4090": {"tf32": 165.2, "bf16": 330.4, "fp16": 330.4, "fp8": 660.6, "int8": 1321.2},
    "NVIDIA GeForce RTX 5090": {"tf32": 209.5, "bf16": 419, "fp16": 419, "fp8": 838, "int8": 1676},
    "NVIDIA RTX A6000": {"tf32": 154.8, "bf16": 309.7, "fp16": 309.7, "int8": 619.3},
    "NVIDIA RTX 6000 Ada Generation": {"tf32": 364, "bf16": 728, "fp16": 728, "fp8": 1457, "int8": 1457},
    "AMD Instinct MI300X": {"tf32": 1307.4, "bf16": 2614.9, "fp16": 2614.9, "fp8": 5229.8, "int8": 5229.8},
    "AMD Instinct MI325X": {"tf32": 1307.4, "bf16": 2614.9, "fp16": 2614.9, "fp8": 5229.8, "int8": 5229.8},
}

CEILINGS = Ceilings(
    name="NVIDIA H200",
    matmul_flops={"fp32": 51_000_000_000_000, "bf16": 790_000_000_000_000},
    copy_bytes_per_s=4_300_000_000_000,
    measured_at="2025-01-02T03:04:05+00:00",
    torch_version="2.6.0",
)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_h200_is_dense():
    device = find_device("NVIDIA H200")

    assert device is not None
    assert device.peak_flops["bf16"] == 989_400_000_000_000
    assert device.peak_flops["tf32"] == 494_700_000_000_000
    assert device.peak_flops["fp32"] == 66_900_000_000_000
    assert device.peak_flops["fp8"] == 1_978_900_000_000_000
    assert device.bandwidth_bytes_per_s == 4_800_000_000_000


@pytest.mark.parametrize("name", ["H200", "nvidia h200", "NVIDIA H200 ", "NVIDIA H100", "NVIDIA H20", ""])
def test_a_name_that_is_not_exact_is_unknown(name):
    assert find_device(name) is None


def test_near_names_are_offered_and_far_ones_are_not():
    assert nearest_names("NVIDIA H100 80GB")[0] == "NVIDIA H100 80GB HBM3"
    assert len(nearest_names("NVIDIA A100", count=2)) == 2
    assert nearest_names("Neoverse-N1") == []


@pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)
def test_every_entry_is_whole(device):
    numbers = [*device.peak_flops.values(), device.memory_bytes, device.bandwidth_bytes_per_s]

    assert device.peak_flops.keys() <= set(DTYPES)
    assert "fp32" in device.peak_flops
    assert all(type(number) is int and number > 0 for number in numbers)
    assert len(device.source) > 10
    assert device.memory_bytes % 2**30 == 0
    assert 8 * 2**30 < device.memory_bytes < 300 * 2**30
    assert 10**11 < device.bandwidth_bytes_per_s < 10**13


@pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)
def test_a_narrower_dtype_is_never_slower(device):
    order = [dtype for dtype in ("fp64", "fp32", "tf32", "bf16", "fp8") if dtype in device.peak_flops]
    rates = [device.peak_flops[dtype] for dtype in order]

    assert rates == sorted(rates)
    if "bf16" in device.peak_flops:
        assert device.peak_flops["bf16"] == device.peak_flops["fp16"]


@pytest.mark.parametrize("device", known_devices(), ids=lambda device: device.name)
def test_tensor_rates_double_as_the_dtype_halves(device):
    if not device.name.startswith(("NVIDIA A100", "NVIDIA H100", "NVIDIA H200", "NVIDIA GH200")):
        return
    peaks = device.peak_flops

    assert peaks["tf32"] * 2 == pytest.approx(peaks["bf16"], rel=0.02)
    assert peaks["bf16"] * 2 == pytest.approx(peaks["int8"], rel=0.02)
    if "fp8" in peaks:
        assert peaks["fp8"] == peaks["int8"]


@pytest.mark.parametrize("name", WITH_SPARSITY)
def test_with_sparsity_numbers_are_not_in_the_table(name):
    device = find_device(name)

    assert device is not None
    for dtype, sparse_tflops in WITH_SPARSITY[name].items():
        assert device.peak_flops[dtype] / 1e12 == pytest.approx(sparse_tflops / 2, rel=0.03), dtype


def test_peaks_cannot_be_changed_by_a_caller():
    device = known_devices()[0]

    with pytest.raises(TypeError):
        device.peak_flops["bf16"] = 1


def test_ceilings_round_trip_and_keep_other_devices(cache_folder):
    other = Ceilings("a CPU, 4 cores", {"fp32": 73_000_000_000}, 20_000_000_000, "2025-01-01T00:00:00+00:00", "2.6.0")

    assert load_ceilings("NVIDIA H200") is None
    save_ceilings(other)
    path = save_ceilings(CEILINGS)

    assert path == cache_folder / "ceilings.json"
    assert load_ceilings("NVIDIA H200") == CEILINGS
    assert load_ceilings("a CPU, 4 cores") == other
    assert load_ceilings("NVIDIA H100 PCIe") is None
    assert [entry.name for entry in cache_folder.iterdir()] == ["ceilings.json"]


def test_ceilings_of_an_architecture_are_not_those_of_a_machine():
    for name in ("aarch64 CPU", "aarch64 CPU, 8 cores"):
        save_ceilings(dataclasses.replace(CEILINGS, name=name))

    assert load_ceilings("aarch64 CPU") is None
    assert load_ceilings("aarch64 CPU, 8 cores") is not None and load_ceilings("aarch64 CPU, 4 cores") is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"NVIDIA H200": 3}', '{"NVIDIA H200": {"matmul_flops": []}}', "\udcff"],
)
def test_a_broken_file_counts_as_empty_and_is_replaced(cache_folder, text):
    cache_folder.mkdir()
    (cache_folder / "ceilings.json").write_bytes(text.encode(errors="surrogateescape"))

    assert load_ceilings("NVIDIA H200") is None
    save_ceilings(CEILINGS)
    assert load_ceilings("NVIDIA H200") == CEILINGS
    json.loads((cache_folder / "ceilings.json").read_text())


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "file"))

    with pytest.raises(StepscopeError, match="STEPSCOPE_CACHE"):
        save_ceilings(CEILINGS)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_ceilings_that_others_may_have_written_are_not_believed(cache_folder, mode):
    path = save_ceilings(CEILINGS)
    assert load_ceilings("NVIDIA H200") == CEILINGS
    path.chmod(mode)
    assert load_ceilings("NVIDIA H200") is None

    path.chmod(0o600)
    cache_folder.chmod(0o700 | mode & 0o077)
    assert load_ceilings("NVIDIA H200") is None
    with pytest.raises(StepscopeError, match=r"can be written by other users\. Run: chmod go-w"):
        save_ceilings(CEILINGS)


def test_where_ceilings_are_kept(monkeypatch):
    monkeypatch.setenv("STEPSCOPE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(ceilings_path()) == "/somewhere/stepscope/ceilings.json"

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(ceilings_path()) == "/home/someone/.cache/stepscope/ceilings.json"

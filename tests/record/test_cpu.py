"""The processor's name and cache from files laid out as Linux does."""

from __future__ import annotations

import os
import platform

import pytest

from stepscope.recorder.machine.cpu import cpu_name, last_level_cache_bytes, num_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)


def written(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("quota", "num"),
    [("max 100000", 8), ("250000 100000", 3), ("1000 100000", 1), ("900000 100000", 8), ("", 8), (None, 8)],
)
def test_the_cores_are_those_of_the_process(tmp_path, quota, num):
    assert num_cores(tmp_path / "absent" if quota is None else written(tmp_path / "cpu.max", quota)) == num


def test_the_name_is_the_kernels(tmp_path):
    text = "processor\t: 0\nmodel name\t: AMD EPYC 9554 64-Core Processor\nmodel name\t: other\n"
    absent = tmp_path / "absent"

    assert cpu_name(written(tmp_path / "cpuinfo", text), absent) == "AMD EPYC 9554 64-Core Processor, 8 cores"
    assert cpu_name(tmp_path / "cpuinfo", written(tmp_path / "cpu.max", "100 100")).endswith("Processor, 1 core")


def test_two_arm_machines_have_two_names(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    absent = tmp_path / "absent"

    def name(part: str) -> str:
        text = f"processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: {part}\n"
        return cpu_name(written(tmp_path / "cpuinfo", text), absent)

    assert name("0xd4f") == "Arm Neoverse V2, 8 cores"
    assert name("0xfff") == "aarch64 CPU 0x41 0xfff, 8 cores"


def test_a_processor_without_a_name_has_its_cores(tmp_path, monkeypatch):
    cpuinfo = written(tmp_path / "cpuinfo", "processor\t: 0\nBogoMIPS\t: 243.75\n")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "processor", lambda: "aarch64")
    absent = tmp_path / "absent"

    assert cpu_name(cpuinfo, absent) == "aarch64 CPU, 8 cores"
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert cpu_name(absent, absent) == "arm, 8 cores"


def test_the_slices_of_the_last_level_are_added_once_each(tmp_path):
    for cpu, shared_by in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for index, (level, size) in enumerate([("1", "32K"), ("3", "16M")]):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{shared_by}\n")

    assert last_level_cache_bytes(tmp_path) == 32 << 20
    assert last_level_cache_bytes(tmp_path / "absent") is None

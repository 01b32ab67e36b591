"""The processor's name and cache from files laid out as Linux does."""

from __future__ import annotations

import platform

from stepscope.recorder.cpu import cpu_name, last_level_cache_bytes


def test_the_name_is_the_kernels(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9554 64-Core Processor\nmodel name\t: other\n")

    assert cpu_name(cpuinfo) == "AMD EPYC 9554 64-Core Processor"


def test_arm_has_no_model_name(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 243.75\n")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(platform, "processor", lambda: "aarch64")

    assert cpu_name(cpuinfo) == "aarch64 CPU"
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert cpu_name(tmp_path / "absent") == "arm"


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

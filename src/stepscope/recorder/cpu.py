"""The processor's name and cache size, from the standard library alone."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CPU_FOLDER = Path("/sys/devices/system/cpu")

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the processor's name, e.g. "AMD EPYC 9554 64-Core Processor"."""
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    # ARM kernels list no model name, and platform.processor() is often empty or only the architecture.
    name = platform.processor()
    return name if name and name != platform.machine() else f"{platform.machine() or 'unknown'} CPU"


def last_level_cache_bytes(cpu_folder: Path = CPU_FOLDER) -> int | None:
    """Return the bytes of the last-level cache, over all its slices, or None if the kernel does not report it."""
    slices: dict[int, dict[str, int]] = {}
    for index in cpu_folder.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((index / "level").read_text())
            size = (index / "size").read_text().strip()
            shared_by = (index / "shared_cpu_list").read_text().strip()
            size_bytes = int(size[:-1]) * _UNITS[size[-1]]
        except (OSError, ValueError, KeyError, IndexError):
            continue
        slices.setdefault(level, {})[shared_by] = size_bytes
    return sum(slices[max(slices)].values()) if slices else None

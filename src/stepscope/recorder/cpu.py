"""What the standard library can tell about this machine's processor."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CPU_FOLDER = Path("/sys/devices/system/cpu")

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name, as every recording made on it spells it: "AMD EPYC 9554 64-Core Processor"."""
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    # ARM kernels give no model name there, and platform.processor() is often empty or just the architecture.
    name = platform.processor()
    return name if name and name != platform.machine() else f"{platform.machine() or 'unknown'} CPU"


def last_level_cache_bytes(cpu_folder: Path = CPU_FOLDER) -> int | None:
    """Bytes of the outermost cache, all its slices together, or None where the kernel does not say."""
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

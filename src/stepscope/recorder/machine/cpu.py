"""The processor's name, cores and cache size, from the standard library alone."""

import ctypes
import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CPU_FOLDER = Path("/sys/devices/system/cpu")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

# By implementer and part, from Arm's technical reference manuals.
_ARM_PARTS = {
    "0x41 0xd0c": "Arm Neoverse N1",
    "0x41 0xd40": "Arm Neoverse V1",
    "0x41 0xd49": "Arm Neoverse N2",
    "0x41 0xd4f": "Arm Neoverse V2",
}
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cpu_name(cpuinfo: Path = CPUINFO, cpu_quota: Path = CPU_QUOTA) -> str:
    """Return the processor's model and the cores that this process may use: "Arm Neoverse V2, 8 cores".

    Measured ceilings are kept under this name, so it must not fit other machines.
    """
    cores = num_cores(cpu_quota)
    return f"{_model(cpuinfo)}, {cores} {'core' if cores == 1 else 'cores'}"


def num_cores(cpu_quota: Path = CPU_QUOTA) -> int:
    """Return the number of cores that this process may use: its affinity, and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, cpu_quota.read_text().split())
        return max(1, min(cores, -(-quota // period)))
    except (OSError, ValueError, ZeroDivisionError):  # no container, or one without a limit ("max 100000")
        return cores


def _model(cpuinfo: Path) -> str:
    fields: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    if fields.get("model name"):
        return fields["model name"]
    if fields.get("CPU part"):  # ARM kernels list numbers
        number = f"{fields.get('CPU implementer', '')} {fields['CPU part']}"
        return _ARM_PARTS.get(number, f"{platform.machine()} CPU {number}")
    # platform.processor() is often empty or only the architecture.
    name = _apple_name() or platform.processor()
    return name if name and name != platform.machine() else f"{platform.machine() or 'unknown'} CPU"


def _apple_name() -> str:
    if platform.system() != "Darwin":
        return ""
    text, length = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    failed = ctypes.CDLL(None).sysctlbyname(b"machdep.cpu.brand_string", text, ctypes.byref(length), None, 0)
    return "" if failed else text.value.decode(errors="replace")


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

"""Readings of one NVIDIA GPU from the driver's library, through ctypes.

    nvml = Nvml()
    gpu = nvml.gpu(nvml.gpu_uuids()[0])
    gpu.power_watts()

A reading that the GPU or the driver does not offer is None. All other errors raise `NvmlUnavailable`. Readings reuse
their buffers: use one `NvmlGpu` from one thread only.
"""

import ctypes
import os
from typing import Any

LIBRARY_NAME = "libnvidia-ml.so.1"
LIBRARY_VARIABLE = "STEPSCOPE_NVML_LIBRARY"

_SUCCESS, _NOT_SUPPORTED, _NO_PERMISSION = 0, 3, 4
_NOT_FOUND, _INSUFFICIENT_SIZE, _FUNCTION_NOT_FOUND = 6, 7, 13
_NOT_OFFERED = (_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND)

_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_MEMORY_UNKNOWN = (1 << 64) - 1
_TEXT_BYTES, _PROCESS_TRIES = 256, 4

THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


class NvmlUnavailable(Exception):
    """NVML cannot be used. The message says why."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance_id", ctypes.c_uint),
        ("compute_instance_id", ctypes.c_uint),
    )


# Both fill `_Process`. The unversioned call of older drivers fills a shorter struct and is not used.
_PROCESS_CALLS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
# Renamed in driver 535. Older drivers have only the second name.
_THROTTLE_CALLS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


class Nvml:
    """The loaded and initialized driver library. Call `close` to release it."""

    def __init__(self, library_name: str | None = None) -> None:
        name = library_name or os.environ.get(LIBRARY_VARIABLE) or LIBRARY_NAME
        try:
            self._library = ctypes.CDLL(name)
        except OSError:
            raise NvmlUnavailable(f"{name} cannot be loaded: this machine has no NVIDIA driver") from None
        self._require(self.call("nvmlInit_v2"), "NVML does not start")
        self._is_open = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.call("nvmlShutdown")

    def driver_version(self) -> str | None:
        """Return the driver's version, e.g. "580.95.05"."""
        return self.text("nvmlSystemGetDriverVersion")

    def gpu_uuids(self) -> list[str]:
        """Return the UUIDs of all visible GPUs, e.g. "GPU-5e6a…"."""
        count, handle = ctypes.c_uint(), ctypes.c_void_p()
        self._require(self.call("nvmlDeviceGetCount_v2", ctypes.byref(count)), "NVML cannot count the GPUs")
        uuids = []
        for index in range(count.value):
            code = self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            uuid = self.text("nvmlDeviceGetUUID", handle) if code == _SUCCESS else None
            if uuid:
                uuids.append(uuid)
        return uuids

    def gpu(self, gpu_uuid: str) -> "NvmlGpu":
        """Return the GPU with this UUID. Also accepts torch's spelling, without "GPU-" or "MIG-"."""
        prefixed = gpu_uuid.startswith(("GPU-", "MIG-"))
        handle, code = ctypes.c_void_p(), _NOT_FOUND
        for uuid in (gpu_uuid,) if prefixed else (f"GPU-{gpu_uuid}", f"MIG-{gpu_uuid}"):
            code = self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
            if code == _SUCCESS:
                return NvmlGpu(self, handle)
        raise NvmlUnavailable(f"NVML knows no GPU {gpu_uuid}: {self._error_text(code)}")

    def call(self, name: str, *arguments: Any) -> int:
        """Return the return code of a function, or "function not found" if the library does not have it."""
        function = getattr(self._library, name, None)
        return _FUNCTION_NOT_FOUND if function is None else int(function(*arguments))

    def first(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if hasattr(self._library, name)), names[-1])

    def text(self, name: str, *arguments: Any) -> str | None:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        code = self.call(name, *arguments, buffer, ctypes.c_uint(_TEXT_BYTES))
        return buffer.value.decode(errors="replace") if code == _SUCCESS else None

    def offered(self, code: int) -> bool:
        """Return whether a reading succeeded; False if it is not offered. Raises NvmlUnavailable on other errors."""
        if code in _NOT_OFFERED:
            return False
        self._require(code, "NVML stopped answering")
        return True

    def _require(self, code: int, message: str) -> None:
        if code != _SUCCESS:
            raise NvmlUnavailable(f"{message}: {self._error_text(code)}")

    def _error_text(self, code: int) -> str:
        function = getattr(self._library, "nvmlErrorString", None)
        if function is None:
            return f"error {code}"
        function.restype = ctypes.c_char_p
        return str(function(code).decode(errors="replace"))


class NvmlGpu:
    """One GPU. A reading that is not offered is None."""

    def __init__(self, nvml: Nvml, handle: ctypes.c_void_p) -> None:
        self._nvml, self._handle = nvml, handle
        self._utilization = _Utilization()
        self._memory = _Memory()
        self._number = ctypes.c_uint()
        self._long = ctypes.c_ulonglong()
        self._throttle_call = nvml.first(_THROTTLE_CALLS)

    def name(self) -> str | None:
        """Return the product name, as torch reports it."""
        return self._nvml.text("nvmlDeviceGetName", self._handle)

    def busy_shares(self) -> tuple[float, float] | None:
        """Return the shares of the last sampling period in which a kernel ran, and in which memory was accessed.

        The period is 1/6 s to 1 s. One small kernel counts as much as a full GPU.
        """
        if not self._read("nvmlDeviceGetUtilizationRates", self._utilization):
            return None
        return self._utilization.gpu / 100, self._utilization.memory / 100

    def power_watts(self) -> float | None:
        """Return the board's power in watts. Since Ampere (except GA100) it is averaged over one second."""
        return self._number.value / 1000 if self._read("nvmlDeviceGetPowerUsage", self._number) else None

    def energy_joules(self) -> float | None:
        has_energy = self._read("nvmlDeviceGetTotalEnergyConsumption", self._long)
        return self._long.value / 1000 if has_energy else None

    def sm_clock_mhz(self) -> int | None:
        return self._number.value if self._read("nvmlDeviceGetClockInfo", self._number, _CLOCK_SM) else None

    def memory_clock_mhz(self) -> int | None:
        return self._number.value if self._read("nvmlDeviceGetClockInfo", self._number, _CLOCK_MEMORY) else None

    def throttle_reasons(self) -> list[str] | None:
        """Return why the clocks are reduced, as names from THROTTLE_REASONS; empty if they are not."""
        if not self._read(self._throttle_call, self._long):
            return None
        return [word for bit, word in THROTTLE_REASONS.items() if self._long.value & bit]

    def limits(self) -> dict[str, float]:
        """Return `max_sm_clock_mhz`, `power_limit_watts` and `default_power_limit_watts`, as far as offered."""
        number = ctypes.c_uint()
        limits: dict[str, float] = {}
        for name, factor, function, arguments in (
            ("max_sm_clock_mhz", 1, "nvmlDeviceGetMaxClockInfo", (ctypes.c_uint(_CLOCK_SM),)),
            ("power_limit_watts", 1000, "nvmlDeviceGetEnforcedPowerLimit", ()),
            ("default_power_limit_watts", 1000, "nvmlDeviceGetPowerManagementDefaultLimit", ()),
        ):
            if self._nvml.call(function, self._handle, *arguments, ctypes.byref(number)) == _SUCCESS:
                limits[name] = number.value / factor
        return limits

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return the bytes used by all processes and the driver, and the total bytes."""
        has_memory = self._read("nvmlDeviceGetMemoryInfo", self._memory)
        return (self._memory.used, self._memory.total) if has_memory else None

    def compute_processes(self) -> list[dict[str, Any]] | None:
        """Return `pid`, `name` and `used_bytes` of processes with a context on this GPU, from any thread.

        The pid is in the driver's namespace, which a container may not see.
        """
        name = self._nvml.first(_PROCESS_CALLS)
        count = ctypes.c_uint(0)
        for _ in range(_PROCESS_TRIES):
            # A few more than last counted: processes may start between two calls.
            infos = (_Process * (count.value + 8))()
            count.value = len(infos)
            code = self._nvml.call(name, self._handle, ctypes.byref(count), infos)
            if code != _INSUFFICIENT_SIZE:
                break
        if not self._nvml.offered(code):
            return None
        return [
            {
                "pid": info.pid,
                "name": self._nvml.text("nvmlSystemGetProcessName", ctypes.c_uint(info.pid)) or None,
                "used_bytes": None if info.used_bytes == _MEMORY_UNKNOWN else info.used_bytes,
            }
            for info in infos[: count.value]
        ]

    def _read(self, name: str, target: Any, *arguments: int) -> bool:
        numbers = map(ctypes.c_uint, arguments)
        return self._nvml.offered(self._nvml.call(name, self._handle, *numbers, ctypes.byref(target)))

"""What a run ran on: versions, device, settings that affect speed, and memory counters."""

import functools
import os
import platform
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch

from stepscope.recorder.machine.cpu import cpu_name, num_cores
from stepscope.recorder.processes.rank import rank_and_world_size

# Variables that affect the speed of a step. No others are recorded.
VARIABLE_PREFIXES = ("CUDA_", "NCCL_", "OMP_", "MKL_", "PYTORCH_", "TORCH", "TOKENIZERS_PARALLELISM")


def environment_facts(device: int | None) -> dict[str, Any]:
    rank, world_size = rank_and_world_size()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "device": "cpu" if device is None else "cuda",
        "device_name": device_name(device),
        "num_threads": torch.get_num_threads(),
        "rank": rank or 0,
        "world_size": world_size,
        "float32_matmul": float32_matmul(device),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLE_PREFIXES)
        },
    }
    if device is not None:
        properties = torch.cuda.get_device_properties(device)
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
        facts["memory_bytes"] = properties.total_memory
        facts["num_visible_devices"] = torch.cuda.device_count()
        facts["driver"] = driver_version()
    return facts


def device_name(device: int | None) -> str:
    """Return the name of a GPU, else of the CPU."""
    return cpu_name() if device is None else str(torch.cuda.get_device_name(device))


def speed_flags() -> dict[str, Any]:
    """Return torch's switches that affect the speed of a step, by torch's names, and threads and cores."""
    return {
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cpu.bf16": _computes_bfloat16(),
        "num_threads": torch.get_num_threads(),
        "num_cores": num_cores(),
    }


def _computes_bfloat16() -> bool:
    """Return whether the CPU has instructions for bfloat16; without them, oneDNN emulates it and is slower."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name)() for name in names if hasattr(torch.cpu, name))


def memory_facts(device: int | None) -> dict[str, int]:
    """Return the memory peaks since the process began. Resets nothing, because the script may read them too."""
    unit = 1 if sys.platform == "darwin" else 1024
    facts = {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device is not None:
        stats = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        facts.update(
            peak_allocated_bytes=stats["allocated_bytes.all.peak"],
            peak_reserved_bytes=stats["reserved_bytes.all.peak"],
            driver_used_bytes=total - free,
            driver_total_bytes=total,
            num_allocator_retries=stats["num_alloc_retries"],
            num_allocator_ooms=stats["num_ooms"],
        )
    return facts


def float32_matmul(device: int | None, is_convolution: bool = False) -> str:
    """Return `tf32` if float32 matrix products, or convolutions, may use TF32 on this device, else `fp32`."""
    if device is None or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return "fp32"
    return "tf32" if (convolutions_in_tf32() if is_convolution else products_in_tf32()) else "fp32"


def products_in_tf32() -> bool:
    """Return whether torch is set to multiply float32 matrices in TF32."""
    return allows_tf32(torch.backends.cuda.matmul, lambda: torch.get_float32_matmul_precision() != "highest")


def convolutions_in_tf32() -> bool:
    """Return whether torch is set to compute float32 convolutions in TF32: a setting of its own, on by default."""
    cudnn = torch.backends.cudnn
    return allows_tf32(getattr(cudnn, "conv", None), lambda: cudnn.allow_tf32)


def allows_tf32(backend: Any, by_old_setting: Callable[[], bool]) -> bool:
    """Return whether a backend of torch is set to compute float32 in TF32."""
    # Since torch 2.9 there are two settings, and reading the old one after the new one was set raises.
    precision = getattr(backend, "fp32_precision", None)
    return precision == "tf32" if precision in ("tf32", "ieee") else bool(by_old_setting())


def gpu_uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


@functools.cache
def driver_version() -> str | None:
    from stepscope.recorder.machine.nvml import Nvml, NvmlUnavailable

    try:
        return Nvml().driver_version()
    except NvmlUnavailable:
        return None

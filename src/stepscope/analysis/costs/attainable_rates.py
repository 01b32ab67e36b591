"""What good kernels reach of a device's limits: shares that an expected time is made from, and where they come from.

Each is a middle of what was measured on an H200 (docs/findings/README.md, "What a kernel can reach"): a large GEMM of
cuBLAS reached 55 to 93 % of the dense peak, one with a dimension that is no multiple of 16 bytes 10 to 15 %, flash
attention 22 % at 1,024 positions and 33 % at 4,096 and more, the efficient one in float32 40 % of the float32 peak,
an elementwise kernel 85 to 90 % of the bandwidth, and the backward of an embedding, which sorts the indices first and
adds up what goes to one row in parallel, 40 to 47 % of it beside 0.2 ns for each index. A compiled cross-entropy,
which reads the scores in the forward, and reads them and writes their gradient in the backward, reached 41 to 50 %.
"""

from __future__ import annotations

from stepscope.devices import Device

GEMM_SHARE = 0.6
MISALIGNED_GEMM_SHARE = 0.15
BANDWIDTH_SHARE = 0.85
SCATTER_SHARE, _SORT_NS_PER_INDEX = 0.4, 0.2
LOSS_SHARE, _LOSS_PASSES = 0.5, 3
_ATTENTION_SHARE, _ATTENTION_HALF_LENGTH = 0.35, 512
_FLOAT32_ATTENTION_SHARE = 0.4
LEAST_KERNEL_NS = 3_000.0
"""No kernel is expected to take less."""


def gemm_ns(device: Device, dtype: str, flops: int, num_bytes: int | None, is_aligned: bool = True) -> float:
    """How long a good GEMM takes; `dtype` as in the device's peaks."""
    peak = device.peak_flops[dtype] * (GEMM_SHARE if is_aligned else MISALIGNED_GEMM_SHARE)
    return max(flops / peak * 1e9, traffic_ns(device, num_bytes or 0))


def attention_ns(device: Device, dtype: str, flops: int, length: int) -> float:
    """How long flash attention takes over `length` keys; in float32, which flash does not do, the efficient one."""
    share = _ATTENTION_SHARE * length / (length + _ATTENTION_HALF_LENGTH)
    if dtype in ("fp32", "tf32"):
        dtype, share = "fp32", _FLOAT32_ATTENTION_SHARE
    return max(flops / (device.peak_flops[dtype] * share) * 1e9, LEAST_KERNEL_NS)


def traffic_ns(device: Device, num_bytes: float) -> float:
    """How long a kernel takes that only moves bytes."""
    return max(num_bytes / (device.bandwidth_bytes_per_s * BANDWIDTH_SHARE) * 1e9, LEAST_KERNEL_NS)


def scatter_ns(device: Device, num_bytes: float, num_indices: int) -> float:
    """How long a scatter takes that sorts its indices and adds up in parallel what goes to one row."""
    moving_ns = num_bytes / (device.bandwidth_bytes_per_s * SCATTER_SHARE) * 1e9
    return max(moving_ns + num_indices * _SORT_NS_PER_INDEX, LEAST_KERNEL_NS)


def loss_ns(device: Device, num_bytes: float) -> float:
    """How long the passes of a compiled cross-entropy over scores of so many bytes take, forward and backward."""
    return max(_LOSS_PASSES * num_bytes / (device.bandwidth_bytes_per_s * LOSS_SHARE) * 1e9, LEAST_KERNEL_NS)

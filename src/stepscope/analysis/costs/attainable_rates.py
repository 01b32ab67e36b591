"""Shares of a device's limits that good kernels reach, to compute expected times.

Each is a middle of measurements on an H200 (docs/findings/README.md, "What a kernel can reach").
"""

from stepscope.devices import Device

GEMM_SHARE = 0.6
MISALIGNED_GEMM_SHARE = 0.15
CONVOLUTION_SHARE = 0.4
BANDWIDTH_SHARE = 0.85
FUSED_SHARE = 0.57  # Inductor's kernels, which read and write several tensors and reduce along the way
NORM_SHARE = 0.45  # of norms, compiled or not: statistics and gradients of weights take passes of their own
SCATTER_SHARE, _SORT_NS_PER_INDEX = 0.4, 0.2
LOSS_SHARE, _LOSS_PASSES = 0.5, 3
_ATTENTION_SHARE, _ATTENTION_HALF_LENGTH = 0.35, 512
_FLOAT32_ATTENTION_SHARE = 0.4
LEAST_KERNEL_NS = 3_000.0  # lower limit of any expected time


def gemm_ns(device: Device, dtype: str, flops: int, num_bytes: int | None, is_aligned: bool = True) -> float:
    """Return how long a good GEMM takes, in ns; `dtype` as in the device's peaks."""
    peak = device.peak_flops[dtype] * (GEMM_SHARE if is_aligned else MISALIGNED_GEMM_SHARE)
    return max(flops / peak * 1e9, traffic_ns(device, num_bytes or 0))


def attention_ns(device: Device, dtype: str, flops: int, length: int) -> float:
    """Return how long flash attention over `length` keys takes, in ns; efficient attention for float32."""
    dtype = "fp32" if dtype == "tf32" else dtype
    share = product_share("attention_forward", dtype, length)
    return max(flops / (device.peak_flops[dtype] * share) * 1e9, LEAST_KERNEL_NS)


def product_share(kernel_class: str, dtype: str, num_keys: int | None = None) -> float:
    """Return the share of a device's peak that a good kernel of a class reaches; `num_keys` for attention."""
    if kernel_class == "convolution":
        return CONVOLUTION_SHARE
    if not kernel_class.startswith("attention"):
        return GEMM_SHARE
    if dtype in ("fp32", "tf32"):
        return _FLOAT32_ATTENTION_SHARE
    length = num_keys or _ATTENTION_HALF_LENGTH
    return _ATTENTION_SHARE * length / (length + _ATTENTION_HALF_LENGTH)


def traffic_ns(device: Device, num_bytes: float) -> float:
    """Return how long a kernel that only moves bytes takes, in ns."""
    return max(num_bytes / (device.bandwidth_bytes_per_s * BANDWIDTH_SHARE) * 1e9, LEAST_KERNEL_NS)


def fused_ns(device: Device, num_bytes: float, norm_bytes: float = 0.0) -> float:
    """Return how long compiled kernels take that move so many bytes, some of them in norms, in ns."""
    moving_ns = (num_bytes / FUSED_SHARE + norm_bytes / NORM_SHARE) / device.bandwidth_bytes_per_s * 1e9
    return max(moving_ns, LEAST_KERNEL_NS)


def scatter_ns(device: Device, num_bytes: float, num_indices: int) -> float:
    """Return how long a scatter takes that sorts its indices and adds rows in parallel, in ns."""
    moving_ns = num_bytes / (device.bandwidth_bytes_per_s * SCATTER_SHARE) * 1e9
    return max(moving_ns + num_indices * _SORT_NS_PER_INDEX, LEAST_KERNEL_NS)


def loss_ns(device: Device, num_bytes: float) -> float:
    """Return how long a compiled cross-entropy takes on logits of so many bytes, forward and backward, in ns."""
    return max(_LOSS_PASSES * num_bytes / (device.bandwidth_bytes_per_s * LOSS_SHARE) * 1e9, LEAST_KERNEL_NS)

"""The properties of a device that decide how much memory kernels and libraries use, and how much there is."""

from dataclasses import dataclass

from stepscope.devices.limits import Device

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB
"""Used by a process before its first tensor, for the context and loaded kernels; approximate, measured on an H200."""
LEAST_VISIBLE_SHARE, MOST_VISIBLE_SHARE = 0.90, 0.992
"""The share of the nominal memory that a process sees, for devices without an entry in the table: 14.56 of 16 GiB on
a T4, where error correction uses a part; 31.73 of 32 GiB on a V100."""
THREADS_PER_PROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""For compute capabilities where it is not 2048."""


@dataclass(frozen=True)
class Hardware:
    compute_capability: tuple[int, int]
    num_processors: int

    @property
    def threads_per_processor(self) -> int:
        return THREADS_PER_PROCESSOR.get(self.compute_capability, 2048)

    @property
    def workspace_bytes(self) -> int:
        """The workspace that PyTorch gives cuBLAS, per handle and stream."""
        return 32 * MIB if self.compute_capability >= (9, 0) else 8_519_680


def hardware_of(device: Device) -> Hardware | None:
    """Return the hardware of a known device, or None if it is unknown or not from NVIDIA."""
    if device.compute_capability is None or device.num_processors is None:
        return None
    return Hardware(device.compute_capability, device.num_processors)


def usable_bytes(device: Device) -> tuple[int, int]:
    """Return the least and the most memory that tensors can use on an otherwise idle device."""
    visible = device.visible_bytes
    least = int(device.memory_bytes * LEAST_VISIBLE_SHARE) if visible is None else visible
    most = int(device.memory_bytes * MOST_VISIBLE_SHARE) if visible is None else visible
    return least - CONTEXT_BYTES, most - CONTEXT_BYTES

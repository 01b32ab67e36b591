"""What of a device decides how much memory its kernels and libraries take, and how much there is."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.devices.peaks import Device

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB
"""What a process has on the device before its first tensor: the context and its loaded kernels; about, on an H200."""
LEAST_VISIBLE_SHARE, MOST_VISIBLE_SHARE = 0.90, 0.992
"""Of the nominal memory, what a process can see where the table does not say: 14.56 of 16 GiB on a T4, whose error
correction takes its part; 31.73 of 32 GiB on a V100."""
THREADS_PER_PROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Of compute capabilities that have not 2048."""


@dataclass(frozen=True)
class Hardware:
    """A kind of CUDA device."""

    compute_capability: tuple[int, int]
    num_processors: int

    @property
    def threads_per_processor(self) -> int:
        return THREADS_PER_PROCESSOR.get(self.compute_capability, 2048)

    @property
    def workspace_bytes(self) -> int:
        """What PyTorch gives cuBLAS to work in, for each handle and stream."""
        return 32 * MIB if self.compute_capability >= (9, 0) else 8_519_680


def hardware_of(device: Device) -> Hardware | None:
    """The kind of a device of the table; None where it is not known, or not NVIDIA's."""
    if device.compute_capability is None or device.num_processors is None:
        return None
    return Hardware(device.compute_capability, device.num_processors)


def usable_bytes(device: Device) -> tuple[int, int]:
    """Memory that tensors can have on a device that nobody else uses: at the least, and at the most."""
    visible = device.visible_bytes
    least = int(device.memory_bytes * LEAST_VISIBLE_SHARE) if visible is None else visible
    most = int(device.memory_bytes * MOST_VISIBLE_SHARE) if visible is None else visible
    return least - CONTEXT_BYTES, most - CONTEXT_BYTES

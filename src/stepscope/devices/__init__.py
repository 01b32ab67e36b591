"""What a device can do: dense peaks from its maker's documents, and ceilings measured on it.

    >>> find_device("NVIDIA H200").peak_flops["bf16"]
    989400000000000

A device that is not in the table is `None`, never a guess: `stepscope doctor --measure`
measures what it reaches instead.
"""

from stepscope.devices.ceilings import Ceilings, ceilings_path, load_ceilings, save_ceilings
from stepscope.devices.peaks import Device, find_device, known_devices, nearest_names

__all__ = [
    "Ceilings",
    "Device",
    "ceilings_path",
    "find_device",
    "known_devices",
    "load_ceilings",
    "nearest_names",
    "save_ceilings",
]

"""Limits of devices: dense peaks from vendor documents, and measured ceilings."""

from stepscope.devices.ceilings import Ceilings, ceilings_path, load_ceilings, save_ceilings
from stepscope.devices.peaks import Device, find_device, known_devices, nearest_names

__all__ = [
    "Ceilings", "Device", "ceilings_path", "find_device", "known_devices", "load_ceilings", "nearest_names",
    "save_ceilings",
]  # fmt: skip

"""Limits of devices: dense peaks from vendor documents, and measured ceilings."""

from stepscope.devices.limits import (
    Ceilings,
    Device,
    ceilings_path,
    find_device,
    known_devices,
    load_ceilings,
    nearest_names,
    save_ceilings,
)

__all__ = [
    "Ceilings", "Device", "ceilings_path", "find_device", "known_devices", "load_ceilings", "nearest_names",
    "save_ceilings",
]  # fmt: skip

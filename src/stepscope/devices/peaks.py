"""Dense peak rates by exact device name, read from `peaks.json`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

PEAKS_FILE = Path(__file__).with_name("peaks.json")

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")


@dataclass(frozen=True)
class Device:
    """A device as its vendor describes it; the fields of `peaks.json`, whose `about` defines them."""

    name: str  # as `torch.cuda.get_device_name()` reports it
    peak_flops: Mapping[str, int]
    """Dense operations per second by dtype, 2 per multiply-add; unknown or unsupported dtypes are absent."""
    memory_bytes: int  # nominal; the driver reserves some of it
    bandwidth_bytes_per_s: int
    source: str  # the document and its column
    note: str = ""
    compute_capability: tuple[int, int] | None = None  # NVIDIA's architecture number; None for other vendors
    num_processors: int | None = None  # streaming multiprocessors; None if unknown
    visible_bytes: int | None = None  # memory visible to a process; None if unknown


def find_device(name: str) -> Device | None:
    """Return the device with exactly this name, or None: a similar name may have other peaks."""
    return _devices().get(name)


def known_devices() -> tuple[Device, ...]:
    """Return every device in the table, in order."""
    return tuple(_devices().values())


def nearest_names(name: str, count: int = 3) -> list[str]:
    """Return at most `count` known names similar to `name`, the most similar first; for messages only.

    >>> nearest_names("l40")
    ['NVIDIA L40', 'NVIDIA L40S']
    """
    words = _words(name)
    ranked = []
    for known in _devices():
        likeness = difflib.SequenceMatcher(None, name.lower(), known.lower()).ratio()
        has_it = bool(words) and name.lower() in known.lower()
        if has_it or likeness >= 0.5:
            # Compare whole words first: by letters, "NVIDIA H100 80GB" is nearest to a GH200 480GB.
            ranked.append((has_it, len(words & _words(known)), likeness, known))
    is_part = any(has_it for has_it, *_ in ranked)
    return [known for has_it, _, _, known in sorted(ranked, reverse=True) if has_it or not is_part][:count]


def _words(name: str) -> set[str]:
    return set(name.lower().replace("-", " ").split())


@cache
def _devices() -> Mapping[str, Device]:
    table = json.loads(PEAKS_FILE.read_text(encoding="utf-8"))["devices"]
    for entry in table.values():
        entry["peak_flops"] = MappingProxyType(entry["peak_flops"])
        if "compute_capability" in entry:
            entry["compute_capability"] = tuple(entry["compute_capability"])
    return {name: Device(name=name, **entry) for name, entry in table.items()}

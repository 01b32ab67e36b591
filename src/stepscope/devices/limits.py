"""Limits of devices: dense peaks by exact name from `peaks.json`, and ceilings measured on this machine."""

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stepscope.errors import StepscopeError
from stepscope.user_cache import cache_folder, own_folder, read_own

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


CEILINGS_FILE = "ceilings.json"


@dataclass(frozen=True)
class Ceilings:
    """The best rates of a plain matrix product and a plain copy on a device."""

    name: str
    matmul_flops: Mapping[str, int]  # operations per second by dtype, 2 per multiply-add
    copy_bytes_per_s: int  # bytes read plus bytes written
    measured_at: str  # ISO 8601, UTC
    torch_version: str

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "name"}


def ceilings_path() -> Path:
    """Return the file of ceilings in the user's cache folder."""
    return cache_folder() / CEILINGS_FILE


def load_ceilings(name: str) -> Ceilings | None:
    if name.endswith(" CPU"):  # names of older recordings: any machine of an architecture
        return None
    entry: Any = _read().get(name)
    try:
        return Ceilings(
            name=name,
            matmul_flops={str(dtype): int(flops) for dtype, flops in entry["matmul_flops"].items()},
            copy_bytes_per_s=int(entry["copy_bytes_per_s"]),
            measured_at=str(entry["measured_at"]),
            torch_version=str(entry["torch_version"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def save_ceilings(ceilings: Ceilings) -> Path:
    """Store `ceilings` in place of older ones of the same device, and return the path written."""
    try:
        path = own_folder(create=True) / CEILINGS_FILE
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        entries = _read() | {ceilings.name: ceilings.to_json()}
        temporary.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        temporary.chmod(0o600)  # a file that others can write is not believed
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home directory
        raise StepscopeError(
            f"Cannot store the ceilings: {error}. Set STEPSCOPE_CACHE to a writable folder."
        ) from None
    return path


def _read() -> dict[str, Any]:
    try:
        entries = json.loads(read_own(own_folder() / CEILINGS_FILE))
    except (OSError, RuntimeError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}

"""Ceilings measured on this machine, kept in the user's cache by device name.

An unreadable file counts as empty, and the next measurement replaces it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import StepscopeError

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
        """Return all fields but the name, as they are stored."""
        return {name: value for name, value in asdict(self).items() if name != "name"}


def ceilings_path() -> Path:
    """Return the file of ceilings, in `$STEPSCOPE_CACHE`, `$XDG_CACHE_HOME/stepscope` or `~/.cache/stepscope`."""
    folder, cache = os.environ.get("STEPSCOPE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if folder:
        return Path(folder) / CEILINGS_FILE
    return (Path(cache) if cache else Path.home() / ".cache") / "stepscope" / CEILINGS_FILE


def load_ceilings(name: str) -> Ceilings | None:
    """Return the ceilings stored for exactly this device name, or None."""
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
        path = ceilings_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        entries = _read() | {ceilings.name: ceilings.to_json()}
        temporary.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home directory
        raise StepscopeError(
            f"Cannot store the ceilings: {error}. Set STEPSCOPE_CACHE to a writable folder."
        ) from None
    return path


def _read() -> dict[str, Any]:
    try:
        entries = json.loads(ceilings_path().read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}

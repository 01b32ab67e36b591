"""The rows that `stepscope bench` left, read without touching them; the reader's half of `sweep/results.py`."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import RecordingError

SWEEP_FILE = "sweep.json"
RESULTS_FILE = "results.jsonl"
_OF_A_ROW = {"hash": str, "workload": str, "status": str, "config": dict, "run": dict}


@dataclass(frozen=True)
class Sweep:
    """A sweep's rows as written, and what they ran on."""

    folder: Path
    rows: tuple[dict[str, Any], ...]
    """One a point: of two with one hash, the later."""
    environments: dict[str, dict[str, Any]]
    """By a row's `environment_hash`; empty where sweep.json is not beside the rows."""
    warnings: tuple[str, ...]


def read_sweep(path: Path) -> Sweep:
    """The sweep in a folder or a file of rows; RecordingError in one line when it cannot be read."""
    file = path / RESULTS_FILE if path.is_dir() else path
    try:
        lines = file.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise RecordingError(f"{file}: {error.strerror or error}") from None
    warnings = []
    if lines and not lines[-1].endswith(b"\n"):
        warnings.append(f"{file}: the last line is half written and was left out")
        lines.pop()
    rows = [_row(line, number, file) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise RecordingError(f"{file} has no rows: no point of the sweep was finished")
    return Sweep(
        file.parent, tuple({row["hash"]: row for row in rows}.values()), _environments(file), tuple(warnings)
    )


def _row(line: bytes, number: int, file: Path) -> dict[str, Any]:
    try:
        row = json.loads(line, parse_constant=_refused)
        if not isinstance(row, dict) or not all(isinstance(row.get(name), kind) for name, kind in _OF_A_ROW.items()):
            raise ValueError
        for name in ("samples_device_ns", "samples_host_ns"):
            if not all(isinstance(ns, (int, float)) and math.isfinite(ns) for ns in row.get(name) or ()):
                raise ValueError
    except (ValueError, RecursionError, TypeError):
        raise RecordingError(
            f"{file}, line {number} is no row of a sweep: it was changed by hand or damaged"
        ) from None
    return row


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _environments(file: Path) -> dict[str, dict[str, Any]]:
    try:
        facts = json.loads((file.parent / SWEEP_FILE).read_bytes())
        found = facts["environments"]
        return {key: value for key, value in found.items() if isinstance(value, dict)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}

"""The rows that `stepscope bench` left, read without touching them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import RecordingError
from stepscope.rows import RESULTS_FILE, BadRow, read_facts, read_rows


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
        found = read_rows(file)
    except OSError as error:
        raise RecordingError(f"{file}: {error.strerror or error}") from None
    except BadRow as error:
        raise RecordingError(f"{file}, {error}: it was edited or damaged") from None
    if not found.rows:
        raise RecordingError(f"{file} has no rows: no point of the sweep was finished")
    warnings = [f"{file}: the last line is half written and was left out"] if found.is_cut_off else []
    try:
        environments = read_facts(file.parent)["environments"]
    except (OSError, BadRow):
        environments = {}
    return Sweep(file.parent, tuple({row["hash"]: row for row in found.rows}.values()), environments, tuple(warnings))

"""The folder of a sweep: one line per finished point, on disk before the next point starts.

    sweep.json      command, environments by hash, schema version
    results.jsonl   one row per line, including raw samples (docs/bench.md)
    logs/<hash>.txt output of the point's process

If the sweep is killed, only the running point is lost. A half-written last line is removed when the sweep is resumed.
Only one sweep at a time writes to a folder; the lock ends with its process.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import RecordingError, UsageError
from stepscope.formatting import plural
from stepscope.recorder.files import write_json
from stepscope.sweep.protocol import Row
from stepscope.version import __version__

SCHEMA_VERSION = 1

SWEEP_FILE = "sweep.json"
RESULTS_FILE = "results.jsonl"
LOCK_FILE = ".lock"
LOG_FOLDER = "logs"
TRACE_FOLDER = "traces"

# What a sweep leaves if it is killed right at the start: nothing to resume, and not somebody else's files.
_JUST_STARTED = {LOCK_FILE, LOG_FOLDER, f".{SWEEP_FILE}.tmp"}


class Results(AbstractContextManager["Results"]):
    """An open sweep folder: its rows, and a place for more. Locked until closed."""

    def __init__(self, folder: Path, facts: dict[str, Any], resume: bool, resume_command: str) -> None:
        self.folder, self._resume_command = folder, resume_command
        try:
            _check_ours(folder)
            (folder / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"Cannot write to {folder}: {error.strerror}. Choose another folder with -o.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UsageError(f"Another sweep is writing to {folder}. Choose another folder with -o.") from None
        try:
            path = folder / RESULTS_FILE
            num_lines = len(path.read_bytes().splitlines()) if path.exists() else 0  # including a half-written one
            if num_lines and not resume:
                raise UsageError(
                    f"{folder} already has {plural(num_lines, 'row')}. Resume it with:  {resume_command}"
                )
            with self.writing():
                self.rows = heal(path)
                self.facts = self._facts(facts)
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except BaseException:
            os.close(self._lock)
            raise

    def _facts(self, facts: dict[str, Any]) -> dict[str, Any]:
        path = self.folder / SWEEP_FILE
        old = read_facts(self.folder) if path.exists() else {}
        merged = {
            **{name: value for name, value in facts.items() if name != "command"},
            "schema_version": SCHEMA_VERSION,
            "environments": old.get("environments", {}),
            "commands": [*old.get("commands", []), facts.get("command")],
        }
        write_json(path, merged)
        return merged

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failed write, such as a full disk, into one line with the command that resumes."""
        try:
            yield
        except OSError as error:
            raise RecordingError(
                f"Cannot write to {self.folder}: {error.strerror or error}. Fix this, then resume with:  "
                f"{self._resume_command}"
            ) from None

    @property
    def hashes(self) -> set[str]:
        return {row["hash"] for row in self.rows}

    def append(self, row: Row) -> None:
        """Write a finished row to disk. Its environment goes to sweep.json."""
        environment = row.pop("environment", None)
        if environment is not None:
            key = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:12]
            row["environment_hash"] = key
            if key not in self.facts["environments"]:
                self.facts["environments"][key] = environment
                with self.writing():
                    write_json(self.folder / SWEEP_FILE, self.facts)
        line = (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()
        with self.writing():
            while line:  # a nearly full disk silently accepts only a part
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)
        self.rows.append(row)

    def __exit__(self, *_exception: object) -> None:
        os.close(self._descriptor)
        os.close(self._lock)


@dataclass(frozen=True, kw_only=True)
class Place:
    folder: Path
    command: str  # what started the sweep; sweep.json keeps it
    resume: bool = False  # whether to continue a sweep that was interrupted
    resume_command: str  # what a user runs to continue it

    def open(self, **facts: Any) -> Results:
        """Return the open folder; `facts` are further keys of sweep.json."""
        known = {"command": self.command, "working_folder": str(Path.cwd()), "stepscope": __version__}
        return Results(self.folder, {**known, **facts}, self.resume, self.resume_command)


def default_folder(verb: str, workload: str) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in Path(workload).name)
    return Path("runs") / f"{verb}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _check_ours(folder: Path) -> None:
    """Raise UsageError, touching nothing, if the folder contains something other than a sweep."""
    if not folder.is_dir():
        return  # it will be created, if possible
    names = {entry.name for entry in folder.iterdir()}
    if names <= _JUST_STARTED:
        return
    if SWEEP_FILE not in names:
        raise UsageError(f"{folder} is not empty and is not a sweep. Choose another folder with -o.")
    facts = read_facts(folder)
    if "schema_version" not in facts or not isinstance(facts.get("environments"), dict):
        raise UsageError(f"{folder / SWEEP_FILE} does not belong to a sweep. Choose another folder with -o.")


def heal(path: Path) -> list[Row]:
    """Return the rows of a results file and remove a half-written last line."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    rows = [_row(line, number, path) for number, line in enumerate(whole.splitlines(), 1) if line.strip()]
    if whole != text:
        os.truncate(path, len(whole))
    return rows


_ROW_TYPES = {"hash": str, "status": str, "config": dict, "run": dict}


def _row(line: bytes, number: int, path: Path) -> Row:
    try:
        row = json.loads(line)
        if not isinstance(row, dict) or not all(isinstance(row.get(name), kind) for name, kind in _ROW_TYPES.items()):
            raise ValueError
        for name in ("samples_device_ns", "samples_host_ns"):
            if not all(isinstance(ns, (int, float)) for ns in row.get(name) or ()):
                raise ValueError
        is_newer = row.get("schema_version", SCHEMA_VERSION) > SCHEMA_VERSION
    except (ValueError, RecursionError, TypeError):
        raise UsageError(
            f"{path}, line {number} is not a valid row: it was edited or damaged. Delete the line to measure its "
            "point again."
        ) from None
    if is_newer:
        raise UsageError(f"{path}, line {number} was written by a newer version of stepscope. Use that version.")
    return row


def read_facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / SWEEP_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot read {folder / SWEEP_FILE}: {error}") from None
    return facts if isinstance(facts, dict) else {}

"""The folder of a sweep: one line a finished point, on disk before the next begins.

    sweep.json      command, environments by hash, schema version
    results.jsonl   the truth: one row a line, raw samples and all (docs/bench.md)
    logs/<hash>.txt what the point's process printed

A kill at any moment loses nothing but the point that was running: the last line may be half written, and is cut off
when the sweep is resumed. One sweep at a time writes to a folder; the lock goes with its process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepscope.errors import RecordingError, UsageError
from stepscope.recorder.files import write_json

SCHEMA_VERSION = 1

SWEEP_FILE = "sweep.json"
RESULTS_FILE = "results.jsonl"
LOCK_FILE = ".lock"
LOG_FOLDER = "logs"
TRACE_FOLDER = "traces"

# All that a sweep killed in its first moment leaves: not yet anything to go on with, nor anybody else's.
_BEGUN = {LOCK_FILE, LOG_FOLDER, f".{SWEEP_FILE}.tmp"}


class Results:
    """An open sweep folder: rows that are there, and a place for more. Locked until it is closed."""

    def __init__(self, folder: Path, facts: dict[str, Any], resume: bool, resume_command: str) -> None:
        self.folder = folder
        self._resume_command = resume_command
        try:
            _check_ours(folder)
            (folder / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"cannot write to {folder}: {error.strerror}; name another folder with -o") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UsageError(f"another sweep is writing to {folder}: name another folder with -o") from None
        try:
            num_lines = _num_lines(folder / RESULTS_FILE)
            if num_lines and not resume:
                rows = f"{num_lines} row{'' if num_lines == 1 else 's'}"
                raise UsageError(f"{folder} holds {rows}: go on with  {resume_command}")
            with self.writing():
                self.rows = heal(folder / RESULTS_FILE)
                self.facts = self._facts(facts)
                self._descriptor = os.open(
                    folder / RESULTS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
                )
        except BaseException:
            os.close(self._lock)
            raise

    def _facts(self, facts: dict[str, Any]) -> dict[str, Any]:
        path = self.folder / SWEEP_FILE
        old: dict[str, Any] = {}
        if path.exists():
            old = read_facts(self.folder)
        merged = {
            **facts,
            "schema_version": SCHEMA_VERSION,
            "environments": old.get("environments", {}),
            "commands": [*old.get("commands", []), facts.get("command")],
        }
        merged.pop("command", None)
        write_json(path, merged)
        return merged

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around whatever writes to the folder: a full disk is one line, with the command that goes on."""
        try:
            yield
        except OSError as error:
            raise RecordingError(
                f"{self.folder} cannot be written: {error.strerror or error}; mend that and go on with  "
                f"{self._resume_command}"
            ) from None

    @property
    def hashes(self) -> set[str]:
        """The points that are done."""
        return {row["hash"] for row in self.rows}

    def append(self, row: dict[str, Any]) -> None:
        """Add a finished row: on disk when this returns. Its environment goes to sweep.json."""
        environment = row.pop("environment", None)
        if environment is not None:
            key = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:12]
            row["environment_hash"] = key
            if key not in self.facts["environments"]:
                self.facts["environments"][key] = environment
                with self.writing():
                    write_json(self.folder / SWEEP_FILE, self.facts)
        line = json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n"
        with self.writing():
            _write_all(self._descriptor, line.encode())
            os.fsync(self._descriptor)
        self.rows.append(row)

    def close(self) -> None:
        os.close(self._descriptor)
        os.close(self._lock)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _check_ours(folder: Path) -> None:
    """UsageError where somebody keeps something else in the folder: nothing in it was touched."""
    if not folder.is_dir():
        return  # it will be made, or cannot be
    names = {entry.name for entry in folder.iterdir()}
    if names <= _BEGUN:
        return
    if SWEEP_FILE not in names:
        raise UsageError(f"{folder} is not empty and holds no sweep: name another folder with -o")
    facts = read_facts(folder)
    if "schema_version" not in facts or not isinstance(facts.get("environments"), dict):
        raise UsageError(f"{folder / SWEEP_FILE} is of no sweep: name another folder with -o")


def _num_lines(path: Path) -> int:
    """Rows in a results file, one half written among them."""
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def _write_all(descriptor: int, text: bytes) -> None:
    """Write it to the last byte: a disk that is nearly full takes a part, and says nothing."""
    while text:
        text = text[os.write(descriptor, text) :]


def heal(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file; a last line that a kill left half written is cut off."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    rows = [_row(line, number, path) for number, line in enumerate(whole.splitlines(), 1) if line.strip()]
    rest = text[len(whole) :]
    if rest:
        os.truncate(path, len(whole))
    return rows


_OF_A_ROW = {"hash": str, "status": str, "config": dict, "run": dict}


def _row(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if not isinstance(row, dict) or not all(isinstance(row.get(name), kind) for name, kind in _OF_A_ROW.items()):
            raise ValueError
        for name in ("samples_device_ns", "samples_host_ns"):
            if not all(isinstance(ns, (int, float)) for ns in row.get(name) or ()):
                raise ValueError
    except (ValueError, RecursionError, TypeError):
        raise UsageError(
            f"{path}, line {number} is no row of a sweep: it was changed by hand or damaged; take it out, and its "
            "point is measured again"
        ) from None
    if row.get("schema_version", SCHEMA_VERSION) > SCHEMA_VERSION:
        raise UsageError(f"{path}, line {number} was written by a newer stepscope: go on with that one")
    return row


def read_facts(folder: Path) -> dict[str, Any]:
    """What sweep.json says."""
    try:
        facts = json.loads((folder / SWEEP_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / SWEEP_FILE} cannot be read: {error}") from None
    return facts if isinstance(facts, dict) else {}

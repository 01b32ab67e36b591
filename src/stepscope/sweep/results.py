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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.border import read_file
from stepscope.errors import RecordingError, UsageError
from stepscope.formatting import plural
from stepscope.recorder.files import write_json
from stepscope.rows import (
    ATTEMPTS,
    RESULTS_FILE,
    SCHEMA_VERSION,
    SWEEP_FILE,
    BadRow,
    Row,
    is_tried_again,
    read_facts,
    read_rows,
)
from stepscope.version import __version__

LOCK_FILE = ".lock"
LOG_FOLDER = "logs"
TRACE_FOLDER = "traces"

RESULT_PREFIX = ".point-"  # of the file in which a point's process leaves its result until it is a row

NEW_FILE = os.O_CLOEXEC | os.O_NOFOLLOW
"""How files of a sweep are opened for writing: a link in a folder from somebody else could lead to any file."""

# What a sweep leaves if it is killed right at the start: nothing to resume, and not somebody else's files.
_JUST_STARTED = {LOCK_FILE, LOG_FOLDER, f".{SWEEP_FILE}.tmp"}


class Results(AbstractContextManager["Results"]):
    """An open sweep folder: its rows, and a place for more. Locked until closed."""

    def __init__(self, folder: Path, facts: dict[str, Any], resume: bool, resume_command: str) -> None:
        self.folder, self._resume_command = folder, resume_command
        try:
            _check_ours(folder)
            (folder / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
            self._lock = locked(folder, "Another sweep is writing to {}. Choose another folder with -o.")
        except OSError as error:
            raise UsageError(f"Cannot write to {folder}: {error.strerror}. Choose another folder with -o.") from None
        try:
            self._path = folder / RESULTS_FILE
            num_lines = _num_lines(self._path)
            if num_lines and not resume:
                raise UsageError(
                    f"{folder} already has {plural(num_lines, 'row')}. Resume it with:  {resume_command}"
                )
            with self.writing():
                for left in folder.glob(f"{RESULT_PREFIX}*"):  # by a sweep that was killed
                    left.unlink(missing_ok=True)
                self.rows = list({row["hash"]: row for row in heal(self._path)}.values())
                self._places = {row["hash"]: place for place, row in enumerate(self.rows)}
                self.hashes = {row["hash"] for row in self.rows if not is_tried_again(row)}
                """Points that need not be measured: they have a row, and nothing outside ended them before."""
                self.facts = self._facts(facts)
                self._descriptor = self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NEW_FILE, 0o644)

    def _facts(self, facts: dict[str, Any]) -> dict[str, Any]:
        path = self.folder / SWEEP_FILE
        old = facts_of(self.folder) if path.exists() else {}
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
        place = self._places.setdefault(row["hash"], len(self.rows))
        with self.writing():
            if place < len(self.rows):
                row[ATTEMPTS] = self.rows[place].get(ATTEMPTS, 1) + 1
                self._rewrite([*self.rows[:place], row, *self.rows[place + 1 :]])
                self.rows[place] = row
            else:
                _write(self._descriptor, _line_of(row))
                os.fsync(self._descriptor)
                self.rows.append(row)
        self.hashes.add(row["hash"])

    def arrange(self, hashes: Sequence[str]) -> None:
        """Put the rows of these points in this order, after all others: those of an engine come as they end."""
        places = {name: place for place, name in enumerate(hashes)}
        rows = sorted(self.rows, key=lambda row: places.get(row["hash"], -1))
        if rows != self.rows:
            with self.writing():
                self._rewrite(rows)
            self.rows, self._places = rows, {row["hash"]: place for place, row in enumerate(rows)}

    def _rewrite(self, rows: list[Row]) -> None:
        """Put these rows in place of those on disk, at once: a kill leaves all old ones or all new ones."""
        part = self._path.with_name(f".{self._path.name}.part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NEW_FILE, 0o644)
        try:
            _write(descriptor, b"".join(map(_line_of, rows)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.replace(self._path)
        os.close(self._descriptor)
        self._descriptor = self._open()

    def __exit__(self, *_exception: object) -> None:
        os.close(self._descriptor)
        os.close(self._lock)


def locked(folder: Path, busy: str) -> int:
    """Return the descriptor of a folder's lock, held until it is closed; UsageError (`busy`) if another holds it."""
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | NEW_FILE, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UsageError(busy.format(folder)) from None
    return lock


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
    facts_of(folder)


def heal(path: Path) -> list[Row]:
    """Return the rows of a results file and remove a half-written last line."""
    if not path.exists():
        return []
    try:
        found = read_rows(path)
    except BadRow as error:
        raise UsageError(
            f"{path}, {error}. If it was edited or damaged, delete the line to measure its point again."
        ) from None
    if found.is_cut_off:
        os.truncate(path, found.whole_bytes)
    return list(found.rows)


def _num_lines(path: Path) -> int:
    """Return the number of lines, including a half-written one."""
    try:
        return len(read_file(path, "ROWS_MIB", is_raw=True).splitlines())
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise UsageError(f"Cannot read {path}: {error}. Choose another folder with -o.") from None
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}. Choose another folder with -o.") from None


def json_of(path: Path) -> dict[str, Any]:
    """Return the JSON that a process left; empty if it left nothing whole."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def text_of(log: Path) -> str:
    """Return the output of a process; empty if it left none."""
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _line_of(row: Row) -> bytes:
    return (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _write(descriptor: int, data: bytes) -> None:
    while data:  # a nearly full disk silently accepts only a part
        data = data[os.write(descriptor, data) :]


def facts_of(folder: Path) -> dict[str, Any]:
    """Return sweep.json; UsageError if it cannot be read or is not a sweep's."""
    try:
        return read_facts(folder)
    except (OSError, BadRow) as error:
        said = getattr(error, "strerror", None) or error
        raise UsageError(f"Cannot use {folder / SWEEP_FILE}: {said}. Choose another folder with -o.") from None

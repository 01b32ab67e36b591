"""The files of a recording: their names, and writes that stay readable when the process is killed.

`recording.json` is written under a temporary name and then renamed. Its status is `interrupted` until the very end,
so that it is correct even if the process is killed. `samples.jsonl` is appended one whole line per step, unbuffered.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from stepscope.recorder.wall import identity, tell_once

SCHEMA_VERSION = 1

RECORDING_FILE = "recording.json"
SAMPLES_FILE = "samples.jsonl"
TRACE_FOLDER = "trace"
MEMORY_FILE = "memory.json.gz"
SNAPSHOT_FILE = "snapshot.pickle"
OOM_SNAPSHOT_FILE = "snapshot_oom.pickle"
COUNTERS_FILE = "counters.jsonl"
COMPILE_FILE = "compile.json"
HISTORY_FILE = "history.jsonl"
RECENT_FILE = "recent.jsonl"
OLDER_RECENT_FILE = "recent.old.jsonl"
CONTROL_FOLDER = "control"
HANG_FILE = "hang.json"
HANG_FOLDER = "hang"

OWN_NAMES = (
    *(RECORDING_FILE, SAMPLES_FILE, TRACE_FOLDER, MEMORY_FILE, SNAPSHOT_FILE, OOM_SNAPSHOT_FILE),
    *(COUNTERS_FILE, COMPILE_FILE, HISTORY_FILE, RECENT_FILE, OLDER_RECENT_FILE, CONTROL_FOLDER),
    *(HANG_FILE, HANG_FOLDER),
)
OF_ALL_RANKS = (CONTROL_FOLDER, HANG_FOLDER)
WINDOW_FOLDER = re.compile(r"window\d+")
RANK_FOLDER = re.compile(r"rank\d+")
PROCESS_FOLDER = re.compile(r"process\d+(-\d+)?")
FIRST_RANK = "rank0"
CHILD_FOLDER = re.compile(rf"{RANK_FOLDER.pattern}|{PROCESS_FOLDER.pattern}")
"""A process that the script started and that trained: by rank, else by process id."""
_FOLDER = re.compile(rf"{CHILD_FOLDER.pattern}|{WINDOW_FOLDER.pattern}")

STATUS_INTERRUPTED = "interrupted"
STATUS_FINISHED = "finished"
STATUS_FAILED = "failed"

# Limit the size of the recording of a very long run.
MAX_SAMPLE_LINES = 100_000
MAX_RECENT_LINES = 20_000


def run_and_rank(folder: Path) -> tuple[Path, str]:
    """Return the folder of the run that a process records for, and the name of its rank."""
    is_child = CHILD_FOLDER.fullmatch(folder.name) and (folder.parent / RECORDING_FILE).exists()
    return (folder.parent, folder.name) if is_child else (folder, FIRST_RANK)


def default_folder(name: str) -> Path:
    """Return a new folder under `runs/`. Ranks that a launcher started get the same one, on every host of a job."""
    is_rank = "RANK" in os.environ
    if (is_rank or int(_variable("SLURM_JOB_NUM_NODES", "1")) > 1) and (job := shared_job()):
        return Path("runs") / f"{name}-{job}"
    if is_rank:  # all ranks need the same name: they share a parent process and a day
        return Path("runs") / f"{name}-{time.strftime('%Y%m%d')}-{os.getppid()}"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def shared_job() -> str | None:
    """Return what all ranks of one attempt of a job know, as part of a file's name; None if nothing says it."""
    if job := os.environ.get("STEPSCOPE_JOB"):
        found = job
    elif job := os.environ.get("SLURM_JOB_ID"):
        found = f"slurm{job}.{_variable('SLURM_STEP_ID', '0')}"
    elif (job := os.environ.get("TORCHELASTIC_RUN_ID", "none")) != "none":
        found = job
    else:
        return None
    restarts = max(int(_variable(f"{of}_RESTART_COUNT", "0")) for of in ("SLURM", "TORCHELASTIC"))
    return re.sub(r"[^\w.-]", "_", found)[:80] + (f"-restart{restarts}" if restarts else "")


def _variable(name: str, otherwise: str) -> str:
    """Return a variable of the environment that is a number."""
    text = os.environ.get(name, "")
    return text if text.isdecimal() else otherwise


def _has_no_step(folder: Path) -> bool:
    """Return whether nothing was measured in a recording, nor in one of its ranks."""
    names = (SAMPLES_FILE, HISTORY_FILE, f"{TRACE_FOLDER}/*", MEMORY_FILE, SNAPSHOT_FILE, OOM_SNAPSHOT_FILE)
    try:
        has_ended = json.loads((folder / RECORDING_FILE).read_bytes())["status"] in (STATUS_FINISHED, STATUS_FAILED)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return has_ended and not any(file.stat().st_size for name in names for file in folder.rglob(name))


def prepare_folder(
    folder: Path, force: bool, keep_ranks: bool = False, resumes: bool = False, option: str = ""
) -> None:
    """Create `folder`, or empty an earlier recording if `force` is set. Raises ValueError if that is not possible.

    A recording without a step, as of a script that failed at its beginning, is replaced anyway. `resumes` empties
    it too, but keeps its history, which goes on. Only a folder that holds a recording is emptied: `force` on a home
    directory is refused. `keep_ranks` leaves other ranks' folders alone, because they are being written. `option` is
    how to name another folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{RECORDING_FILE}.tmp"
        probe.unlink(missing_ok=True)  # all that is there of a run that was killed in its first moment
        entries = [e for e in folder.iterdir() if not (keep_ranks and RANK_FOLDER.fullmatch(e.name))]
        if entries:
            if not _is_recording(folder / RECORDING_FILE):
                raise ValueError(f"{folder} is not empty and holds no recording: name another folder")
            if not (force or resumes or _has_no_step(folder)):
                how = "add --force (in Python, force=True) to replace it, or name another folder"
                raise ValueError(f"{folder} already holds a recording: {how}")
            if (pid := _recorded_by(folder / RECORDING_FILE)) is not None:
                raise ValueError(f"{folder} is being recorded by process {pid}: wait, or name another folder")
            for entry in entries:
                if resumes and entry.name == HISTORY_FILE:
                    continue
                if entry.name not in OWN_NAMES and not _FOLDER.fullmatch(entry.name):
                    continue  # the user keeps own files beside the recording
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"cannot write to {folder}: {error.strerror or error}; name another folder{option}"
        ) from None


def _is_recording(path: Path) -> bool:
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(facts, dict) and "schema_version" in facts and "status" in facts


def _recorded_by(path: Path) -> int | None:
    """Return the process that is still writing a recording, or None if it has ended."""
    facts = json.loads(path.read_bytes())
    pid, started_at = facts.get("pid"), str(facts.get("started_at"))
    if facts["status"] != STATUS_INTERRUPTED or not isinstance(pid, int) or pid == os.getpid() or not is_running(pid):
        return None
    began = process_start(pid)
    return None if began is not None and began > started_at else pid  # a later process may have the same number


def is_running(pid: int) -> bool:
    """Return whether a process still runs; one that has ended and was not waited for does not."""
    try:
        return _process_facts(pid)[0] not in ("Z", "X")
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def process_start(pid: int) -> str | None:
    """Return when a process began, as ISO 8601 in UTC, rounded down to a second; None if it is not known."""
    try:
        boot = re.search(r"^btime (\d+)", Path("/proc/stat").read_text(encoding="ascii"), re.MULTILINE)
        seconds = int(_process_facts(pid)[19]) // os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(boot[1]) + seconds - 1)) if boot else None


def _process_facts(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on: the state, …"""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def num_steps(folder: Path) -> int:
    """Return the number of steps in a recording; 0 if it cannot be read."""
    try:
        return int(json.loads((folder / RECORDING_FILE).read_bytes())["steps"]["num_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON atomically."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False, default=str) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees either the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json_gz(path: Path, value: Any) -> None:
    """Write `value` as compressed JSON atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=6) as stream:
        json.dump(value, stream, separators=(",", ":"), default=str)
    temporary.replace(path)


class OwnFile:
    """A file that is only appended to, never through a descriptor that the script has closed and opened on another.

    Each `append` is a single write, so a kill leaves no mixed lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = self._open(os.O_CREAT)
        self._identity = identity(self._descriptor)

    def _open(self, flags: int = 0) -> int:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)
        try:
            # A high number: scripts that become daemons close the low descriptors.
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 200)
        finally:
            os.close(descriptor)

    def append(self, data: bytes) -> None:
        """Append bytes. Raises FileNotFoundError if the file was removed or replaced, OSError if the disk is full."""
        if identity(self._descriptor) != self._identity:
            self._descriptor = self._open()
            if identity(self._descriptor) != self._identity:
                self.close()
                raise FileNotFoundError(f"{self.path} was replaced")
        if not os.fstat(self._descriptor).st_nlink:
            raise FileNotFoundError(f"{self.path} was deleted")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        if self._identity is not None and identity(self._descriptor) == self._identity:
            os.close(self._descriptor)
        self._descriptor = -1


class LineFile:
    """A file of JSON lines. Those that a full disk does not take are counted, and the first time one line says so."""

    def __init__(self, path: Path) -> None:
        self._file = OwnFile(path)
        self.num_lines = 0
        self.num_dropped = 0

    def append(self, lines: str, num_lines: int = 1) -> None:
        """Append lines. Raises FileNotFoundError if the file was removed."""
        try:
            self._file.append(f"{lines}\n".encode())
            self.num_lines += num_lines
        except FileNotFoundError:
            raise
        except OSError as error:
            self.num_dropped += num_lines
            why = f"cannot write {self._file.path}: {error.strerror}"
            tell_once(f"{why}. Steps are not recorded until this changes; the script goes on")

    def close(self) -> None:
        self._file.close()


class SampleFile(LineFile):
    """The first steps in one file, and the last ones in another that begins anew after MAX_RECENT_LINES."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path.parent
        self._recent: LineFile | None = None

    def append(self, lines: str, num_lines: int = 1) -> None:
        if self.num_lines < MAX_SAMPLE_LINES:
            super().append(lines, num_lines)
            return
        self.num_dropped += num_lines
        if self._recent is not None and self._recent.num_lines >= MAX_RECENT_LINES:
            self._recent.close()
            (self._folder / RECENT_FILE).replace(self._folder / OLDER_RECENT_FILE)
            self._recent = None
        if self._recent is None:
            self._recent = LineFile(self._folder / RECENT_FILE)
        self._recent.append(lines, num_lines)

    def close(self) -> None:
        super().close()
        if self._recent is not None:
            self._recent.close()

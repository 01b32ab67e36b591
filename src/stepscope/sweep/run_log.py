"""The folder of `stepscope improve`: one line per finished run, on disk before the next run starts.

    improve.json    what is improved, and the result once there is one
    runs.jsonl      one line per run: its changes, its recording, how long it took, why it failed
    run-…/          the recordings, each with the script's output next to it

If it is killed, only the running run is lost. Only one process at a time writes to a folder.
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from stepscope.border import AMOUNT, PLACE, PLAIN, TEXT, check, read_file, read_json
from stepscope.errors import RecordingError, UsageError
from stepscope.recorder.files import write_json
from stepscope.sweep.results import LOCK_FILE, NEW_FILE, locked

RESULT_FILE = "improve.json"
RUNS_FILE = "runs.jsonl"
SCHEMA_VERSION = 1


class RunLog(AbstractContextManager["RunLog"]):
    """An open folder of runs: those that have finished, and a place for more. Locked until closed."""

    def __init__(self, folder: Path, asked: Mapping[str, Any]) -> None:
        """`asked` is what is improved and how; UsageError if the folder holds something else."""
        self.folder, self._asked = folder, dict(asked)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            others = {entry.name for entry in folder.iterdir()} - {LOCK_FILE}
            if others and asked_of(folder) != self._asked:
                raise UsageError(
                    f"{folder} is not empty and holds no runs of this command. Choose another folder with -o."
                )
            self._lock = locked(folder, "Another process is writing to {}. Wait for its end.")
        except OSError as error:
            raise UsageError(f"Cannot write to {folder}: {error.strerror}. Choose another folder with -o.") from None
        try:
            self.rows = _whole_rows(folder / RUNS_FILE)
        except UsageError:
            os.close(self._lock)
            raise
        for left in set(folder.glob("run-*")) - {folder / name for row in self.rows for name in _files(row)}:
            shutil.rmtree(left) if left.is_dir() else left.unlink()  # by a run that was killed
        self.write({})
        self._descriptor = os.open(folder / RUNS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NEW_FILE, 0o644)

    def append(self, row: dict[str, Any]) -> None:
        try:
            os.write(self._descriptor, (json.dumps(row, allow_nan=False) + "\n").encode())
            os.fsync(self._descriptor)
        except OSError as error:
            raise RecordingError(f"Cannot write to {self.folder}: {error.strerror}. Run the command again.") from None
        self.rows.append(row)

    def write(self, result: Mapping[str, Any]) -> None:
        """Write the result; an empty one says that there is none yet."""
        write_json(self.folder / RESULT_FILE, {"asked": self._asked, "result": dict(result) or None})

    def __exit__(self, *_exception: object) -> None:
        os.close(self._descriptor)
        os.close(self._lock)


def asked_of(folder: Path) -> Any:
    """Return what a folder of runs is about; None if it is not one."""
    return _json_of(folder).get("asked")


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder holds runs without a result, as a kill leaves it."""
    return asked_of(folder) is not None and _json_of(folder).get("result") is None


def _json_of(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_json(folder / RESULT_FILE)
        check(found, {"asked": PLAIN, "result": PLAIN})
    except (OSError, ValueError):
        return {}
    return found


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file and remove a half-written last line; UsageError if a line is not a row."""
    try:
        data = read_file(path, "ROWS_MIB", is_raw=True)
        whole = data[: data.rfind(b"\n") + 1]
        rows = [json.loads(line) for line in whole.splitlines()]
        check(rows, [{"name": PLACE, "fixes": TEXT, "failure~": TEXT, "seconds": AMOUNT}])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError):
        raise UsageError(f"{path} is damaged. Choose another folder with -o to start again.") from None
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return rows


def _files(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["name"], f"{row['name']}.txt"

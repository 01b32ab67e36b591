"""The end of a process: its status and facts, and the recording of the first rank that becomes the run's own."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from stepscope.recorder import files
from stepscope.recorder.run_facts import now
from stepscope.recorder.wall import message


def ending(error: BaseException | None) -> tuple[str, dict[str, Any]]:
    """Return the status and the facts of a process that `error` ended; None if it ran to its end.

    >>> ending(SystemExit(3))[0], ending(SystemExit())[1]["exit_code"]
    ('failed', 0)
    """
    status, facts = files.STATUS_FINISHED, {"exit_code": 0, "finished_at": now()}
    if isinstance(error, KeyboardInterrupt):
        status, facts["exit_code"] = files.STATUS_INTERRUPTED, 130
    elif isinstance(error, SystemExit):
        code = error.code
        facts["exit_code"] = code if isinstance(code, int) else int(code is not None)
        status = files.STATUS_FAILED if facts["exit_code"] else files.STATUS_FINISHED
        if facts["exit_code"] and isinstance(error.__context__, KeyboardInterrupt):  # as Lightning ends on Ctrl-C
            status = files.STATUS_INTERRUPTED
    elif getattr(error, "sigval", None) == signal.SIGINT:  # as torchrun ends on Ctrl-C
        status, facts["exit_code"] = files.STATUS_INTERRUPTED, 1
    elif error is not None:
        status, facts["exit_code"] = files.STATUS_FAILED, 1
        facts["exception"] = f"{type(error).__name__}: {_in_one_line(message(error))}"[:500]
    processes = sys.modules.get("multiprocessing.process")
    # Written as count(4) before the fourth: taking a number would rename the script's next process.
    counter = repr(processes._process_counter) if processes else "count(1)"
    facts["num_child_processes"] = int(counter.strip("count()")) - 1
    return status, facts


def _in_one_line(text: str) -> str:
    """Return the text without its line breaks and ruled lines.

    >>> _in_one_line("=====\\ntrain.py FAILED\\n-----\\nRoot cause:  rank 1")
    'train.py FAILED Root cause: rank 1'
    """
    return " ".join(" ".join(line for line in text.splitlines() if line.strip(" =-")).split())


LOCK_FILE = ".adopting"
FROM_PARENT = ("exit_code", "exception", "finished_at", "num_child_processes")


def adopt(folder: Path, is_rank: bool = False) -> bool:
    """Move the recording of the lowest rank, else of the first process, up into `folder`; return whether it did.

    Nothing happens if the recording in `folder` has training steps of its own, or if no child process trained. The
    exit code and the failure of the process that was started first stay: they are the script's. If that process
    `is_rank`, one of several that a launcher started, then the folders of other ranks are not its children's.
    """
    own = _facts(folder)
    steps = own.get("steps") or {}
    if steps.get("num_steps") and steps.get("source") != "forward":
        return False
    child = _first_child(folder, files.PROCESS_FOLDER if is_rank else files.CHILD_FOLDER)
    if child is None or not _lock(folder):
        return False
    try:
        facts = _facts(child)
        if own.get("exit_code") is not None:
            facts.update({name: own[name] for name in FROM_PARENT if name in own})
            if own["status"] != files.STATUS_FINISHED:
                facts["status"] = own["status"]
        for name in files.OWN_NAMES:
            if name not in (files.RECORDING_FILE, *files.OF_ALL_RANKS):
                _remove(folder / name)
        for entry in child.iterdir():
            if entry.name != files.RECORDING_FILE:
                entry.replace(folder / entry.name)
        files.write_json(folder / files.RECORDING_FILE, facts)
        shutil.rmtree(child, ignore_errors=True)
        return True
    finally:
        _remove(folder / LOCK_FILE)


def _first_child(folder: Path, names: re.Pattern[str]) -> Path | None:
    """Return the folder of the lowest rank that has ended, else of the process that began first."""
    found = []
    for entry in folder.iterdir():
        if names.fullmatch(entry.name) and (facts := _facts(entry)):
            pid = int(facts.get("pid") or 0)
            if facts["status"] == files.STATUS_INTERRUPTED and pid not in (0, os.getpid()) and files.is_running(pid):
                continue
            rank = int(entry.name[4:]) if files.RANK_FOLDER.fullmatch(entry.name) else None
            has_steps = bool((facts.get("steps") or {}).get("num_steps"))
            found.append(((not has_steps, rank is None, rank or 0, pid), entry))
    return min(found)[1] if found else None


def _facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / files.RECORDING_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) and "status" in facts else {}


def _lock(folder: Path) -> bool:
    try:
        os.close(os.open(folder / LOCK_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        return False
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

"""Trains points under `stepscope run`, each in a fresh process; a row links to its recording."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stepscope.recorder.origin import now
from stepscope.sweep.grid import Point
from stepscope.sweep.protocol import CRASHED, OK, OOM, SKIPPED, TIMEOUT, Row
from stepscope.sweep.rerun import Failure, run_process
from stepscope.sweep.results import LOG_FOLDER
from stepscope.sweep.runner import identity

RECORDING_FOLDER = "recordings"
RECORDING = "recording"
PARENT_VARIABLE = "STEPSCOPE_ASKED_BY"
"""Environment variable with the id of the process that waits for a run; the run ends when that process does."""
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory", re.IGNORECASE)
_CANNOT_RUN = re.compile(r"CannotRun: (.*)")


def record_point(
    point: Point, folder: Path, options: Sequence[str], timeout_s: float, loop: Sequence[str] = ()
) -> Row:
    """Train a point under `stepscope run` until its last window ends and return its row without writing it.

    `options` go to `stepscope run`, `loop` to sweep/train.py.
    """
    name = f"{RECORDING_FOLDER}/{point.hash}"
    recording, log = folder / name, folder / LOG_FOLDER / f"{point.hash}.txt"
    shutil.rmtree(recording, ignore_errors=True)  # left by an interrupted run
    words = [sys.executable, "-m", "stepscope", "run", "-o", str(recording), "--quiet", "--exit-after"]
    batch, length = point.config.get("batch"), point.config.get("seq_len")
    if ":" not in point.workload and isinstance(batch, int) and isinstance(length, int):
        words += ["--tokens-per-step", str(batch * length)]  # `stepscope run` cannot infer it from floats
    words += options
    wanted = {name: identity(point)[name] for name in ("workload", "preset", "config", "run")}
    words += ["-m", "stepscope.sweep.train", json.dumps(wanted), *loop]
    started_at, began = now(), time.monotonic()
    failure = run_process(words, Path.cwd(), {**os.environ, PARENT_VARIABLE: str(os.getpid())}, log, timeout_s)
    try:
        facts = json.loads((recording / "recording.json").read_bytes())
    except (OSError, ValueError):
        facts = None
    environment = facts.get("environment") if isinstance(facts, dict) else None
    return {
        **identity(point),
        **_status(failure, log),
        RECORDING: name if (recording / "recording.json").is_file() else None,
        "environment": environment if isinstance(environment, dict) else None,
        "started_at": started_at,
        "finished_at": now(),
        "seconds": round(time.monotonic() - began, 3),
    }


def _status(failure: Failure | None, log: Path) -> Row:
    if failure is None:
        return {"status": OK, "reason": None}
    if failure.is_timeout:
        return {"status": TIMEOUT, "reason": failure.reason}
    output = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    cannot_run = _CANNOT_RUN.search(output)
    if cannot_run:
        return {"status": SKIPPED, "reason": cannot_run[1]}
    return {"status": OOM if _OUT_OF_MEMORY.search(output) else CRASHED, "reason": failure.reason}

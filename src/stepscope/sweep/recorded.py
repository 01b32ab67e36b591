"""Points trained under `stepscope run`, each in a fresh process: a row for each, with the recording it left."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.recorder.origin import now
from stepscope.sweep.grid import Point
from stepscope.sweep.point_process import CRASHED, OK, OOM, SKIPPED
from stepscope.sweep.rerun import Failure, run_process
from stepscope.sweep.results import LOG_FOLDER
from stepscope.sweep.rows import TIMEOUT, identity

RECORDING_FOLDER = "recordings"
RECORDING = "recording"
ASKED_BY = "STEPSCOPE_ASKED_BY"
"""The variable that says which process waits for a run: without it a run ends."""
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory", re.IGNORECASE)
_CANNOT_RUN = re.compile(r"CannotRun: (.*)")


def record_point(
    point: Point, folder: Path, options: Sequence[str], timeout_s: float, loop: Sequence[str] = ()
) -> dict[str, Any]:
    """Train a point under `stepscope run` until its last window is over; its row, not yet written anywhere.

    `options` are those of `stepscope run`, `loop` those of sweep/train.py.
    """
    name = f"{RECORDING_FOLDER}/{point.hash}"
    recording, log = folder / name, folder / LOG_FOLDER / f"{point.hash}.txt"
    shutil.rmtree(recording, ignore_errors=True)  # what a kill left half done
    asked = {"workload": point.workload, "preset": point.preset, "config": dict(point.config), "run": dict(point.run)}
    words = [sys.executable, "-m", "stepscope", "run", "-o", str(recording), "--quiet", "--exit-after"]
    words += [*_tokens(point), *options]
    words += ["-m", "stepscope.sweep.train", json.dumps(asked), *loop]
    started_at, began = now(), time.monotonic()
    failure = run_process(words, Path.cwd(), {**os.environ, ASKED_BY: str(os.getpid())}, log, timeout_s)
    has_left = (recording / "recording.json").is_file()
    return {
        **identity(point),
        **_status(failure, log),
        RECORDING: name if has_left else None,
        "environment": _environment(recording) if has_left else None,
        "started_at": started_at,
        "finished_at": now(),
        "seconds": round(time.monotonic() - began, 3),
    }


def _tokens(point: Point) -> list[str]:
    """How many tokens a step of a workload of ours has: of a batch of floats `stepscope run` cannot tell."""
    batch, length = point.config.get("batch"), point.config.get("seq_len")
    if ":" in point.workload or not isinstance(batch, int) or not isinstance(length, int):
        return []
    return ["--tokens-per-step", str(batch * length)]


def _status(failure: Failure | None, log: Path) -> dict[str, Any]:
    if failure is None:
        return {"status": OK, "reason": None}
    if failure.is_timeout:
        return {"status": TIMEOUT, "reason": failure.reason}
    said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    refused = _CANNOT_RUN.search(said)
    if refused:
        return {"status": SKIPPED, "reason": refused[1]}
    return {"status": OOM if _OUT_OF_MEMORY.search(said) else CRASHED, "reason": failure.reason}


def _environment(recording: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((recording / "recording.json").read_bytes()).get("environment")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, dict) else None

"""The first facts of a recording: the command, its options and the git revision."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.recorder.windows import Windows

if TYPE_CHECKING:
    from stepscope.recorder.loop import Loop

JOB_VARIABLES = ("STEPSCOPE_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")


def run_facts(
    argv: list[str], windows: Windows, tokens_per_step: int | None, script_folder: Path, **command: Any
) -> dict[str, Any]:
    """Return the first facts of a recording as JSON values. `command` adds to the command's facts."""
    config = {"argv": argv, "windows": windows.counts(), "tokens_per_step": tokens_per_step}
    return {
        "command": {"argv": argv, "folder": str(Path.cwd()), **command},
        "config": config,
        "config_hash": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16],
        "git": git_revision(script_folder),
        "started_at": now(),
        **({"job": job} if (job := job_id()) else {}),
    }


def loop_facts(loop: Loop, num_steps: int, num_dropped: int) -> dict[str, Any]:
    """Return what `recording.json` says about the loop: where its steps end, and what lies between them."""
    finder = loop.finder
    steps = {
        **{name: getattr(finder, name) for name in ("source", "num_sources", "num_earlier")},
        "num_steps": num_steps,
        "num_prefetched": loop.num_prefetched,
        "num_lines_dropped": num_dropped,
    }
    return {"steps": steps, "between": {kind: dict(places) for kind, places in loop.between.places.items()}}


def job_id() -> str | None:
    """Return what recordings of one job have in common when it is restarted; None if nothing says it."""
    for name in JOB_VARIABLES:
        if value := os.environ.get(name):
            return value if name == JOB_VARIABLES[0] else f"{name}={value}"
    return None


def file_hash(path: Path) -> str | None:
    """Return the SHA-256 of a file in hexadecimal, or None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def now() -> str:
    """Return the current time as ISO 8601, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def git_revision(folder: Path) -> dict[str, Any] | None:
    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = git("rev-parse", "HEAD")
    return {"revision": revision, "modified": bool(git("status", "--porcelain", "-uno"))} if revision else None

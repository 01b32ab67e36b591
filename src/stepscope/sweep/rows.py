"""From how a point's process ended and what it left behind to its row."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from stepscope.recorder.origin import now
from stepscope.sweep.grid import Point
from stepscope.sweep.point_process import CRASHED, OOM, Request
from stepscope.sweep.results import SCHEMA_VERSION
from stepscope.sweep.server import Ending

TIMEOUT = "timeout"
STATUSES = ("ok", "oom", "crashed", "timeout", "wrong", "unproven", "skipped")


def identity(point: Point) -> dict[str, Any]:
    """What every row of a point begins with."""
    return {
        "schema_version": SCHEMA_VERSION,
        "hash": point.hash,
        "workload": point.workload,
        "preset": point.preset,
        "config": dict(point.config),
        "run": dict(point.run),
    }


def row_of(point: Point, request: Request, ending: Ending, started_at: str) -> dict[str, Any]:
    """The row of a point that has ended, whichever way."""
    fields = _left_behind(Path(request.result_path))
    if ending.timed_out:
        fields.update(status=TIMEOUT, reason=f"killed after {request.timeout_s:g} s in stage {_stage(fields)}")
    elif ending.exit_code:
        fields.update(_fate(ending, request, _stage(fields)))
    elif "status" not in fields:
        fields.update(status=CRASHED, exit_code=0, reason=f"it ended by itself in stage {_stage(fields)}")
    if fields["status"] == OOM:
        fields["reason"] = _oom_reason(fields)
    status, reason = fields.pop("status"), fields.pop("reason", None)
    return {
        **identity(point),
        "status": status,
        "reason": reason,
        **fields,
        "started_at": started_at,
        "finished_at": now(),
        "seconds": round(ending.seconds, 3),
    }


def _left_behind(path: Path) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(path.read_bytes())
        path.unlink()
    except (OSError, ValueError):
        fields = {"notes": []}
    return fields


def _stage(fields: dict[str, Any]) -> str:
    return str(fields.get("stage", "start"))


def _fate(ending: Ending, request: Request, stage: str) -> dict[str, Any]:
    code = ending.exit_code
    if code == -signal.SIGKILL and ending.memory_kill:
        lost = {"asked_bytes": None, "free_bytes": 0, "total_bytes": None}
        return {"status": OOM, "oom": lost, "reason": "the kernel killed it for want of memory", "signal": "SIGKILL"}
    last = _last_words(Path(request.log_path))
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return {"status": CRASHED, "signal": name, "reason": f"{name} in stage {stage}{last}"}
    return {"status": CRASHED, "exit_code": code, "reason": f"exit code {code} in stage {stage}{last}"}


def _oom_reason(fields: dict[str, Any]) -> str:
    facts = fields.get("oom", {})
    asked, free, total = (facts.get(name) for name in ("asked_bytes", "free_bytes", "total_bytes"))
    if asked is None and total is None:
        return str(fields.get("reason"))
    text = f"asked for {_gib(asked)}" if asked is not None else "asked for an amount that was not said"
    if free is not None:
        text += f" where {_gib(free)}" + (f" of {_gib(total)}" if total is not None else "") + " was free"
    elif total is not None:
        text += f" more than there is of the {_gib(total)} it may have"
    return f"{text}, in stage {_stage(fields)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):,.2f} GiB"


def _last_words(log: Path) -> str:
    """The line of a point's output that says most about its end."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    if any(line.startswith("Fatal Python error") for line in lines):
        places = [line.strip() for line in lines if line.startswith('  File "')]
        theirs = [place for place in places if "/lib/python" not in place]  # innermost first
        return f", {(theirs or places or [''])[0]}".rstrip(", ")
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1][:300]}" if said else ""

"""Builds a point's row from how its process ended and what it left behind."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepscope.formatting import size
from stepscope.recorder.origin import now
from stepscope.sweep.grid import Point
from stepscope.sweep.protocol import CRASHED, OOM, TIMEOUT, Request, Row
from stepscope.sweep.results import SCHEMA_VERSION
from stepscope.sweep.server import Ending, Server


def identity(point: Point) -> Row:
    """Return the first fields of every row of a point."""
    return {
        "schema_version": SCHEMA_VERSION,
        "hash": point.hash,
        "workload": point.workload,
        "preset": point.preset,
        "config": dict(point.config),
        "run": dict(point.run),
    }


def measured_row(point: Point, server: Server, folder: Path, log: Path, **options: Any) -> Row:
    """Run a point in its own process and return its row, however it ended. `options` are those of the request."""
    request = Request(
        workload=point.workload,
        preset=point.preset,
        config=dict(point.config),
        run=dict(point.run),
        result_path=str(folder / f".{point.hash}.json"),
        log_path=str(log),
        **options,
    )
    started_at = now()
    ending = server.run(request)
    fields: Row = {"notes": []}
    with suppress(OSError, ValueError):
        fields = json.loads(Path(request.result_path).read_bytes())
        Path(request.result_path).unlink()
    if ending.timed_out:
        fields.update(status=TIMEOUT, reason=f"killed after {request.timeout_s:g} s in stage {_stage(fields)}")
    elif ending.exit_code:
        fields.update(_failure(ending, request, _stage(fields)))
    elif "status" not in fields:
        fields.update(status=CRASHED, exit_code=0, reason=f"the process exited by itself in stage {_stage(fields)}")
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


def _stage(fields: Row) -> str:
    return str(fields.get("stage", "start"))


def _failure(ending: Ending, request: Request, stage: str) -> Row:
    code = ending.exit_code
    if code == -signal.SIGKILL and ending.memory_kill:
        lost = {"asked_bytes": None, "free_bytes": 0, "total_bytes": None}
        reason = "the kernel killed it because the machine ran out of memory"
        return {"status": OOM, "oom": lost, "reason": reason, "signal": "SIGKILL"}
    last = _last_line(Path(request.log_path))
    if code >= 0:
        return {"status": CRASHED, "exit_code": code, "reason": f"exit code {code} in stage {stage}{last}"}
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return {"status": CRASHED, "signal": name, "reason": f"{name} in stage {stage}{last}"}


def _oom_reason(fields: Row) -> str:
    facts = fields.get("oom", {})
    asked, free, total = (facts.get(name) for name in ("asked_bytes", "free_bytes", "total_bytes"))
    if asked is None and total is None:
        return str(fields.get("reason"))
    text = f"needed {size(asked)}" if asked is not None else "needed an unknown amount of memory"
    if free is not None:
        text += f" with {size(free)}" + (f" of {size(total)}" if total is not None else "") + " free"
    elif total is not None:
        text += f" more within its limit of {size(total)}"
    return f"{text}, in stage {_stage(fields)}"


def _last_line(log: Path) -> str:
    """Return the line of a point's output that best explains its end."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    if any(line.startswith("Fatal Python error") for line in lines):
        places = [line.strip() for line in lines if line.startswith('  File "')]
        own = [place for place in places if "/lib/python" not in place]  # innermost first
        return f", {(own or places or [''])[0]}".rstrip(", ")
    printed = [line.strip() for line in lines if line.strip()]
    return f": {printed[-1][:300]}" if printed else ""

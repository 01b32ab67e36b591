"""Requests for windows: files in a run's folder, written by `stepscope trigger` or by rank 0, answered by each rank.

    control/request1.json          {"step": 1200, "trace": 3, "clean": 6, "memory": false, "stacks": false, …}
    control/request1.rank0.json    {"state": "armed", "step": 1163, "first": 1200, …}
    control/when1.json             {"when": "step_time > 1.5x", "limit": 3, "trace": 3, …}

A request without a `step` asks where each rank is. Needs only the standard library.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.recorder.files import CONTROL_FOLDER
from stepscope.recorder.history.conditions import parse

SEEN, ARMED, LATE, RUNNING, DONE, WITHDRAWN, REFUSED = (
    *("seen", "armed", "late", "running", "done"),
    *("withdrawn", "refused"),
)
MOST_TRACED = 200  # a trace is in memory until it is written: of 1,000 steps it can be GiB
MOST_CLEAN = 10_000
WARMUP_STEPS = 1
_NAME = re.compile(r"(request|when)(\d+)\.json")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a window should record: after a warm-up step, timed steps, traced ones, and one for its allocations."""

    clean: int = 6
    trace: int = 3
    memory: bool = False  # with the source line of every allocation
    stacks: bool = False  # Python stacks in the trace

    @property
    def num_steps(self) -> int:
        return WARMUP_STEPS + self.clean + (self.trace + 1 if self.trace else 0) + self.memory


@dataclass(frozen=True, kw_only=True)
class Request(Wanted):
    """A window that is asked for; of which step, once all ranks have said where they are."""

    number: int
    step: int | None = None
    reason: str = "trigger"
    is_withdrawn: bool = False

    @property
    def folder(self) -> str:
        return f"window{self.number}"


@dataclass(frozen=True, kw_only=True)
class Standing(Wanted):
    """A condition under which windows are taken, at most `limit` times."""

    number: int
    when: str
    limit: int = 3


def checked(**wanted: Any) -> dict[str, Any]:
    """Return what a window should record; ValueError that says what is wrong with it."""
    for name, most in (("trace", MOST_TRACED), ("clean", MOST_CLEAN)):
        if not 0 <= wanted[name] <= most:
            raise ValueError(f"{name} is {wanted[name]}: it must be between 0 and {most:,}")
    if not (wanted["trace"] or wanted["clean"] or wanted["memory"]):
        raise ValueError("the window would be empty: ask for traced steps, timed steps or memory")
    if wanted["stacks"] and not wanted["trace"]:
        raise ValueError("stacks are part of a trace: ask for traced steps too")
    return wanted


def read_requests(run: Path) -> list[Request | Standing]:
    """Return the requests in a run's folder, in order; without those that cannot be read."""
    found: list[Request | Standing] = []
    try:
        names = sorted(os.listdir(run / CONTROL_FOLDER))  # noqa: PTH208  (names only, of a folder that others write)
    except OSError:
        return []
    for name in names:
        if (match := _NAME.fullmatch(name)) and (written := read_object(run / CONTROL_FOLDER / name)) is not None:
            kind: Any = Request if match[1] == "request" else Standing
            try:
                found.append(_checked(kind, {**written, "number": int(match[2])}))
            except (TypeError, ValueError):
                continue
    return sorted(found, key=lambda each: each.number)


def _checked(kind: Any, written: dict[str, Any]) -> Any:
    fields = {name: value for name, value in written.items() if name in kind.__dataclass_fields__}
    types: dict[str, Any] = {"step": (int, type(None)), "reason": str, "when": str, "memory": bool, "stacks": bool}
    for name, value in fields.items():
        if not isinstance(value, types.get(name, bool if name == "is_withdrawn" else int)):
            raise TypeError(name)
        if isinstance(value, int) and not 0 <= value < 2**63:
            raise ValueError(name)
    found = kind(**fields)
    if found.trace > MOST_TRACED or found.clean > MOST_CLEAN or found.num_steps == WARMUP_STEPS:
        raise ValueError("a window of that size")
    if kind is Standing:
        parse(found.when)
    return found


def read_object(path: Path) -> dict[str, Any] | None:
    """Return a JSON object of at most 1 MiB; None if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = json.loads(os.read(descriptor, 1 << 20))
        finally:
            os.close(descriptor)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def create(run: Path, kind: str, values: dict[str, Any]) -> int:
    """Write a new request (`request` or `when`) and return its number. Two processes never get the same one."""
    folder = run / CONTROL_FOLDER
    folder.mkdir(exist_ok=True)
    temporary = folder / f".new-{os.getpid()}-{id(values)}"
    temporary.write_text(json.dumps(values))
    try:
        matches = [_NAME.fullmatch(path.name) for path in folder.iterdir()]
        number = 1 + max((int(match[2]) for match in matches if match and match[1] == kind), default=0)
        while True:
            try:
                os.link(temporary, folder / f"{kind}{number}.json")
                return number
            except FileExistsError:
                number += 1
    finally:
        temporary.unlink()


def replace(path: Path, values: dict[str, Any]) -> None:
    """Write an object atomically, in place of what is there."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(json.dumps(values))
    temporary.replace(path)


def request_file(run: Path, number: int, rank: str = "") -> Path:
    """Return the file of a request, or of a rank's answer to it."""
    return run / CONTROL_FOLDER / (f"request{number}.{rank}.json" if rank else f"request{number}.json")


def margin_steps(step_ns: int, seconds: float) -> int:
    """Return how many steps later a window should begin so that every rank has seen the request by then."""
    return max(2, round(seconds * 1e9 / max(1, step_ns)))


def is_far(num_steps: int, pace_s: float, seconds: float) -> bool:
    """Return whether a window that was meant to begin in so many seconds is far more away at the pace of now."""
    return num_steps > 2 and num_steps * pace_s > 3 * seconds

"""What a sweep runs and where its rows go: the workload, the points of a grid, the folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import UsageError
from stepscope.sweep.grid import Axes, Grid, Point, read_grids
from stepscope.sweep.memory import parse_bytes
from stepscope.sweep.results import Results
from stepscope.version import __version__
from stepscope.workloads.registry import find
from stepscope.workloads.users_code import users_code
from stepscope.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the rows of a sweep are written."""

    folder: Path
    command: str
    """What started the sweep; sweep.json keeps it."""
    resume: bool = False
    """Whether to continue a sweep that was interrupted."""
    resume_command: str
    """What a user runs to continue it."""

    def open(self, **facts: Any) -> Results:
        """Return the open folder; `facts` are further keys of sweep.json."""
        known = {"command": self.command, "working_folder": str(Path.cwd()), "stepscope": __version__}
        return Results(self.folder, {**known, **facts}, self.resume, self.resume_command)


def find_workload(name: str) -> Workload[Any]:
    """Return a workload by name, config or factory; an error in a user's file becomes a UsageError."""
    with users_code():
        return find(name)


def grid_points(
    workload: Workload[Any], axes: Axes, grid: str | None = None, paired: bool = False, **defaults: Any
) -> list[Point]:
    """Return the points of some axes, or of every grid in a file, on this machine's device if none is named."""
    if "device" not in axes:
        defaults["device"] = default_device()
    made = Grid(workload, defaults)
    if grid is None:
        return made.points([axes], paired)
    with users_code():
        grids, is_paired = read_grids(grid)
    points = made.points([{**axes, **listed} for listed in grids], is_paired or paired)
    if not points:
        raise UsageError(f"{grid} has no points")
    return points


def default_device() -> str:
    """Return the device that points run on by default: cuda if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def default_folder(verb: str, workload: str) -> Path:
    """Return the folder of a sweep that was given none."""
    name = "".join(c if c.isalnum() else "-" for c in Path(workload).name)
    return Path("runs") / f"{verb}-{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def bytes_of(memory: str | int | None) -> int | None:
    """Return an amount of memory in bytes; UsageError if it is not one."""
    if memory is None:
        return None
    try:
        return parse_bytes(str(memory))
    except ValueError as error:
        raise UsageError(str(error)) from None

"""A run that goes on, update by update."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.findings.run_status import RunStatus, WatchedRun

PathLike = str | os.PathLike[str]


def watch(path: PathLike | None = None, *, num_steps: int | None = None, every_s: float = 2.0) -> Iterator[RunStatus]:
    """Return an iterator over the states of a run that goes on, one every `every_s` seconds until the run ends.

    Without a path, it is the latest run. `num_steps` is how many steps the run will have in total, if its trainer did
    not say so: then `.left_s` is known. `next(watch(path))` is the run now.

    >>> for status in watch("runs/train-20260101-120000"):  # doctest: +SKIP
    ...     print(status.num_steps, status.per_s)
    """
    run = watched(path, num_steps)
    while True:
        status = run.status()
        yield status
        if status.is_over:
            return
        time.sleep(every_s)


def watched(path: PathLike | None, num_steps: int | None = None) -> WatchedRun:
    """Return what follows a run; UsageError if the path is not a recording."""
    from stepscope.session import Kind, open_session

    session = open_session(path)
    if session.kind is not Kind.RECORDING:
        raise UsageError(f"{session.path} is a {session.kind.value}: watch takes the folder of a run")
    from stepscope.findings.run_status import WatchedRun

    return WatchedRun(session.path, num_steps)

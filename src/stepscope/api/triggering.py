"""`trigger`: take a window from a job that is running."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def trigger(
    run: str | os.PathLike[str],
    *,
    trace: int = 3,
    clean: int = 6,
    memory: bool = False,
    stacks: bool = False,
    when: str | None = None,
    limit: int = 3,
    tell: Callable[[str], None] = lambda line: None,
) -> Path | None:
    """Return the folder of a window taken from a running job: a recording of its own, with a trace.

    The job was started with `stepscope run` or `record`, and `run` is its folder. All ranks begin at the same step:
    one warm-up step, `clean` timed steps, `trace` traced ones (with Python stacks if `stacks`), and with `memory` one
    that records the source line of every allocation. With `when`, such as `"step_time > 1.5x"`, the job takes windows
    by itself, at most `limit`; then this returns None at once. `tell` gets lines about the progress.

    >>> trigger("runs/train", trace=3)  # doctest: +SKIP
    PosixPath('runs/train/window1')
    """
    from stepscope.api.trigger_request import take_window

    wanted = {"trace": trace, "clean": clean, "memory": memory, "stacks": stacks}
    return take_window(Path(run), wanted, when, limit, tell)

"""Functions that log to experiment trackers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.api.reading import PathLike, report

if TYPE_CHECKING:
    from stepscope.session import Session


def log(path: PathLike | None, to: str) -> int:
    """Return the number of runs that were logged: a recording, or the points of a sweep or study, and the whole.

    `to` is `mlflow`, `wandb`, `tensorboard` or `trackio`, with `:` and a tracking URI, project or folder if you like.
    docs/trackers.md defines the metrics. Without a path, it is the latest run.

    >>> log("runs/train-20260101-120000", "tensorboard:logs")  # doctest: +SKIP
    1
    """
    from stepscope.session import need_read_side, open_session
    from stepscope.trackers.tracker import Target

    target = Target.of(to)
    need_read_side()
    from stepscope.trackers.log import log_session

    return log_session(open_session(path), target, _write_report)


def follow_recording(folder: Path, to: Sequence[str], rank: int) -> None:
    """Return after the run has ended; log it until then."""
    from stepscope.trackers.follow import follow
    from stepscope.trackers.tracker import Target

    follow(folder, [Target.of(name) for name in to], rank, _write_report)


def _write_report(session: Session, target: Path) -> Path:
    report(session.path, output=target, force=True)
    return target

"""Weights & Biases: a run in a project; offline with WANDB_MODE=offline."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.trackers.tracker import Point, Run, Tracker

PROJECT = "stepscope"
STEP = "stepscope/step"


def open_run(where: str | None, run: Run) -> WandB:
    """Return a run in a project, by default WANDB_PROJECT or `stepscope`."""
    import wandb

    # What runs here is not the training: its console and its use of the machine say nothing.
    settings = wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True)
    opened = wandb.init(
        project=where or os.environ.get("WANDB_PROJECT") or PROJECT,
        name=run.name,
        group=run.group,
        config=dict(run.parameters),
        settings=settings,
        reinit="create_new",
    )
    opened.define_metric(STEP, hidden=True)
    opened.define_metric("stepscope/*", step_metric=STEP)
    return WandB(opened)


class WandB(Tracker):
    """One run of Weights & Biases."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({**point.values, STEP: point.step, "_timestamp": point.time_s})

    def summarize(self, values: Mapping[str, Any], text: str) -> None:
        self._run.summary.update({**values, "stepscope/card": text})

    def add_table(self, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        import wandb

        columns = list(rows[0]) if rows else ["none"]
        self._run.log({f"stepscope/{name}": wandb.Table(columns=columns, data=[list(row.values()) for row in rows])})

    def add_file(self, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"{self._run.id}-{path.name.split('.')[0]}", type="stepscope")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()

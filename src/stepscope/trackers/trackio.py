"""trackio: a run in its local database, or in a Space that TRACKIO_SPACE_ID names."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stepscope.trackers.tracker import Point, Run, Tracker

PROJECT = "stepscope"


def open_run(where: str | None, run: Run) -> Trackio:
    """Return a run in a project, by default `stepscope`."""
    import trackio

    opened = trackio.init(
        project=where or PROJECT,
        name=run.name,
        group=run.group,
        config=dict(run.parameters),
        embed=False,
        auto_log_gpu=False,  # what runs here is not the training
        auto_log_cpu=False,
    )
    return Trackio(opened)


class Trackio(Tracker):
    """One run of trackio."""

    def __init__(self, run: Any) -> None:
        self._run, self._last_step = run, 0

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.step)
            self._last_step = point.step

    def summarize(self, values: Mapping[str, Any], text: str) -> None:
        import trackio

        self._run.log({"stepscope/card": trackio.Markdown(f"```\n{text}\n```")}, step=self._last_step)

    def add_table(self, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        import trackio

        self._run.log({f"stepscope/{name}": trackio.Table(data=[dict(row) for row in rows])}, step=self._last_step)

    def add_file(self, path: Path) -> None:
        import trackio

        with TemporaryDirectory(prefix="stepscope-") as folder:  # files belong to the project: name the run too
            copy = Path(folder) / f"{self._run.name}-{path.name}".replace("/", "_")
            shutil.copy(path, copy)
            trackio.save(escape(str(copy)), project=self._run.project)

    def close(self) -> None:
        self._run.finish()

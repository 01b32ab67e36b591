"""A file for the textfile collector of Prometheus's node_exporter: the current figures of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepscope.errors import UsageError
from stepscope.trackers.figures import FIGURES, OF_STEPS, PREFIX
from stepscope.trackers.tracker import Point, Run, Tracker

RUNNING = "running"
HELP = {**FIGURES, RUNNING: "1 while the script runs, 0 after its end."}


def open_run(where: str | None, run: Run) -> Prometheus:
    """Return a run in a file."""
    if where is None:
        raise UsageError("the file for Prometheus has no name: write prometheus:PATH")
    return Prometheus(Path(where), {"run": run.name, "rank": str(run.rank)})


class Prometheus(Tracker):
    """One file. It is replaced as a whole, so the collector never reads half of it."""

    def __init__(self, path: Path, labels: Mapping[str, str]) -> None:
        self._path = path
        self._labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        self._values: dict[str, float] = {PREFIX + RUNNING: 1}
        self._write()

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._values.update({k: v for k, v in point.values.items() if not k.startswith(OF_STEPS)})
        self._write()

    def close(self) -> None:
        self._values[PREFIX + RUNNING] = 0
        self._write()

    def _write(self) -> None:
        lines = []
        for name, value in self._values.items():
            metric = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            about = HELP.get(name.removeprefix(PREFIX), name).replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {metric} {about}", f"# TYPE {metric} gauge", f"{metric}{{{self._labels}}} {value!r}"]
        # Not *.prom: the collector skips it.
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        temporary.chmod(0o644)  # the collector runs as another user
        temporary.replace(self._path)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

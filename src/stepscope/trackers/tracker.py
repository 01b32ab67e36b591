"""What a tracker must be able to do, the trackers there are, and how one is named: `tensorboard:DIR`."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.errors import MissingDependencyError, UsageError

# Each has a module of its name, whose `open_run` returns a Tracker, and an extra of its name that installs this.
PACKAGES = {
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "trackio": "trackio",
    "otlp": "opentelemetry.exporter.otlp.proto.http",
    "prometheus": None,
}
TRACKERS = ("mlflow", "wandb", "tensorboard", "trackio")
"""Those that keep runs. The others show the current figures of a run."""


@dataclass(frozen=True)
class Run:
    """A run as a tracker shows it."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None  # the sweep or study that it is part of
    rank: int = 0


@dataclass(frozen=True)
class Point:
    """Metrics by name at a step."""

    step: int
    time_s: float  # since 1970
    values: Mapping[str, float]


class Tracker(ABC):
    """One run that is being logged. A tracker without a place for a card, tables or files leaves them out."""

    @abstractmethod
    def log(self, points: Sequence[Point]) -> None:
        """Add points to the series."""

    def summarize(self, values: Mapping[str, Any], text: str) -> None:  # noqa: B027
        """Set the figures of the whole run, and its card as text."""

    def add_table(self, name: str, rows: Sequence[Mapping[str, str]]) -> None:  # noqa: B027
        """Add a table; all rows have the same columns."""

    def add_file(self, path: Path) -> None:  # noqa: B027
        """Add a file as an artifact."""

    @abstractmethod
    def close(self) -> None:
        """End the run and send what waits."""


@dataclass(frozen=True)
class Target:
    """Where to log: a tracker, and a folder, address or project in it.

    >>> Target.of("mlflow:sqlite:///runs.db")
    Target(tracker='mlflow', where='sqlite:///runs.db')
    """

    tracker: str
    where: str | None

    @classmethod
    def of(cls, text: str, known: Collection[str] = tuple(PACKAGES)) -> Target:
        """Return the target with this name. MissingDependencyError if its package is not installed."""
        tracker, _, where = text.partition(":")
        if tracker not in known:
            raise UsageError(f"{tracker!r} is not a tracker: choose one of {', '.join(TRACKERS)}")
        if not _is_installed(PACKAGES[tracker]):
            raise MissingDependencyError(f"{tracker} is not installed: pip install 'stepscope[{tracker}]'")
        return cls(tracker, where or None)

    def __str__(self) -> str:
        return self.tracker if self.where is None else f"{self.tracker}:{self.where}"

    def open_run(self, run: Run) -> Tracker:
        """Return a new run in this tracker."""
        module = importlib.import_module(f"stepscope.trackers.{self.tracker}")
        opened: Tracker = module.open_run(self.where, run)
        return opened


def _is_installed(package: str | None) -> bool:
    try:
        return package is None or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package that contains it
        return False

"""MLflow: a run in the tracking server or store that MLflow is set to use."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from stepscope.errors import UsageError
from stepscope.trackers.tracker import Point, Run, Tracker

EXPERIMENT = "stepscope"
SQLITE = "sqlite:///"
MOST_METRICS, MOST_PARAMETERS, MOST_CHARACTERS = 1000, 100, 500  # of one request; of a parameter


def open_run(where: str | None, run: Run) -> MLflow:
    """Return a run in a tracking URI, by default MLflow's own, in the experiment MLFLOW_EXPERIMENT_NAME."""
    # A server that does not answer would otherwise be asked for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
    from mlflow.tracking import MlflowClient, get_tracking_uri

    _check_database(where or get_tracking_uri())
    client = MlflowClient(tracking_uri=where)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    experiment = client.get_experiment_by_name(name)
    run_id = client.create_run(
        experiment.experiment_id if experiment is not None else client.create_experiment(name),
        run_name=run.name,
        tags={"stepscope.group": run.group} if run.group else {},
    ).info.run_id
    return MLflow(client, run_id, run)


def _check_database(uri: str) -> None:
    """Raise UsageError if a file of SQLite cannot be opened: MLflow would try again for minutes."""
    path = uri.removeprefix(SQLITE).partition("?")[0]
    if not uri.startswith(SQLITE) or path in ("", ":memory:"):
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)  # as MLflow does
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA schema_version")
    except (OSError, sqlite3.Error) as error:
        raise UsageError(f"MLflow's database {path} cannot be opened: {error}. Name another file") from None


class MLflow(Tracker):
    """One run of MLflow."""

    def __init__(self, client: Any, run_id: str, run: Run) -> None:
        from mlflow.entities import Param

        self._client, self._run_id = client, run_id
        found = [Param(name, str(value)[:MOST_CHARACTERS]) for name, value in run.parameters.items()]
        for start in range(0, len(found), MOST_PARAMETERS):
            client.log_batch(run_id, params=found[start : start + MOST_PARAMETERS])

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), round(point.time_s * 1e3), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MOST_METRICS])

    def summarize(self, values: Mapping[str, Any], text: str) -> None:
        self._client.log_dict(self._run_id, dict(values), "card.json")
        self._client.log_text(self._run_id, text, "card.txt")
        # Shown at the top of the run's page.
        self._client.set_tag(self._run_id, "mlflow.note.content", f"```\n{text}\n```")

    def add_table(self, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        table = {"columns": list(rows[0]) if rows else [], "data": [list(row.values()) for row in rows]}
        self._client.log_dict(self._run_id, table, f"{name}.json")

    def add_file(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

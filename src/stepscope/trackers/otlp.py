"""OpenTelemetry: the current figures of a run, through the standard exporter of OTLP over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.trackers.figures import FIGURES, OF_STEPS, PREFIX
from stepscope.trackers.tracker import Point, Run
from stepscope.version import __version__

TIMEOUT_S = 10


def open_run(where: str | None, run: Run) -> Otlp:
    """Return a run at an endpoint, by default that of the OTEL_EXPORTER_OTLP_… variables."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return Otlp(OTLPMetricExporter(endpoint=where, timeout=TIMEOUT_S), run)


class Otlp:
    """One run as gauges, pushed whenever there are new figures."""

    def __init__(self, exporter: Any, run: Run) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=float("inf"))
        resource = Resource.create(
            {"service.name": "stepscope", "stepscope.run": run.name, "stepscope.rank": run.rank}
        )
        self._provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("stepscope", __version__)
        self._gauges: dict[str, Any] = {}

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                if name.startswith(OF_STEPS):
                    continue
                if name not in self._gauges:
                    about = FIGURES.get(name.removeprefix(PREFIX), "")
                    self._gauges[name] = self._meter.create_gauge(name.replace("/", "."), description=about)
                self._gauges[name].set(value)
        if not self._provider.force_flush(TIMEOUT_S * 1000):
            raise ConnectionError("the collector did not accept the metrics")

    def summarize(self, values: Mapping[str, Any], text: str) -> None:
        """Nothing: the figures are there already."""

    def add_table(self, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Nothing: OpenTelemetry gets metrics only."""

    def add_file(self, path: Path) -> None:
        """Nothing: OpenTelemetry gets metrics only."""

    def close(self) -> None:
        self._provider.shutdown()

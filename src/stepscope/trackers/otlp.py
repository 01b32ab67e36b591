"""OpenTelemetry: the current figures of a run, through the standard exporter of OTLP over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.trackers.figures import FIGURES, OF_STEPS, PREFIX
from stepscope.trackers.tracker import Point, Run, Tracker
from stepscope.version import __version__


def open_run(where: str | None, run: Run) -> Otlp:
    """Return a run at an endpoint, by default that of the OTEL_EXPORTER_OTLP_… variables."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return Otlp(OTLPMetricExporter(endpoint=where), run)


class Otlp(Tracker):
    """One run as gauges, pushed whenever there are new figures."""

    def __init__(self, exporter: Any, run: Run) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource

        # Exported by hand: a periodic reader logs that a collector is down, and does not tell.
        self._exporter, self._reader = exporter, InMemoryMetricReader()
        names = {"service.name": "stepscope", "stepscope.run": run.name, "stepscope.rank": run.rank}
        self._provider = MeterProvider([self._reader], resource=Resource.create(names), shutdown_on_exit=False)
        self._meter = self._provider.get_meter("stepscope", __version__)
        self._gauges: dict[str, Any] = {}

    def log(self, points: Sequence[Point]) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        for point in points:
            for name, value in point.values.items():
                if name.startswith(OF_STEPS):
                    continue
                if name not in self._gauges:
                    about = FIGURES.get(name.removeprefix(PREFIX), "")
                    self._gauges[name] = self._meter.create_gauge(name.replace("/", "."), description=about)
                self._gauges[name].set(value)
        data = self._reader.get_metrics_data()
        if data is not None and self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise ConnectionError("the collector did not accept the metrics")

    def close(self) -> None:
        self._provider.shutdown()
        self._exporter.shutdown()

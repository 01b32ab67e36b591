"""Runs, sweeps and studies in experiment trackers, Prometheus and OpenTelemetry: while they run, and afterwards."""

"""The figures of a recording while it runs."""

from stepscope.recorder.live.metrics import live_metrics as live_metrics

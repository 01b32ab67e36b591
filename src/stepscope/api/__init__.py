"""The functions of the Python interface. Importing them is free: each imports what it needs when it is called."""

from stepscope.api.improvement import improve
from stepscope.api.reading import analyze, compare, diagnose, export, hang, read, report, sql, what_if
from stepscope.api.recording import Recorder, audit, configure_precision, phase, record, step
from stepscope.api.sweeps import bench, plan
from stepscope.api.tracking import log
from stepscope.api.triggering import trigger
from stepscope.api.tuning import tune
from stepscope.api.verification import verify
from stepscope.api.watching import watch

__all__ = [
    "Recorder", "analyze", "audit", "bench", "compare", "configure_precision", "diagnose", "export", "hang",
    "improve", "log", "phase", "plan", "read", "record", "report", "sql", "step", "trigger", "tune", "verify",
    "watch",
    "what_if",
]  # fmt: skip

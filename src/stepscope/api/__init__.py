"""The functions of the Python interface. Importing them is free: each imports what it needs when it is called."""

from __future__ import annotations

from stepscope.api.files import export, report
from stepscope.api.planning import plan
from stepscope.api.precision import audit, configure_precision
from stepscope.api.reading import analyze, compare, diagnose, read, sql, what_if
from stepscope.api.recording import Recorder, phase, record, step
from stepscope.api.sweeps import bench
from stepscope.api.tuning import tune
from stepscope.api.verification import verify

__all__ = [
    "Recorder", "analyze", "audit", "bench", "compare", "configure_precision", "diagnose", "export", "phase", "plan",
    "read", "record", "report", "sql", "step", "tune", "verify", "what_if",
]  # fmt: skip

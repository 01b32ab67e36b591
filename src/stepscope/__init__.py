"""Where a PyTorch training step goes, what would make it better, and the proof.

>>> import stepscope
>>> with stepscope.record("runs/example", model=model) as rec:      # doctest: +SKIP
...     for batch in batches:
...         loss = train_step(batch)
...         rec.step(loss=loss)
>>> rec.result                                                       # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepscope import display
from stepscope.version import __version__

if TYPE_CHECKING:
    from stepscope.analysis.comparison.compare import Comparison
    from stepscope.analysis.comparison.improvement import Improvement
    from stepscope.analysis.comparison.sweeps import SweepSummary
    from stepscope.analysis.comparison.tuning import Tuning
    from stepscope.analysis.comparison.verification import Verification
    from stepscope.analysis.precision.dtype_audit import DtypeAudit
    from stepscope.analysis.ranks.hangs import Hang
    from stepscope.analysis.ranks.rank_account import Analysis
    from stepscope.api import (
        Recorder,
        analyze,
        audit,
        bench,
        compare,
        configure_precision,
        diagnose,
        export,
        hang,
        improve,
        log,
        phase,
        plan,
        read,
        record,
        report,
        sql,
        step,
        trigger,
        tune,
        verify,
        watch,
        what_if,
    )
    from stepscope.document.card import Card
    from stepscope.document.model import Document
    from stepscope.errors import (
        MissingDependencyError,
        NotComparableError,
        RecordingError,
        StepscopeError,
        TraceError,
        Unavailable,
        UsageError,
    )
    from stepscope.findings.diagnose import Diagnosis
    from stepscope.findings.finding import Finding
    from stepscope.findings.run_status import RunStatus
    from stepscope.findings.what_if import WhatIf
    from stepscope.planner.plan import Plan
    from stepscope.planner.prediction import Prediction
    from stepscope.recorder.precision.settings import PrecisionChange
    from stepscope.recorder.windows import Windows
    from stepscope.session import Session
    from stepscope.session import open_session as open

__all__ = [
    "Analysis", "Card", "Comparison", "Diagnosis", "Document", "DtypeAudit", "Finding", "Hang", "Improvement",
    "MissingDependencyError", "NotComparableError", "Plan", "PrecisionChange", "Prediction", "Recorder",
    "RecordingError", "RunStatus", "Session", "StepscopeError", "SweepSummary", "TraceError", "Tuning", "Unavailable",
    "UsageError", "Verification", "WhatIf", "Windows", "__version__", "analyze", "audit", "bench", "compare",
    "configure_precision", "diagnose", "export", "hang", "improve", "log", "open", "phase", "plan", "read", "record",
    "report", "sql", "step", "trigger", "tune", "verify", "watch", "what_if",
]  # fmt: skip
_MODULES = {
    "analysis.comparison.compare": "Comparison",
    "analysis.comparison.improvement": "Improvement",
    "analysis.comparison.sweeps": "SweepSummary",
    "analysis.comparison.tuning": "Tuning",
    "analysis.comparison.verification": "Verification",
    "analysis.precision.dtype_audit": "DtypeAudit",
    "analysis.ranks.hangs": "Hang",
    "analysis.ranks.rank_account": "Analysis",
    "document.card": "Card",
    "document.model": "Document",
    "errors": "MissingDependencyError NotComparableError RecordingError StepscopeError TraceError Unavailable "
    "UsageError",
    "findings.diagnose": "Diagnosis",
    "findings.finding": "Finding",
    "findings.run_status": "RunStatus",
    "findings.what_if": "WhatIf",
    "planner.plan": "Plan",
    "planner.prediction": "Prediction",
    "recorder.precision.settings": "PrecisionChange",
    "recorder.windows": "Windows",
    "session": "Session open",
}
"""The names of each module; all others are in `api`."""

display.renderer = "stepscope.api.displays"


def __getattr__(name: str) -> Any:
    # Importing stepscope in a training script costs nothing until something of it is used.
    if name not in __all__:
        raise AttributeError(f"module 'stepscope' has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names.split()), "api")
    return getattr(import_module(f"stepscope.{module}"), "open_session" if name == "open" else name)


def load_ipython_extension(shell: Any) -> None:
    """Return nothing; `%load_ext stepscope` makes `%%stepscope` and `%stepscope` known to a notebook."""
    from stepscope.api.notebook import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Return nothing; `%unload_ext stepscope` takes the magics back."""
    for magics in shell.magics_manager.magics.values():
        magics.pop("stepscope", None)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

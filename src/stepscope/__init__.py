"""Where a PyTorch training step goes, what would make it better, and the proof.

>>> import stepscope
>>> with stepscope.record("runs/example", model=model) as rec:      # doctest: +SKIP
...     for batch in batches:
...         loss = train_step(batch)
...         rec.step(loss=loss)
>>> rec.result                                                       # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stepscope.version import __version__

if TYPE_CHECKING:
    from stepscope.api import (
        analyze,
        audit,
        compare,
        configure_precision,
        diagnose,
        phase,
        read,
        record,
        report,
        step,
        verify,
        what_if,
    )

__all__ = [
    "__version__",
    "analyze",
    "audit",
    "compare",
    "configure_precision",
    "diagnose",
    "phase",
    "read",
    "record",
    "report",
    "step",
    "verify",
    "what_if",
]


def __getattr__(name: str) -> Any:
    # Importing stepscope in a training script costs nothing until something of it is used.
    if name in __all__:
        return getattr(importlib.import_module("stepscope.api"), name)
    raise AttributeError(f"module 'stepscope' has no attribute {name!r}")

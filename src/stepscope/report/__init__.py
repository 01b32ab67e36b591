"""Results made visible: the terminal, Markdown, CSV, PNG, JSON and one HTML page.

The package can be called: `stepscope.report("runs/x")` is `stepscope.api.report`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    # As of stepscope.record: import binds the package to the name of the function, so one object is both.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("stepscope.api").report(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage

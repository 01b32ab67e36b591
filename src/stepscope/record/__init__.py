"""The side that runs beside the training: torch and the standard library, nothing else.

The package can be called: `with stepscope.record("runs/x") as rec:` is `stepscope.api.record`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    # `stepscope.record` is this package and, for users, the function of the same name. Import
    # binds the package to that name whenever a module of it is first imported, so one object
    # has to be both.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("stepscope.api").record(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage

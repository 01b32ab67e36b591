"""Makes Triton kernel launches do nothing in a plan: their arguments are allocated before."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def launching_nothing(may_import: bool) -> Iterator[None]:
    """Make launches of Triton kernels do nothing inside this context.

    With `may_import`, import Triton if it is installed; otherwise only consider a Triton that is already imported.
    """
    if "triton" not in sys.modules and not (may_import and importlib.util.find_spec("triton")):
        yield
        return
    from triton.runtime import autotuner, jit

    with ExitStack() as stack:
        for kind in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
            stack.enter_context(mock.patch.object(kind, "run", _nothing))
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None

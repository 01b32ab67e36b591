"""Makes Triton kernel launches do nothing in a plan: their arguments are allocated before."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stepscope.planner.emulation.torch_support import replaced


@contextmanager
def launching_nothing(may_import: bool) -> Iterator[None]:
    """Make launches of Triton kernels do nothing inside this context.

    With `may_import`, import Triton if it is installed; otherwise only consider a Triton that is already imported.
    """
    if "triton" not in sys.modules and not (may_import and importlib.util.find_spec("triton")):
        yield
        return
    from triton.runtime import autotuner, jit

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    with replaced(*((kind, "run", nothing) for kind in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics))):
        yield

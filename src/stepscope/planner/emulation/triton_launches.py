"""Triton kernels in a plan: what they are given is allocated before, and a launch does nothing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def launching_nothing(may_import: bool) -> Iterator[None]:
    """While it lasts, a launch of a Triton kernel does nothing.

    `may_import`: the code to come may import Triton itself; without, only a Triton that is there already counts.
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

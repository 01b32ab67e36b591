"""Replaces parts of PyTorch and Triton, and reports private parts that a plan uses and this version lacks."""

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from stepscope.errors import UsageError

HERE = Path(__file__).parents[1]
_PASSED_THROUGH = ("contextlib.py", "mock.py")


@contextlib.contextmanager
def replaced(*parts: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes while the context is active, as far as this PyTorch version has them."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in parts:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextlib.contextmanager
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


@contextlib.contextmanager
def this_torch() -> Iterator[None]:
    """Raise a UsageError that names the torch version if a plan's import or call needs a part that it lacks."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        files = [Path(frame.filename) for frame in frames if not frame.filename.endswith(_PASSED_THROUGH)]
        if not files[-1].is_relative_to(HERE):
            raise  # from the program, or from PyTorch
        raise UsageError(
            f"torch {torch.__version__} lacks a part that plans use ({error}): plan with torch 2.11 to 2.13, or "
            "measure with stepscope bench"
        ) from error

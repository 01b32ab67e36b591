"""A plan uses parts of PyTorch that carry no promise; where this version has not one of them, that is said."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from stepscope.errors import UsageError

HERE = Path(__file__).parents[1]
_PASSED_THROUGH = ("contextlib.py", "mock.py")


@contextlib.contextmanager
def this_torch() -> Iterator[None]:
    """Around imports and calls of a plan: a UsageError that names the version where a part of PyTorch is missing."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        files = [Path(frame.filename) for frame in frames if not frame.filename.endswith(_PASSED_THROUGH)]
        if not files[-1].is_relative_to(HERE):
            raise  # the program's own, or PyTorch's
        raise UsageError(
            f"torch {torch.__version__} has not all that a plan uses ({error}): plan with torch 2.11 to 2.13, or "
            "measure with stepscope bench"
        ) from error

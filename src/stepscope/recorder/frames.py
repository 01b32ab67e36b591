"""The stack frames of the script, without those of torch and Stepscope."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")  # noqa: PTH118, PTH120  as a code object spells it
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # noqa: PTH118, PTH120  the same
_WORKLOADS = os.path.join(_OURS, "workloads", "")  # noqa: PTH118  these models are measured like the user's own
_OPTIMIZER_FILE = torch.optim.Optimizer.profile_hook_step.__code__.co_filename

_PYTHON = os.path.join(os.path.dirname(os.__file__), "")  # noqa: PTH118, PTH120  the same

_is_script: dict[str, bool] = {}


def script_frames(frame: types.FrameType | None = None) -> Iterator[types.FrameType]:
    """Yield frames that belong to neither torch nor Stepscope, from `frame` or of this thread, innermost first."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        found = _is_script.get(file)
        if found is None:
            generated = file.startswith(("<frozen ", "<eval_with_key>")) or f"{os.sep}torchinductor_" in file
            found = _is_script[file] = not (is_ours(file) or generated or file.startswith(_TORCH))
        if found:
            yield frame
        frame = frame.f_back


def is_ours(file: str) -> bool:
    """Return whether a file belongs to Stepscope, other than a model that it comes with."""
    return file.startswith(_OURS) and not file.startswith(_WORKLOADS)


def is_library(file: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file


def is_pythons(file: str) -> bool:
    """Return whether a file belongs to Python's own library."""
    return file.startswith(_PYTHON) and not is_library(file)


def place(frame: types.FrameType) -> str:
    """Return `train.py:42`; the line of the function where an instruction has none."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno or frame.f_code.co_firstlineno}"


def caller() -> str | None:
    """Return the innermost frame of the script as `train.py:42 forward`, or None if this thread has none."""
    frame = next(script_frames(), None)
    return f"{place(frame)} {frame.f_code.co_name}" if frame is not None else None


def num_running_steps(optimizer: Any) -> int:
    """Return how many calls of this optimizer's hooked `step` are on the stack."""
    frame: types.FrameType | None = sys._getframe()
    num_running = 0
    while frame is not None:
        code = frame.f_code
        if (
            code.co_name == "wrapper"
            and code.co_filename == _OPTIMIZER_FILE
            and frame.f_locals.get("self") is optimizer
        ):
            num_running += 1
        frame = frame.f_back
    return num_running

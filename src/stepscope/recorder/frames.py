"""Whose code is running: the frames of the script on the stack, without torch's and without ours."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import torch

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")  # noqa: PTH118, PTH120  as a code object spells it
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # noqa: PTH118, PTH120
_WORKLOADS = os.path.join(_OURS, "workloads", "")  # noqa: PTH118  models: what is measured, not what measures

_is_script: dict[str, bool] = {}


def script_frames() -> Iterator[types.FrameType]:
    """The frames of this thread that are neither torch's nor stepscope's, innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        found = _is_script.get(file)
        if found is None:
            ours = file.startswith(_OURS) and not file.startswith(_WORKLOADS)
            generated = file.startswith(("<frozen ", "<eval_with_key>")) or f"{os.sep}torchinductor_" in file
            found = _is_script[file] = not (ours or generated or file.startswith(_TORCH))
        if found:
            yield frame
        frame = frame.f_back


def is_library(file: str) -> bool:
    """Whether a file was installed, and is not what the user works on."""
    return f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file


def place(frame: types.FrameType) -> str:
    """`train.py:42`."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def caller() -> str | None:
    """`train.py:42 forward`: the innermost frame of the script; None on a thread that has none."""
    frame = next(script_frames(), None)
    return f"{place(frame)} {frame.f_code.co_name}" if frame is not None else None

"""Explains why torch refused the attention backend that a point asked for, in torch's own words."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

_REFUSALS = ("No available kernel", "No viable backend")
"""What torch says when the only allowed backend cannot run, on a GPU and on a CPU."""
_BECAUSE = "not used because"
MAX_MESSAGES = 1000


@dataclass(frozen=True)
class Refusal:
    """An attention backend that torch refused."""

    reason: str
    """One line for the row."""
    torch_reasons: list[str]
    """Torch's reasons, one per entry; empty if it gives none."""


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Collect the warnings raised inside; they are still shown."""
    messages: list[str] = []
    show = warnings.showwarning

    def listen(message: Any, *args: Any, **kwargs: Any) -> None:
        if len(messages) < MAX_MESSAGES:
            messages.append(str(message))
        show(message, *args, **kwargs)

    with mock.patch.object(warnings, "showwarning", listen):
        yield messages


def refusal(
    error: BaseException, messages: list[str], run: Mapping[str, Any], config: Mapping[str, Any]
) -> Refusal | None:
    """Return what torch refused; None for other errors, or if no backend was forced.

    >>> words = ["Flash attention kernel not used because:", "Both fused kernels do not support non-zero dropout."]
    >>> refusal(RuntimeError("No available kernel."), words, {"sdpa": "flash", "device": "cpu"}, {}).reason
    'sdpa=flash: PyTorch refused it: Both fused kernels do not support non-zero dropout.'
    """
    from stepscope.recorder.precision.attention_calls import FUSED, ON_CPU, reasons

    if not any(words in str(error) for words in _REFUSALS):
        return None
    knob, name = ("sdpa", run.get("sdpa")) if run.get("sdpa") != "free" else ("implementation", None)
    name = config.get("implementation") if name is None else name
    if name not in (*FUSED, "math"):
        return None
    found = reasons(str(name), messages) if any(_BECAUSE in text for text in messages) else []
    if run.get("device") == "cpu" and name not in (*ON_CPU, "math"):
        return Refusal(f"{knob}={name}: PyTorch has no such kernel for CPUs", found)
    why = f"PyTorch refused it: {' '.join(found)}" if found else "PyTorch refused it without a reason"
    return Refusal(f"{knob}={name}: {why}", found)

"""When torch refuses the attention back end that a point asked for: which, and in torch's own words why."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_REFUSALS = ("No available kernel", "No viable backend")
"""Torch's words for "the only one allowed cannot run", on a GPU and on a CPU."""
_BECAUSE = "not used because"
MOST_SAID = 1000


@dataclass(frozen=True)
class Refusal:
    """A back end that torch did not take."""

    reason: str
    """One line for the row."""
    said: list[str]
    """What torch says of it, each reason on its own; empty where it does not say."""


@contextmanager
def heard() -> Iterator[list[str]]:
    """A list of what is warned of inside; it is still shown as before."""
    said: list[str] = []
    show = warnings.showwarning

    def listen(message: Any, *args: Any, **kwargs: Any) -> None:
        if len(said) < MOST_SAID:
            said.append(str(message))
        show(message, *args, **kwargs)

    warnings.showwarning = listen
    try:
        yield said
    finally:
        warnings.showwarning = show


def refusal(
    error: BaseException, said: list[str], run: Mapping[str, Any], config: Mapping[str, Any]
) -> Refusal | None:
    """What torch refused; None where the error is another, or nobody asked for a back end.

    >>> words = ["Flash attention kernel not used because:", "Both fused kernels do not support non-zero dropout."]
    >>> refusal(RuntimeError("No available kernel."), words, {"sdpa": "flash", "device": "cpu"}, {}).reason
    'sdpa=flash: PyTorch refuses it: Both fused kernels do not support non-zero dropout.'
    """
    from stepscope.recorder.precision.attention_calls import FUSED, ON_CPU, reasons

    if not any(words in str(error) for words in _REFUSALS):
        return None
    knob, name = ("sdpa", run.get("sdpa")) if run.get("sdpa") != "free" else ("implementation", None)
    name = config.get("implementation") if name is None else name
    if name not in (*FUSED, "math"):
        return None
    found = reasons(str(name), said) if any(_BECAUSE in text for text in said) else []
    if run.get("device") == "cpu" and name not in (*ON_CPU, "math"):
        return Refusal(f"{knob}={name}: PyTorch has no such kernel on a CPU", found)
    why = f"PyTorch refuses it: {' '.join(found)}" if found else "PyTorch refuses it and does not say why"
    return Refusal(f"{knob}={name}: {why}", found)

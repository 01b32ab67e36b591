"""Waits for the first sign that a process trains: a gradient, or an optimizer's step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from stepscope.recorder.patches import Handle, Patch, remove_all


class Sentinel:
    """Calls `trains` once, before the first backward runs or inside the first step of an optimizer.

    No optimizer hook is registered: PyTorch may be iterating over them. It calls `_optimizer_step_code` after its
    pre-hooks and before its post-hooks, where a session can register its own.
    """

    def __init__(self, trains: Callable[[], None]) -> None:
        self._trains = trains
        self._patches: list[Handle] = [
            *(Patch(torch.autograd, name, functools.partial(self._gradient, name)) for name in ("backward", "grad")),
            Patch(torch.optim.Optimizer, "_optimizer_step_code", self._step),
        ]

    def _gradient(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._patches:
            return original(*args, **kwargs)
        self._report()
        # Through the session's own patch, so that it sees this backward.
        return getattr(torch.autograd, name)(*args, **kwargs)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._report()
        return original(*args, **kwargs)

    def _report(self) -> None:
        if self._patches:
            self.remove()
            self._trains()

    def remove(self) -> None:
        """Stop waiting."""
        remove_all(self._patches)

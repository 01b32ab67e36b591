"""`unfused_optimizer`: creates torch.optim optimizers with fused=True, or foreach=True if they have no fused form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from stepscope.recorder.fixes.change import Change
from stepscope.recorder.patches import Patch


class FusedOptimizers(Change):
    nothing_seen = "no optimizer was made"

    def start(self) -> None:
        self._depth = 0
        for kind in vars(torch.optim).values():
            if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
                continue
            names = inspect.signature(vars(kind).get("__init__", kind)).parameters
            forms = [form for form in ("fused", "foreach") if form in names]
            if forms and "__init__" in vars(kind):
                make = functools.partial(self._make, kind, forms, list(names)[1:])
                self.handles.append(Patch(kind, "__init__", make))
        # Every optimizer calls this constructor.
        self.handles.append(Patch(torch.optim.Optimizer, "__init__", self._made))

    def _made(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._depth:
            self.left[f"{type(optimizer).__name__} has neither a fused nor a foreach form"] += 1
        return original(optimizer, *args, **kwargs)

    def _make(
        self,
        kind: type,
        forms: list[str],
        names: list[str],
        original: Callable[..., Any],
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._depth:  # AdamW's constructor calls Adam's
            return original(optimizer, *args, **kwargs)
        self._depth += 1
        try:
            given = {**dict(zip(names, args)), **kwargs}
            name = type(optimizer).__name__
            why_not = _why_not(given, type(optimizer), kind)
            if why_not is not None:
                self.left[f"{name} {why_not}"] += 1
                return original(optimizer, *args, **kwargs)
            if "params" in given and not isinstance(given["params"], (torch.Tensor, dict)):
                given["params"] = list(given["params"])  # a generator can be read only once
            for form in forms:
                try:
                    original(optimizer, **{**given, "foreach": None, form: True})
                except (RuntimeError, ValueError) as error:
                    self.left[f"{name} refused {form}=True: {str(error).splitlines()[0]}"] += 1
                    continue
                before = "a loop" if given.get("foreach") is False else "the default"
                self.changed[f"{name} made with {form}=True instead of {before}"] += 1
                return None
            return original(optimizer, **given)
        finally:
            self._depth -= 1


def _why_not(given: dict[str, Any], kind: Any, base: Any) -> str | None:
    """Return why an optimizer is left unchanged, or None."""
    if given.get("fused"):
        return "is fused already"
    if given.get("differentiable"):
        return "is differentiable"
    # torch wraps `step` separately for each class.
    return None if inspect.unwrap(kind.step) is inspect.unwrap(base.step) else "has a step of its own"

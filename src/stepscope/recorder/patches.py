"""Temporarily replaces functions of other packages."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch


class Handle(Protocol):
    """Anything that can be removed again."""

    def remove(self) -> None: ...


H = TypeVar("H", bound=Handle)


def remove_all(handles: list[H]) -> None:
    """Remove every handle, the newest first, and empty the list."""
    while handles:
        handles.pop().remove()


class Patch:
    """Wraps `owner.name` with `around(original, *args, **kwargs)` until `remove()`.

    Code that torch.compile traces goes straight to the original. Dynamo folds the check to a constant, so compiled
    code is the same with and without the patch.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_removed:
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        self._is_removed = False
        self._is_own = name in vars(owner)
        # A bound method must be replaced with a bound method: schedulers look at its `__func__`.
        bound = types.MethodType(lambda _self, *args, **kwargs: wrapper(*args, **kwargs), owner)
        self._wrapper: Any = bound if isinstance(original, types.MethodType) else wrapper
        self._owner, self._name, self._original = owner, name, original
        setattr(owner, name, self._wrapper)

    def remove(self) -> None:
        # If the wrapper was itself wrapped, it stays in place and does nothing.
        self._is_removed = True
        if vars(self._owner).get(self._name) is not self._wrapper:
            return
        if self._is_own:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)

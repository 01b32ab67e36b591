"""Replacing a function of somebody else's for a while, and putting it back."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Handle(Protocol):
    """Anything that can be taken off again."""

    def remove(self) -> None: ...


def remove_all(handles: list[Handle]) -> None:
    """Take off every handle, the last put on first, and empty the list."""
    while handles:
        handles.pop().remove()


class Patch:
    """`owner.name` wrapped by `around(original, *args, **kwargs)` until `remove()`.

    Code that torch.compile is tracing goes straight to the original: Dynamo folds the test to
    a constant, so that a compiled region looks the same with and without us.
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
        # On an instance a bound method stands for a bound method: schedulers look at its `__func__`.
        bound = types.MethodType(lambda _self, *args, **kwargs: wrapper(*args, **kwargs), owner)
        self._wrapper: Any = bound if isinstance(original, types.MethodType) else wrapper
        self._owner, self._name, self._original = owner, name, original
        setattr(owner, name, self._wrapper)

    def remove(self) -> None:
        # Somebody may have wrapped our wrapper since: then it stays, and does nothing any more.
        self._is_removed = True
        if vars(self._owner).get(self._name) is not self._wrapper:
            return
        if self._is_own:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)

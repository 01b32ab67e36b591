"""Replacing a function of somebody else's for a while, and putting it back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Handle(Protocol):
    """Anything that can be taken off again."""

    def remove(self) -> None: ...


class Patch:
    """`owner.name` wrapped by `around(original, *args, **kwargs)` until `remove()`.

    Code that torch.compile is tracing goes straight to the original: Dynamo folds the test to
    a constant, so that a compiled region looks the same with and without us.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        self._owner, self._name, self._original, self._wrapper = owner, name, original, wrapper
        setattr(owner, name, wrapper)

    def remove(self) -> None:
        # Somebody may have wrapped our wrapper since: then it stays, and `around` is expected
        # to pass through once its session has ended.
        if getattr(self._owner, self._name, None) is self._wrapper:
            setattr(self._owner, self._name, self._original)

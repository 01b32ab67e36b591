"""Temporarily replaces functions of other packages."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from stepscope.recorder.modes import out_of_sight
from stepscope.recorder.wall import failed


class Handle(Protocol):
    """Anything that can be removed again."""

    def remove(self) -> None: ...


H = TypeVar("H", bound=Handle)
After = Callable[[bool], object]
"""Called after the original, with whether it has returned."""
Shortcut = Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]]


def remove_all(handles: list[H]) -> None:
    """Remove every handle, the newest first, and empty the list."""
    while handles:
        try:
            handles.pop().remove()
        except Exception as error:
            failed(error)


class _Replaced:
    """Puts `wrapper` in the place of `owner.name` until `remove()`."""

    def __init__(self, owner: Any, name: str, original: Any, wrapper: Callable[..., Any]) -> None:
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


class Weak:
    """A patch of one object of the script, which holds it: here, it may be released."""

    def __init__(self, patch: _Replaced) -> None:
        self._patch = weakref.ref(patch)

    def remove(self) -> None:
        if (patch := self._patch()) is not None:
            patch.remove()


class Patch(_Replaced):
    """Calls `before(*args, **kwargs)` ahead of `owner.name`, and what that returns, if anything, after it.

    Code that torch.compile traces goes straight to the original. Dynamo folds the check to a constant, so compiled
    code is the same with and without the patch. `shortcut(original, wrapper)` returns a function that is put in place
    of the wrapper, and calls it if need be.
    """

    def __init__(
        self, owner: Any, name: str, before: Callable[..., After | None], shortcut: Shortcut | None = None
    ) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_removed:
                return original(*args, **kwargs)
            after = None
            try:
                after = out_of_sight(before, *args, **kwargs)
            except Exception as error:
                failed(error)
            if after is None:
                return original(*args, **kwargs)
            has_returned = False
            try:
                result = original(*args, **kwargs)
                has_returned = True
                return result
            finally:
                try:
                    out_of_sight(after, has_returned)
                except Exception as error:
                    failed(error)

        placed = wrapper if shortcut is None else functools.wraps(original)(shortcut(original, wrapper))
        placed.before = before  # type: ignore[attr-defined]  # a function takes any attribute
        super().__init__(owner, name, original, placed)


class Around(_Replaced):
    """Replaces `owner.name` with `around(original, *args, **kwargs)`, which may change arguments and results.

    If `around` fails, the script gets what the original gave: its result or its exception, or what it gives
    for the script's own arguments.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_removed:
                return original(*args, **kwargs)
            results: list[Any] = []
            raised: list[BaseException] = []

            def called(*args: Any, **kwargs: Any) -> Any:
                try:
                    result = original(*args, **kwargs)
                except BaseException as error:
                    raised.append(error)
                    raise
                results.append(result)
                return result

            try:
                return around(called, *args, **kwargs)
            except Exception as error:
                if raised and error is raised[-1]:
                    raise
                failed(error)
            return results[-1] if results else original(*args, **kwargs)

        super().__init__(owner, name, original, wrapper)

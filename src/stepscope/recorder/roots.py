"""The root modules of a script: found in its first two steps, then hooked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from stepscope.recorder.hooks import FirstModuleCall
from stepscope.recorder.model import CalledRoots, CallHooks, live_modules

Begin = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
End = Callable[[nn.Module], None]


class Roots:
    """Modules that the script calls directly. The first call shows one; one step of watching shows them all.

    Ownership is not enough: a Lightning module owns the model, but the script does not call it.
    """

    def __init__(self, begin: Begin, end: End) -> None:
        self._begin, self._end = begin, end
        self._hooks: dict[int, CallHooks] = {}
        self._first_call: FirstModuleCall | None = None
        self._search: CalledRoots | None = None

    @property
    def modules(self) -> list[nn.Module]:
        return [hooks.module for hooks in self._hooks.values()]

    def add(self, module: nn.Module) -> None:
        """Hook one root module."""
        self._first_call = None
        if id(module) not in self._hooks:
            self._hooks[id(module)] = CallHooks(module, self._begin, self._end)

    def await_first_call(self) -> None:
        """Treat the first module that is called as a root."""
        self._first_call = FirstModuleCall(self.add)

    def stop_awaiting(self) -> None:
        if self._first_call is not None:
            self._first_call.remove()
            self._first_call = None

    def search(self) -> None:
        """Watch every module for one step."""
        self.stop_awaiting()
        if self._search is None:
            self._search = CalledRoots(live_modules())

    def keep_called(self) -> None:
        """End the search and keep exactly the modules that were called from outside."""
        if self._search is None:
            return
        found = self._search.found
        self.stop_search()
        if not found:
            return
        for key in [key for key in self._hooks if key not in found]:
            self._hooks.pop(key).remove()
        for module in found.values():
            self.add(module)

    def stop_search(self) -> None:
        if self._search is not None:
            self._search.remove()
            self._search = None

    def attach(self) -> None:
        """Hook every known root again."""
        modules = self.modules
        self.forget()
        for module in modules:
            self.add(module)

    def detach(self) -> None:
        """Remove the hooks from every root."""
        self.stop_awaiting()
        self.stop_search()
        for hooks in self._hooks.values():
            hooks.remove()

    def forget(self) -> None:
        """Remove the hooks and release the modules: the script may want the memory back."""
        self.detach()
        self._hooks.clear()

"""The root modules of a script: found in its first two steps, then hooked."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from stepscope.recorder.model import Begin, CalledRoots, CallHooks, End, call_with_hooks, is_compiled, live_modules
from stepscope.recorder.modes import unseen
from stepscope.recorder.patches import After, Around, Handle, Patch, remove_all
from stepscope.recorder.processes.imports import AfterImport
from stepscope.recorder.usual.steps import UsualSteps
from stepscope.recorder.values import modules_in, parameters_in
from stepscope.recorder.wall import failed

LEAST_SHARE_OF_NETWORK = 0.5
"""The least share of a module's parameters in a network that it wraps. Smaller parts are layers."""


class Roots:
    """Modules that the script calls directly. The first call shows one; one step of watching shows them all.

    Ownership is not enough: a Lightning module owns the model, but the script does not call it.
    """

    def __init__(self, begin: Begin, end: End, usual: UsualSteps) -> None:
        self._begin, self._end, self._usual = begin, end, usual
        self._hooks: dict[int, CallHooks] = {}
        self._idle: list[CallHooks] = []
        self._first_call: ModuleCalls | None = None
        self._awaited: list[weakref.ref[nn.Parameter]] = []
        self._search: CalledRoots | None = None
        self._own_calls: list[Handle] = []
        self.bypassed: list[str] = []  # filled in the end
        self._wrappers: list[weakref.ref[nn.Module]] = []

    @property
    def modules(self) -> list[nn.Module]:
        return [module for hooks in self._hooks.values() if (module := hooks.module) is not None]

    @property
    def replaceable(self) -> list[nn.Module]:
        """Those whose calls go through nn.Module's, so that a fix can replace them."""
        return [] if self._own_calls else self.modules

    def _find_bypassed(self) -> list[str]:
        """Return the classes of modules that torch.compile has wrapped, and that are called without their wrapper."""
        called = {id(part) for root in self.modules for part in modules_in(root)}
        wrappers = [one for reference in self._wrappers if (one := reference()) is not None and id(one) not in called]
        inner = [found for one in wrappers if (found := one._modules.get("_orig_mod")) is not None]
        # A method of the wrapped module, such as `compiled.loss(x)`, calls only parts of it.
        return sorted({type(one).__name__ for one in inner if any(id(part) in called for part in modules_in(one))})

    def add(self, module: nn.Module) -> None:
        """Hook one root module."""
        known = self._hooks.get(id(module))
        if known is None or known.module is not module:  # a released module's id may be used again
            self._hooks = {key: hooks for key, hooks in self._hooks.items() if hooks.module is not None}
            self._hooks[id(module)] = self._hook(module)

    def _hook(self, module: nn.Module) -> CallHooks:
        return CallHooks(module, self._begin, self._end, self._usual)

    def await_first_call(self) -> None:
        """Treat the first module with parameters that is called as a root."""
        self._first_call = ModuleCalls(self._called)

    def await_call_with(self, parameter: nn.Parameter) -> None:
        """Treat the first module that is called and has this parameter as a root."""
        if not any(parameter is known for root in self.modules for known in parameters_in(root)):
            self._awaited.append(weakref.ref(parameter))
            if self._first_call is None:
                self._first_call = ModuleCalls(self._called)

    def _called(self, module: nn.Module) -> None:
        if not any(True for _ in parameters_in(module)):
            return  # a transform of the data, say
        if self._awaited:
            inside = {id(parameter) for parameter in parameters_in(module)}
            left = [awaited for awaited in self._awaited if id(awaited()) not in inside]
            if len(left) == len(self._awaited):
                return
            self._awaited = left
        self.add(module)
        if not self._awaited:
            self.stop_awaiting()

    def stop_awaiting(self) -> None:
        self._awaited.clear()
        if self._first_call is not None:
            self._first_call.remove()
            self._first_call = None

    def search(self) -> None:
        """Watch every module for one step."""
        self.stop_awaiting()
        if self._search is None:
            self._search = CalledRoots(live_modules())

    def keep_called(self) -> bool:
        """End the search, keep exactly the modules that were called from outside, and return whether that is all.

        If none was, and classes have a `__call__` of their own, another step is watched with an eye on those.
        """
        if self._search is None:
            return True
        found, modules = self._search.found, self._search.modules
        self._wrappers = [weakref.ref(module) for module in modules if _is_wrapper(module)]
        self.stop_search()
        if not found:
            own = {cls for module in modules for cls in _with_own_call(type(module))}
            if not own or self._own_calls or self._hooks:
                return True
            self._own_calls = [Around(cls, "__call__", call_with_hooks) for cls in own]
            self.search()
            return False
        self._hook_idle(list(found.values()), modules)
        found = _without_objectives(found) if self._own_calls else found
        for key in [key for key in self._hooks if key not in found]:
            self._hooks.pop(key).remove()
        for module in found.values():
            self.add(module)
        return True

    def _hook_idle(self, roots: list[nn.Module], modules: list[nn.Module]) -> None:
        """Hook models that were not called yet: a moving average, one that is trained later, a network in a root."""
        known = {id(part) for root in roots for part in modules_in(root)}
        idle = [one for one in modules if id(one) not in known and any(True for _ in parameters_in(one))]
        inner = {id(part) for one in idle for part in modules_in(one) if part is not one}
        outermost = [one for one in idle if id(one) not in inner]
        networks = [part for one in (*roots, *outermost) for part in _networks(one)]
        unique = {id(one): one for one in (*outermost, *networks)}
        for root in roots:
            unique.pop(id(root), None)
        self._idle += [self._hook(module) for module in unique.values()]

    def stop_search(self) -> None:
        if self._search is not None:
            self._search.remove()
            self._search = None

    def can_train(self) -> bool:
        return any(parameter.requires_grad for root in self.modules for parameter in parameters_in(root))

    def attach(self) -> None:
        """Hook every known root again."""
        modules, idle = self.modules, [hooks.module for hooks in self._idle]
        self.detach()
        self._hooks.clear()
        for module in modules:
            self.add(module)
        self._idle = [self._hook(module) for module in idle if module is not None]

    def detach(self) -> None:
        """Remove the hooks from every root."""
        self.stop_awaiting()
        self.stop_search()
        for hooks in (*self._hooks.values(), *self._idle):
            hooks.remove()

    def forget(self) -> None:
        """Remove the hooks and release the modules: the script may want the memory back."""
        self.bypassed = unseen(self._find_bypassed)
        self.detach()
        remove_all(self._own_calls)
        self._hooks.clear()
        self._idle.clear()


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" and type(module).__module__.startswith("torch._dynamo")


def _without_objectives(found: dict[int, nn.Module]) -> dict[int, nn.Module]:
    """Return roots without those that hold another one and train nothing else: its objective."""
    parameters = {key: {id(parameter) for parameter in parameters_in(root)} for key, root in found.items()}
    parts = {key: {id(part) for part in modules_in(root)} - {key} for key, root in found.items()}
    is_held = {key: any(one in parts[key] and parameters[key] <= parameters[one] for one in found) for key in found}
    return {key: root for key, root in found.items() if not is_held[key]}


def _with_own_call(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    """Yield the classes of a module, its bases among them, that define a `__call__` and are not torch's."""
    for cls in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        is_own = isinstance(vars(cls).get("__call__"), FunctionType) and not cls.__module__.startswith("torch.")
        if is_own and issubclass(cls, nn.Module):
            yield cls


def _networks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the networks that a module wraps: `generate()` and `sample()` call them without the module itself."""
    if is_compiled(module):
        return
    least = sum(parameter.numel() for parameter in parameters_in(module)) * LEAST_SHARE_OF_NETWORK
    for part in modules_in(module):
        has_parts = any(one is not None for one in part._modules.values())
        if part is not module and has_parts and sum(one.numel() for one in parameters_in(part)) >= least:
            yield part


class ModuleCalls:
    """Reports modules that are called, outermost first, until it is removed."""

    def __init__(self, found: Callable[[nn.Module], None]) -> None:
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and not self._is_removed:
                try:
                    unseen(found, module)
                except Exception as error:
                    failed(error)
            return original(module, *args, **kwargs)

        self._original, self._wrapper = original, call
        self._is_removed = False
        self._handles: list[Handle] = []
        # Dynamo keeps a reference to nn.Module.__call__ when it is imported, and so does each torch.compile(module).
        # Neither may keep ours.
        if "torch._dynamo" in sys.modules:
            self._watch_compile()
        else:
            self._handles.append(AfterImport({"torch._dynamo": self._dynamo_imported}, before=self._detach))
        self._attach()

    def _dynamo_imported(self) -> None:
        self._watch_compile()
        self._attach()

    def _watch_compile(self) -> None:
        def initializes(*_args: Any, **_kwargs: Any) -> After:
            self._detach()
            return lambda _has_returned: self._attach()

        module = sys.modules["torch._dynamo.eval_frame"]
        self._handles.append(Patch(module.OptimizedModule, "_initialize", initializes))

    def _attach(self) -> None:
        if nn.Module.__call__ is self._original and not self._is_removed:  # leave the script's own replacement alone
            nn.Module.__call__ = self._wrapper

    def _detach(self) -> None:
        if nn.Module.__call__ is self._wrapper:
            nn.Module.__call__ = self._original

    def remove(self) -> None:
        self._is_removed = True
        self._detach()
        remove_all(self._handles)

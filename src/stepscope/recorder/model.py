"""The modules of a running script: which ones it calls directly, and what they consist of."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from sys import _getframe, getrefcount
from typing import Any

import torch
from torch import nn

from stepscope.recorder.ledger.nodes import backward_runs
from stepscope.recorder.modes import is_traced, unseen
from stepscope.recorder.patches import remove_all
from stepscope.recorder.usual.notes import LONG_WAY, Link, Notes
from stepscope.recorder.values import modules_in, parameters_in
from stepscope.recorder.wall import failed, guarded

Begin = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
End = Callable[[nn.Module], None]


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of this module go through torch.compile."""
    call = module.__dict__.get("_compiled_call_impl")
    if isinstance(call, _CallChain):
        call = call.inner
    return call is not None or "_orig_mod" in module._modules


def is_opaque(module: nn.Module) -> bool:
    """Return whether the calls of a module's children are hidden.

    torch.compile does not show them. DataParallel runs copies of them in other threads.
    """
    return isinstance(module, nn.DataParallel) or is_compiled(module)


def visible_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (fully qualified name, module) once for a module and each descendant, except inside opaque ones."""
    waiting, seen = [(name, module)], {id(module)}
    while waiting:
        name, module = waiting.pop()
        yield name, module
        parts = () if is_opaque(module) else module._modules.items()
        children = [(n, one) for n, one in parts if one is not None and id(one) not in seen]
        seen.update(id(child) for _, child in children)
        waiting.extend((f"{name}.{n}" if name else n, child) for n, child in reversed(children))


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def plain_name(name: str) -> str:
    """Return a module's name without the wrappers that torch adds.

    >>> plain_name("blocks.0._checkpoint_wrapped_module.up")
    'blocks.0.up'
    """
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def named_modules(roots: list[nn.Module]) -> list[tuple[nn.Module, str, list[tuple[str, nn.Module]]]]:
    """Return (root, its name, its visible modules with their names) for each root module.

    A single root has no name. Several roots are named after their classes, numbered where needed. A root inside
    another root is listed there.
    """
    parts = {id(inner) for root in roots for inner in modules_in(root) if inner is not root}
    outer = [root for root in roots if id(root) not in parts]
    kinds = [type(getattr(root, "_orig_mod", root)).__name__ for root in outer]
    named = []
    for place, (root, kind) in enumerate(zip(outer, kinds)):
        name = f"{kind}_{kinds[:place].count(kind)}" if kinds.count(kind) > 1 else kind if len(outer) > 1 else ""
        named.append((root, name, list(visible_modules(root, name))))
    return named


def live_modules() -> list[nn.Module]:
    """Return every living nn.Module of this process that is not inside an opaque one."""
    # `type(o)` instead of isinstance: on proxies, isinstance runs their own code.
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    hidden: set[int] = set()
    for module in modules:
        if is_opaque(module):
            hidden.update(id(inner) for inner in modules_in(module) if inner is not module)
    return [module for module in modules if id(module) not in hidden]


class _CallChain(Link):
    """Replaces the compiled call that `Module.compile()` sets: it wraps the whole call of a module, hooks included.

    nn.Module checks this attribute at each call, drops it when it is copied or pickled, and avoids the slow path
    that forward hooks take.
    """

    def __init__(self, module: nn.Module) -> None:
        self.inner = module.__dict__.get("_compiled_call_impl")
        self.set_call(self.inner)
        self.hooks: list[CallHooks] = []
        self.usual: Notes | None = None  # of the only hook
        self.own: Any = None  # while it runs: the call of a class that may leave nn.Module's out
        # A cycle would keep the module alive until the next garbage collection.
        self._module = self.root = weakref.ref(module)
        self.key = id(module)

    def set_call(self, call: Callable[..., Any] | None) -> None:
        """Call the module through this from now on."""
        self._call = self.call = call  # Dynamo does not look into what is written in C

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced():
            return (self._call or self._module()._call_impl)(*args, **kwargs)  # type: ignore[union-attr]
        if self.usual is not None and self.own is None:
            result = self.usual.forward(self, args, kwargs)
            if result is not LONG_WAY:
                return result
        module = self.root()
        if getrefcount(self) > (_NUM_WITH_KEYWORDS if kwargs else _NUM) + len(self.hooks) or module is None:
            # A script that copies a module's `__dict__` by hand copies this too: the caller's `self` is another one.
            called = _getframe(1).f_locals.get("self", module)
            if called is not module:
                return (self.inner or called._call_impl)(*args, **kwargs)  # type: ignore[union-attr]
        call = self.call or module._call_impl  # type: ignore[union-attr]  # it has been called: it lives
        if self.own is not None:
            if self.own is _BEGUN:
                return call(*args, **kwargs)
            call, self.own = self.own, _BEGUN
        if torch.compiler._is_compiling_flag:
            return call(*args, **kwargs)
        begun: list[CallHooks] = []
        try:
            # A hook may end a step, and with it begin or end a window that hooks this module too.
            while self.hooks != begun and (left := [hook for hook in self.hooks if hook not in begun]):
                begun.append(left[0])
                unseen(left[0].begin, module, args, kwargs)
        except Exception as error:
            failed(error)
        try:
            return call(*args, **kwargs)
        finally:
            self._end(begun, module)

    @guarded
    def ended_unusually(self) -> None:
        """Called after a call that began as a usual one."""
        self._end(self.hooks[:1], self.root())

    @guarded
    def _end(self, begun: list[CallHooks], module: nn.Module | None) -> None:
        for hook in reversed(begun):
            unseen(hook.end, module)

    def hooks_changed(self) -> None:
        self.usual = self.hooks[0].usual if len(self.hooks) == 1 else None
        self.most_references, self.most_with_keywords = (
            num + len(self.hooks) for num in (_NUM_USUAL, _NUM_USUAL_WITH_KEYWORDS)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Modules with a `__getstate__` of their own keep it, nn.LSTM among them. Their copies get None.
        return type(None), ()


_BEGUN = object()  # in place of a class's own call, once hooks have run


def call_with_hooks(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Make a call of a class's own, with the hooks that nn.Module's call would run."""
    chain = module.__dict__.get("_compiled_call_impl")
    if not isinstance(chain, _CallChain) or chain.own is not None or chain.root() is not module:
        return call(module, *args, **kwargs)
    chain.own = partial(call, module)
    try:
        return chain(*args, **kwargs)
    finally:
        chain.own = None


class _Counter(_CallChain):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getrefcount(self), self.usual.num_references(self, args, kwargs)  # type: ignore[union-attr]


def _num_references(usual: Any, **kwargs: Any) -> Any:
    """Return how many references a chain has that is being called and that its module alone holds: here and in C."""
    module = nn.Module()
    module.__dict__["_compiled_call_impl"] = counter = _Counter(module)
    counter.usual = usual
    del counter
    return nn.Module._wrapped_call_impl(module, **kwargs)


# Versions of Python differ.
(_NUM, _NUM_USUAL), (_NUM_WITH_KEYWORDS, _NUM_USUAL_WITH_KEYWORDS) = (
    _num_references(Notes),
    _num_references(Notes, given=None),
)


class CallHooks:
    """Calls `begin(module, args, kwargs)` and `end(module)` around each call of one module, outside its compilation.

    Hooks of one module nest: the first to be added begins first and ends last.
    """

    def __init__(self, module: nn.Module, begin: Begin, end: End, usual: Notes | None = None) -> None:
        self.begin, self.end, self.usual = begin, end, usual
        self._module = weakref.ref(module)
        chain = module.__dict__.get("_compiled_call_impl")
        if not isinstance(chain, _CallChain):
            chain = _CallChain(module)
            module.__dict__["_compiled_call_impl"] = chain
        self._chain = chain
        chain.hooks.append(self)
        chain.hooks_changed()

    @property
    def module(self) -> nn.Module | None:
        """The module, or None if the script has released it."""
        return self._module()

    def remove(self) -> None:
        if self in self._chain.hooks:
            self._chain.hooks.remove(self)
            self._chain.hooks_changed()
        module = self._module()
        if module is None or self._chain.hooks or module.__dict__.get("_compiled_call_impl") is not self._chain:
            return
        if self._chain.inner is None:
            del module.__dict__["_compiled_call_impl"]
        else:
            module.__dict__["_compiled_call_impl"] = self._chain.inner


def replace_call(module: nn.Module, around: Callable[[Callable[..., Any]], Any], compiles: bool = False) -> None:
    """Route every call of a module through `around(its call)`, inside all hooks, until the process ends.

    `compiles` marks it as torch.compile: the module's children are hidden from then on.
    """
    chain = CallHooks(module, lambda *_: None, lambda _: None)._chain
    chain.set_call(around(chain.call or module._call_impl))
    if compiles:
        chain.inner = chain.call


def drop_hooks(module: nn.Module) -> None:
    """Remove hooks that a copied module inherited from its original."""
    chain = module.__dict__.get("_compiled_call_impl")
    if isinstance(chain, _CallChain):
        module.__dict__["_compiled_call_impl"] = chain.inner


class CalledRoots:
    """Finds the modules that are called from outside any other module, by hooking all of them for one step."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._found: dict[int, weakref.ref[nn.Module]] = {}
        self._depth = 0
        self._handles = [CallHooks(module, self._enter, self._leave) for module in modules]

    def _enter(self, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        # A module that a checkpoint calls again during backward was called by its model before.
        if self._depth == 0 and not backward_runs() and any(True for _ in parameters_in(module)):
            self._found[id(module)] = weakref.ref(module)
        self._depth += 1

    def _leave(self, _module: nn.Module) -> None:
        self._depth -= 1

    @property
    def found(self) -> dict[int, nn.Module]:
        return {key: module for key, one in self._found.items() if (module := one()) is not None}

    @property
    def modules(self) -> list[nn.Module]:
        """All that are watched."""
        return [module for hooks in self._handles if (module := hooks.module) is not None]

    def remove(self) -> None:
        remove_all(self._handles)


def parameter_facts(parameters: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Return parameter counts, and bytes by dtype. Shared parameters count once."""
    seen = {id(parameter): parameter for parameter in parameters}
    num_bytes: dict[str, int] = {}
    for parameter in seen.values():
        name = str(parameter.dtype).removeprefix("torch.")
        num_bytes[name] = num_bytes.get(name, 0) + parameter.numel() * parameter.element_size()
    return {
        "num_total": sum(p.numel() for p in seen.values()),
        "num_trainable": sum(p.numel() for p in seen.values() if p.requires_grad),
        "bytes_by_dtype": num_bytes,
    }


def without_optimizer(roots: list[nn.Module], optimized: set[int]) -> list[dict[str, Any]]:
    """Return the largest modules none of whose trainable parameters an optimizer has, given the ids of those it has.

    Empty if the optimizers have none of the parameters: then they update copies, or the script does so itself.
    """
    found: list[dict[str, Any]] = []
    named = [pair for _, _, modules in named_modules(roots) for pair in modules]
    for name, module in named:
        inside = [p for p in parameters_in(module) if p.requires_grad]
        is_part = found and f"{plain_name(name)}.".startswith(f"{found[-1]['module']}.")  # parents come first
        if inside and not is_part and optimized.isdisjoint(map(id, inside)):
            found.append({"module": plain_name(name), "num_parameters": sum(p.numel() for p in inside)})
    is_any = any(id(p) in optimized for root in roots for p in parameters_in(root))
    return found if is_any else []

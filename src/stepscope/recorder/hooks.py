"""Hooks on the places in PyTorch that show what a training loop does. Each is a handle that can be removed.

Each hook runs only a few times per step: none is on every op or every module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepscope.recorder.launch import AfterImport
from stepscope.recorder.model import drop_hooks
from stepscope.recorder.patches import Handle, Patch, remove_all


class LoopListener(Protocol):
    """Receives the hooks' events. `listens()` is false on other threads."""

    def listens(self) -> bool: ...
    def data_begins(self) -> None: ...
    def data_ended(self) -> None: ...
    def backward_begins(self, tensors: Any, create_graph: bool) -> None: ...
    def backward_ended(self) -> None: ...
    def optimizer_begins(self, optimizer: Any) -> None: ...
    def optimizer_surrounded(self, optimizer: Any) -> None: ...
    def optimizer_ended(self, optimizer: Any, skipped: bool) -> None: ...
    def optimizer_failed(self) -> None: ...
    def scaler_used(self) -> None: ...
    def profiler_begins(self) -> None: ...
    def profiler_ended(self) -> None: ...
    def paused(self) -> AbstractContextManager[None]: ...


def install_boundaries(listener: LoopListener) -> list[Handle]:
    """Hook what ends a step: optimizers and loss scalers. Also pause for TorchScript and skip replicas."""
    return [*_optimizer_hooks(listener), _scaler_patch(listener), *_script_patches(listener), _replica_patch()]


def install_phases(listener: LoopListener) -> list[Handle]:
    """Hook the parts of a step (autograd, the DataLoader) and the script's own profiler."""
    return [*_backward_patches(listener), *_data_patches(listener), *_profiler_patches(listener)]


def _optimizer_hooks(listener: LoopListener) -> list[Handle]:
    def begins(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and listener.listens():
            listener.optimizer_begins(optimizer)

    def ended(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and listener.listens():
            listener.optimizer_ended(optimizer, skipped=False)

    return [register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ended)]


def install_free_step(listener: LoopListener, ended: Callable[[], None]) -> Handle:
    """Report only optimizer steps, for loops in which one optimizer step is one step."""

    def post_hook(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and listener.listens():
            ended()

    handle: Handle = register_optimizer_step_post_hook(post_hook)
    return handle


def surround_optimizers(listener: LoopListener, optimizers: Iterable[Any]) -> list[Handle]:
    """Report these optimizers from outside torch's own `Optimizer.step` range, for the trace.

    The global hooks run inside that range, so ranges opened there would not nest with it.
    """

    def around(optimizer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not listener.listens():
            return original(*args, **kwargs)
        listener.optimizer_surrounded(optimizer)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            listener.optimizer_failed()
            raise
        listener.optimizer_ended(optimizer, skipped=False)
        return result

    return [Patch(optimizer, "step", functools.partial(around, optimizer)) for optimizer in optimizers]


def _scaler_patch(listener: LoopListener) -> Handle:
    # A GradScaler that finds an infinity does not call the optimizer: the step happened and was skipped.
    def scaler_step(original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not listener.listens():
            return original(scaler, optimizer, *args, **kwargs)
        listener.scaler_used()
        stepped = False

        def mark(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            nonlocal stepped
            stepped = True

        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps the real one
        handle = inner.register_step_pre_hook(mark) if hasattr(inner, "register_step_pre_hook") else None
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()
        if handle is not None and not stepped:
            listener.optimizer_ended(inner, skipped=True)
        return result

    return Patch(torch.amp.GradScaler, "step", scaler_step)


def _backward_patches(listener: LoopListener) -> list[Handle]:
    # Tensor.backward looks up torch.autograd.backward at each call, so this sees every backward.
    def around(position: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not listener.listens():
            return original(*args, **kwargs)
        tensors = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        create_graph = kwargs.get("create_graph") or (len(args) > position and args[position])
        listener.backward_begins(tensors, bool(create_graph))
        try:
            return original(*args, **kwargs)
        finally:
            listener.backward_ended()

    # The second argument is the position of `create_graph` when it is passed by position.
    return [
        Patch(torch.autograd, "backward", functools.partial(around, 3)),
        Patch(torch.autograd, "grad", functools.partial(around, 4)),
    ]


def _data_patches(listener: LoopListener) -> list[Handle]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not listener.listens():
            return original(*args, **kwargs)
        listener.data_begins()
        try:
            return original(*args, **kwargs)
        finally:
            listener.data_ended()

    return [Patch(_BaseDataLoaderIter, "__next__", around), Patch(DataLoader, "__iter__", around)]


def _profiler_patches(listener: LoopListener) -> list[Handle]:
    # PyTorch allows one profiler at a time. The script's own has priority.
    def prepare(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if listener.listens():
            listener.profiler_begins()
        return original(*args, **kwargs)

    def leave(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if listener.listens():
            listener.profiler_ended()
        return result

    profile = torch.autograd.profiler.profile
    return [Patch(profile, "_prepare_trace", prepare), Patch(profile, "__exit__", leave)]


def _script_patches(listener: LoopListener) -> list[Handle]:
    # TorchScript compiles what is attached to a module, and a trace would record our hooks as the model's code.
    def pause(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with listener.paused():
            return original(*args, **kwargs)

    return [Patch(torch.jit, "script", pause), Patch(torch.jit, "trace", pause)]


def _replica_patch() -> Handle:
    # A replica copies its module's attributes, and our hook would send its calls to the original.
    def replicate(original: Callable[..., Any], module: nn.Module) -> Any:
        replica = original(module)
        drop_hooks(replica)
        return replica

    return Patch(nn.Module, "_replicate_for_data_parallel", replicate)


class FirstModuleCall:
    """Reports the first module that is called, then removes itself: the root of an inference loop."""

    def __init__(self, found: Callable[[nn.Module], None]) -> None:
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.remove()
                found(module)
            return original(module, *args, **kwargs)

        self._original, self._wrapper = original, call
        self._handles: list[Handle] = []
        # Dynamo keeps a reference to nn.Module.__call__ when it is imported, and so does each torch.compile(module).
        # Neither may keep ours.
        if "torch._dynamo" in sys.modules:
            self._watch_compile()
        else:
            self._handles.append(AfterImport("torch._dynamo", before=self._detach, after=self._dynamo_imported))
        self._attach()

    def _dynamo_imported(self) -> None:
        self._watch_compile()
        self._attach()

    def _watch_compile(self) -> None:
        def initialize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._detach()
            try:
                return original(*args, **kwargs)
            finally:
                self._attach()

        module = sys.modules["torch._dynamo.eval_frame"]
        self._handles.append(Patch(module.OptimizedModule, "_initialize", initialize))

    def _attach(self) -> None:
        if nn.Module.__call__ is self._original:  # leave the script's own replacement alone
            nn.Module.__call__ = self._wrapper

    def _detach(self) -> None:
        if nn.Module.__call__ is self._wrapper:
            nn.Module.__call__ = self._original

    def remove(self) -> None:
        self._detach()
        remove_all(self._handles)

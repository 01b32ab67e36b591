"""The places in PyTorch where a training loop shows what it is doing, each a handle that comes off again.

None of these runs more than a few times a step: no hook sits on every op or every module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepscope.recorder.launch import AfterImport
from stepscope.recorder.model import drop_hooks
from stepscope.recorder.patches import Handle, Patch, remove_all


class LoopListener(Protocol):
    """What the hooks report, in the order a loop does it. `listens()` is false on other threads."""

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
    """Hook what ends a step: the optimizer, and the loss scaler that may skip it; step aside for TorchScript."""
    return [*_optimizer_hooks(listener), _scaler_patch(listener), *_script_patches(listener), _replica_patch()]


def install_phases(listener: LoopListener) -> list[Handle]:
    """Hook what a step is made of: autograd and the DataLoader; and the profiler, of which there is one."""
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
    """Hear only that an optimizer has stepped: all there is to hear where one optimizer makes the step."""

    def post_hook(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and listener.listens():
            ended()

    handle: Handle = register_optimizer_step_post_hook(post_hook)
    return handle


def surround_optimizers(listener: LoopListener, optimizers: Iterable[Any]) -> list[Handle]:
    """Hear these optimizers from outside torch's own `Optimizer.step` range, for the trace.

    The global hooks run inside that range: ranges of ours that change there would not nest with it.
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
    # A GradScaler that finds an infinity does not call the optimizer: the step took place and was skipped.
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
    # Tensor.backward looks torch.autograd.backward up at each call, so this catches every loop's backward.
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

    # The second figure is where `create_graph` stands when it is not given by name.
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
    # PyTorch has one profiler at a time. The script's own comes first: ours makes way.
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
    # TorchScript compiles what hangs on a module, and a trace would run our hooks as the model's own code.
    def aside(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with listener.paused():
            return original(*args, **kwargs)

    return [Patch(torch.jit, "script", aside), Patch(torch.jit, "trace", aside)]


def _replica_patch() -> Handle:
    # A replica takes its module's attributes along, and our hook would send its calls to the original.
    def replicate(original: Callable[..., Any], module: nn.Module) -> Any:
        replica = original(module)
        drop_hooks(replica)
        return replica

    return Patch(nn.Module, "_replicate_for_data_parallel", replicate)


class FirstModuleCall:
    """Reports the first module that is called at all, then is gone: the root of a loop that only infers."""

    def __init__(self, found: Callable[[nn.Module], None]) -> None:
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.remove()
                found(module)
            return original(module, *args, **kwargs)

        self._original, self._wrapper = original, call
        self._handles: list[Handle] = []
        # Dynamo keeps nn.Module.__call__ when it is imported (it has a short cut for it), and so does each
        # torch.compile(module): neither must keep ours.
        if "torch._dynamo" in sys.modules:
            self._watch_compile()
        else:
            self._handles.append(AfterImport("torch._dynamo", before=self._take_off, after=self._dynamo_is_here))
        self._put_on()

    def _dynamo_is_here(self) -> None:
        self._watch_compile()
        self._put_on()

    def _watch_compile(self) -> None:
        def initialize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._take_off()
            try:
                return original(*args, **kwargs)
            finally:
                self._put_on()

        module = sys.modules["torch._dynamo.eval_frame"]
        self._handles.append(Patch(module.OptimizedModule, "_initialize", initialize))

    def _put_on(self) -> None:
        if nn.Module.__call__ is self._original:  # and not a replacement of the script's own
            nn.Module.__call__ = self._wrapper

    def _take_off(self) -> None:
        if nn.Module.__call__ is self._wrapper:
            nn.Module.__call__ = self._original

    def remove(self) -> None:
        self._take_off()
        remove_all(self._handles)

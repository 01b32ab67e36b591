"""Hooks on the places in PyTorch that show what a training loop does. Each is a handle that can be removed.

Each hook runs only a few times per step: none is on every op or every module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepscope.recorder.asides import install_asides
from stepscope.recorder.loop import Loop
from stepscope.recorder.model import drop_hooks
from stepscope.recorder.patches import Handle, Patch
from stepscope.recorder.probes import Probes


def install(loop: Loop, probes: Probes) -> list[Handle]:
    """Hook what shows a step and its parts, and what lies between steps. The hooks stay until the recording ends.

    PyTorch iterates over its global hooks while it calls them, so none may be added or removed from inside one.
    """
    return [
        *_optimizer_hooks(loop),
        _scaler_patch(loop),
        *_backward_patches(loop),
        *_data_patches(loop),
        *_profiler_patches(loop, probes),
        *_script_patches(loop),
        _replica_patch(),
        *install_asides(loop),
    ]


def _optimizer_hooks(loop: Loop) -> list[Handle]:
    usual = loop.usual

    def begins(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling() or (usual.is_on and usual.optimizer_begins(optimizer)):
            return
        if loop.listens(trains=True):
            loop.optimizer_begins(optimizer)

    def ended(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if torch.compiler.is_compiling() or (usual.is_on and usual.optimizer_ended(optimizer)):
            return
        if loop.listens(trains=True):
            loop.optimizer_ended(optimizer, skipped=False)

    def made(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        loop.optimizer_made(optimizer)

    return [
        Patch(torch.optim.Optimizer, "__init__", made),
        register_optimizer_step_pre_hook(begins),
        register_optimizer_step_post_hook(ended),
    ]


def surround_optimizers(loop: Loop, optimizers: Iterable[Any]) -> list[Handle]:
    """Report these optimizers from outside torch's own `Optimizer.step` range, for the trace.

    The global hooks run inside that range, so ranges opened there would not nest with it.
    """

    def around(optimizer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not loop.listens():
            return original(*args, **kwargs)
        loop.optimizer_surrounded(optimizer)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            loop.optimizer_failed()
            raise
        loop.optimizer_ended(optimizer, skipped=False)
        return result

    return [Patch(optimizer, "step", functools.partial(around, optimizer)) for optimizer in optimizers]


def _scaler_patch(loop: Loop) -> Handle:
    # A GradScaler that finds an infinity does not call the optimizer: the step happened and was skipped.
    def scaler_step(original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not loop.listens():
            return original(scaler, optimizer, *args, **kwargs)
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
            loop.optimizer_ended(inner, skipped=True)
        return result

    return Patch(torch.amp.GradScaler, "step", scaler_step)


def _backward_patches(loop: Loop) -> list[Handle]:
    # Tensor.backward looks up torch.autograd.backward at each call, so this sees every backward.
    usual = loop.usual

    def around(position: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        if usual.is_on and position == 3 and usual.backward_begins(tensors):
            try:
                return original(*args, **kwargs)
            finally:
                if not usual.backward_ended():
                    loop.backward_ended()
        if not loop.listens(trains=True):
            return original(*args, **kwargs)
        inputs = (args[1] if len(args) > 1 else kwargs.get("inputs")) if position == 4 else None
        create_graph = kwargs.get("create_graph") or (len(args) > position and args[position])
        loop.backward_begins(tensors, inputs, bool(create_graph))
        try:
            return original(*args, **kwargs)
        finally:
            loop.backward_ended()

    # The second argument is the position of `create_graph` when it is passed by position.
    return [
        Patch(torch.autograd, "backward", functools.partial(around, 3)),
        Patch(torch.autograd, "grad", functools.partial(around, 4)),
    ]


def _data_patches(loop: Loop) -> list[Handle]:
    usual = loop.usual

    def around(starts: Callable[[Any], bool], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if usual.is_on and usual.data_begins(starts(args[0])):
            try:
                return original(*args, **kwargs)
            finally:
                if not usual.data_ended():
                    loop.data_ended()
        if not loop.listens():
            return original(*args, **kwargs)
        loop.data_begins(starts(args[0]))
        try:
            return original(*args, **kwargs)
        finally:
            loop.data_ended()

    def makes_iterator(loader: Any) -> bool:
        loop.num_prefetched = max(loop.num_prefetched, loader.num_workers * (loader.prefetch_factor or 0))
        return True

    # Making an iterator and waiting for its first batch happens once an epoch: with workers, it can take seconds.
    first = functools.partial(around, lambda iterator: iterator._num_yielded == 0)
    return [
        Patch(_BaseDataLoaderIter, "__next__", first),
        Patch(DataLoader, "__iter__", functools.partial(around, makes_iterator)),
    ]


def _profiler_patches(loop: Loop, probes: Probes) -> list[Handle]:
    # PyTorch allows one profiler at a time. The script's own has priority.
    def prepare(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if loop.listens():
            probes.script_profiler_begins()
        return original(*args, **kwargs)

    def leave(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if loop.listens():
            probes.script_profiler_ended()
        return result

    profile = torch.autograd.profiler.profile
    return [Patch(profile, "_prepare_trace", prepare), Patch(profile, "__exit__", leave)]


def _script_patches(loop: Loop) -> list[Handle]:
    # TorchScript compiles what is attached to a module, and a trace would record our hooks as the model's code.
    def pause(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with loop.paused():
            return original(*args, **kwargs)

    def script(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The names in a class are looked up in the frame of the caller, which is three further up: ours lie between.
        if len(args) < 3:
            kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 3
        return pause(original, *args, **kwargs)

    return [Patch(torch.jit, "script", script), Patch(torch.jit, "trace", pause)]


def _replica_patch() -> Handle:
    # A replica copies its module's attributes, and our hook would send its calls to the original.
    def replicate(original: Callable[..., Any], module: nn.Module) -> Any:
        replica = original(module)
        drop_hooks(replica)
        return replica

    return Patch(nn.Module, "_replicate_for_data_parallel", replicate)

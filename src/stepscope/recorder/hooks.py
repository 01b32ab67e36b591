"""Hooks on the places in PyTorch that show what a training loop does. Each is a handle that can be removed.

Each hook runs only a few times per step: none is on every op or every module.
"""

from __future__ import annotations

import functools
import weakref
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
from stepscope.recorder.modes import unseen
from stepscope.recorder.patches import After, Around, Handle, Patch, Weak
from stepscope.recorder.probes import Probes
from stepscope.recorder.wall import failed


def install(loop: Loop, probes: Probes) -> list[Handle]:
    """Hook what shows a step and its parts, and what lies between steps. The hooks stay until the recording ends.

    PyTorch iterates over its global hooks while it calls them, so none may be added or removed from inside one.
    """
    return [
        *_optimizer_hooks(loop),
        _scaler_patch(loop),
        *_backward_patches(loop),
        *_data_patches(loop, probes),
        *_profiler_patches(loop, probes),
        *_script_patches(loop),
        _replica_patch(),
        *install_asides(loop),
    ]


def _optimizer_hooks(loop: Loop) -> list[Handle]:
    def begins(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        try:
            unseen(report, loop.optimizer_begins, optimizer)
        except Exception as error:
            failed(error)

    def ended(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        try:
            unseen(report, loop.optimizer_ended, optimizer)
        except Exception as error:
            failed(error)

    def report(event: Callable[[Any], None], optimizer: Any) -> None:
        if not torch.compiler.is_compiling() and loop.listens(trains=True):
            event(optimizer)

    def made(optimizer: Any, *_args: Any, **_kwargs: Any) -> After:
        return lambda is_made: loop.optimizer_made(optimizer) if is_made else None

    before, after = loop.usual.optimizer_hooks(begins, ended)
    return [
        Patch(torch.optim.Optimizer, "__init__", made),
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]


def surround_optimizers(loop: Loop, optimizers: Iterable[Any]) -> list[Handle]:
    """Report these optimizers from outside torch's own `Optimizer.step` range, for the trace.

    The global hooks run inside that range, so ranges opened there would not nest with it.
    """

    def begins(optimizer: Any) -> After | None:
        if not loop.listens():
            return None
        loop.optimizer_surrounded(optimizer)
        return lambda has_stepped: loop.optimizer_ended(optimizer) if has_stepped else loop.optimizer_failed()

    def surround(optimizer: Any) -> Handle:
        reference = weakref.ref(optimizer)
        return Weak(Patch(optimizer, "step", lambda *_args, **_kwargs: begins(reference())))

    return [surround(optimizer) for optimizer in optimizers]


def _scaler_patch(loop: Loop) -> Handle:
    # A GradScaler that finds an infinity does not call the optimizer: the step happened and was skipped.
    def begins(_scaler: Any, optimizer: Any, *_args: Any, **_kwargs: Any) -> After | None:
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps the real one
        if not loop.listens() or not hasattr(inner, "register_step_pre_hook"):
            return None
        stepped: list[bool] = []
        handle = inner.register_step_pre_hook(lambda *_: stepped.append(True))

        def ended(has_returned: bool) -> None:
            handle.remove()
            if has_returned and not stepped:
                loop.optimizer_ended(inner, skipped=True)

        return ended

    return Patch(torch.amp.GradScaler, "step", begins)


def _backward_patches(loop: Loop) -> list[Handle]:
    # Tensor.backward looks up torch.autograd.backward at each call, so this sees every backward.
    usual = loop.usual

    def begins(position: int, *args: Any, **kwargs: Any) -> After | None:
        tensors = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        if not loop.listens(trains=True):
            return None
        inputs = (args[1] if len(args) > 1 else kwargs.get("inputs")) if position == 4 else None
        create_graph = kwargs.get("create_graph") or (len(args) > position and args[position])
        loop.backward_begins(tensors, inputs, bool(create_graph))
        return loop.backward_ended

    # The second argument is the position of `create_graph` when it is passed by position.
    return [
        Patch(torch.autograd, "backward", functools.partial(begins, 3), usual.around_backward),
        Patch(torch.autograd, "grad", functools.partial(begins, 4)),
    ]


_LOADER = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "batch_size")


def _data_patches(loop: Loop, probes: Probes) -> list[Handle]:
    usual = loop.usual
    sizes = _BatchSizes()

    def begins(starts: Callable[[Any], bool], one: Any) -> After | None:
        if usual.is_on and usual.data_begins(starts(one)):
            return usual.loader_ended
        if not loop.listens():
            return None
        loop.data_begins(starts(one))

        def ended(has_returned: bool) -> None:
            if has_returned:  # not at the end of an epoch
                loop.facts.fetched(sizes.of_last_batch(one, exactly=loop.facts.by_loader))
            loop.data_ended()

        return ended

    def makes_iterator(loader: Any) -> bool:
        loop.num_prefetched = max(loop.num_prefetched, loader.num_workers * (loader.prefetch_factor or 0))
        probes.facts.setdefault("loader", {name: getattr(loader, name) for name in _LOADER})
        return True

    def is_first(iterator: Any) -> bool:
        return bool(iterator._num_yielded == 0)

    # Making an iterator and waiting for its first batch happens once an epoch: with workers, it can take seconds.
    return [
        sizes,
        Patch(_BaseDataLoaderIter, "__next__", functools.partial(begins, is_first), usual.around_data),
        Patch(DataLoader, "__iter__", functools.partial(begins, makes_iterator)),
    ]


class _BatchSizes:
    """How many samples a DataLoader's batches have. That of an epoch's last one shows in its indices.

    Looking at them costs a little at each fetch, so it begins when an exact number is asked for.
    """

    def __init__(self) -> None:
        self._smaller: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        self._looking: Handle | None = None

    def of_last_batch(self, iterator: Any, exactly: bool) -> int:
        """Return the size of the batch that an iterator gave last, or at least its most; 0 if that is not known."""
        if exactly and self._looking is None:
            self._looking = Around(_BaseDataLoaderIter, "_next_index", self._next_index)
        most = self._most(iterator)
        return self._smaller.get(iterator, {}).get(iterator._num_yielded - 1, most) if most else 0

    def remove(self) -> None:
        if self._looking is not None:
            self._looking.remove()

    def _next_index(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        index = original(iterator)
        if type(index) is list and len(index) < self._most(iterator):
            number = getattr(iterator, "_send_idx", iterator._num_yielded)  # with workers, some are ahead
            self._smaller.setdefault(iterator, {})[number] = len(index)
        return index

    @staticmethod
    def _most(iterator: Any) -> int:
        sampler = getattr(iterator, "_index_sampler", None) if isinstance(iterator, _BaseDataLoaderIter) else None
        size = getattr(sampler, "__dict__", {}).get("batch_size")
        return size if type(size) is int else 0


def _profiler_patches(loop: Loop, probes: Probes) -> list[Handle]:
    # PyTorch allows one profiler at a time. The script's own has priority.
    def prepares(*_args: Any, **_kwargs: Any) -> None:
        if loop.listens():
            probes.script_profiler_begins()

    def leaves(*_args: Any, **_kwargs: Any) -> After:
        return lambda has_left: probes.script_profiler_ended() if has_left and loop.listens() else None

    profile = torch.autograd.profiler.profile
    return [Patch(profile, "_prepare_trace", prepares), Patch(profile, "__exit__", leaves)]


def _script_patches(loop: Loop) -> list[Handle]:
    # TorchScript compiles what is attached to a module, and a trace would record our hooks as the model's code.
    def pauses(*_args: Any, **_kwargs: Any) -> After | None:
        return loop.pause()

    def script(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The names in a class are looked up in the frame of the caller, which is three further up: ours lie between.
        if len(args) < 3:
            kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 3
        resume = loop.pause()
        try:
            return original(*args, **kwargs)
        finally:
            if resume is not None:
                resume(True)

    return [Around(torch.jit, "script", script), Patch(torch.jit, "trace", pauses)]


def _replica_patch() -> Handle:
    # A replica copies its module's attributes, and our hook would send its calls to the original.
    def replicate(original: Callable[..., Any], module: nn.Module) -> Any:
        replica = original(module)
        drop_hooks(replica)
        return replica

    return Around(nn.Module, "_replicate_for_data_parallel", replicate)

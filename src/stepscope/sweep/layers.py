"""Times each layer of a model in one pass, synchronizing between layers.

The first call includes loading, planning and compiling the layer's kernels; later calls are its work alone. Only
layers that are not nested in each other are timed, so none is counted twice.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from stepscope.recorder.model import CallHooks
from stepscope.sweep.measure import synchronize


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules that are called, by name; lists and dicts count as containers.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "blocks": nn.ModuleList([nn.Linear(2, 2)])})
    >>> list(layers_of(model))
    ['embed', 'blocks.0']
    """
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if type(child).forward is nn.Module.forward:  # a container, never called
            found |= {f"{name}.{inner}": layer for inner, layer in layers_of(child).items()}
        else:
            found[name] = child
    return found


@contextmanager
def timed_layers(module: nn.Module, device: str) -> Iterator[dict[str, int]]:
    """Collect the nanoseconds of each layer's forward while the context is active, by name, in call order."""
    times_ns: dict[str, int] = {}
    hooks = [_timed(name, layer, device, times_ns) for name, layer in layers_of(module).items()]
    try:
        yield times_ns
    finally:
        for hook in hooks:
            hook.remove()


def median_layers_ns(run_once: Callable[[], Any], module: nn.Module, num_passes: int, device: str) -> dict[str, int]:
    """Return the median nanoseconds of each layer over several passes."""
    passes = []
    for _ in range(num_passes):
        with timed_layers(module, device) as times_ns:
            run_once()
        passes.append(times_ns)
    return {name: round(statistics.median(times_ns[name] for times_ns in passes)) for name in passes[0]}


def _timed(name: str, layer: nn.Module, device: str, times_ns: dict[str, int]) -> CallHooks:
    began_ns = 0

    def begin(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
        nonlocal began_ns
        synchronize(device)
        began_ns = time.perf_counter_ns()

    def end(_module: nn.Module) -> None:
        synchronize(device)
        times_ns[name] = times_ns.get(name, 0) + time.perf_counter_ns() - began_ns

    return CallHooks(layer, begin, end)

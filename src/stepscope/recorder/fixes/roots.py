"""`autocast`, `compile`, `launch_bound`: changes how the script's root modules are called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stepscope.recorder.compiler.compile_watch import cuda_graphs
from stepscope.recorder.fixes.change import Change
from stepscope.recorder.model import is_compiled, replace_call

WITH_GRAPHS = ("reduce-overhead", "max-autotune")
_HALF = (torch.bfloat16, torch.float16)


class Autocast(Change):
    """Runs root modules under torch.autocast in bfloat16, and casts their outputs back to float32.

    In an autocast region of the script itself, the loss would be computed in float32 too.
    """

    nothing_seen = "no module was called from outside compiled code"

    def use_roots(self, roots: list[nn.Module]) -> None:
        for root in roots:
            name = type(root).__name__
            floats = [p for p in root.parameters() if p.is_floating_point()]
            if floats and all(p.dtype in _HALF for p in floats):
                self.left[f"{name} has its weights in {str(floats[0].dtype).removeprefix('torch.')} already"] += 1
            elif floats:
                replace_call(root, self._under_autocast(floats[0].device.type, name))

    def _under_autocast(self, device: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        counted = f"forwards of {name} under autocast"

        def around(call: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if torch.is_autocast_enabled(device):
                    self.left[f"a forward of {name} is under the script's own autocast"] += 1
                    return call(*args, **kwargs)
                self.changed[counted] += 1
                with torch.autocast(device, dtype=torch.bfloat16):
                    output = call(*args, **kwargs)
                return with_tensors(output, lambda each: each.float() if each.dtype in _HALF else each)

            return forward

        return around


class Compiled(Change):
    """Runs root modules through torch.compile in a given mode."""

    nothing_seen = "no module was called from outside compiled code"

    def __init__(self, value: str | None) -> None:
        super().__init__(value)
        self.mode = value or "default"
        self._num_before = 0

    def use_roots(self, roots: list[nn.Module]) -> None:
        self._num_before = _num_graphs()
        for root in roots:
            if is_compiled(root):
                self.left[f"{type(root).__name__} is compiled already"] += 1
                continue
            replace_call(root, self._compile, compiles=True)
            if self.mode in WITH_GRAPHS and any(p.is_cuda for p in root.parameters()):
                replace_call(root, _cloning)
            self.changed[f"{type(root).__name__} compiled"] += 1

    def _compile(self, call: Callable[..., Any]) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            # An extra frame: Dynamo skips torch's own frames, and would not compile a Sequential at all.
            return call(*args, **kwargs)

        return torch.compile(forward, mode=None if self.mode == "default" else self.mode)

    def finish(self) -> None:
        num_graphs = _num_graphs() - self._num_before
        if self.changed and not num_graphs:
            self.changed.clear()
            self.left["torch.compile found nothing it could compile"] += 1
        self.changed["compiled graphs"] = num_graphs
        if self.mode not in WITH_GRAPHS or not num_graphs:
            return
        graphs = cuda_graphs()
        self.changed["CUDA graphs recorded"] = graphs["num_recorded"] if graphs else 0
        if not self.changed["CUDA graphs recorded"]:
            why = "compile.json of its recording says why" if torch.cuda.is_initialized() else "there is no GPU"
            self.left[f"compiled without CUDA graphs: {why}"] += 1


def _num_graphs() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0


def _cloning(call: Callable[..., Any]) -> Callable[..., Any]:
    """Clone scalars: a loss returned by a CUDA graph is overwritten by the next step."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return with_tensors(call(*args, **kwargs), lambda tensor: tensor if tensor.dim() else tensor.clone())

    return forward


def with_tensors(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a module's output with its tensors changed. Dictionaries are changed in place and keep their type."""
    if isinstance(output, torch.Tensor):
        return change(output)
    if isinstance(output, dict):
        for name, value in list(output.items()):
            output[name] = with_tensors(value, change)
        return output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(with_tensors(value, change) for value in output))
    if type(output) in (list, tuple):
        return type(output)(with_tensors(value, change) for value in output)
    return output

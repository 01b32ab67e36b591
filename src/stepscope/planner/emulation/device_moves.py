"""Where Python asks tensors to be, in a plan for a GPU: PyTorch would look for one before any op runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from stepscope.planner.emulation.dataless import Ghosts
from stepscope.planner.emulation.planned_tensor import CPU, CUDA, HOST, Ghost, parse_to

aten = torch.ops.aten
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_METHODS = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.pin_memory)
_SET_DATA = torch.Tensor.data.__set__
_WATCHED = frozenset((*_device_constructors(), *_METHODS, _SET_DATA))


class Moves(TorchFunctionMode):  # type: ignore[misc]  # torch is not type checked here
    """What Python sends to a CUDA device, and what it leaves on the host.

    Numbers become a host's tensor and are copied, which makes the ghost. A factory is told the host's other name,
    since C++ gives the plain one to whatever it makes for a tensor of the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._moved: list[Ghost] = []
        """What had data when it was moved: most likely made before the plan, and there when it is over."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for ghost in self._moved:
            ghost._stepscope_is_over = True

    def in_backwards(self) -> Any:
        """A patch: the mode is on in autograd's engine too, where a checkpoint's forward runs again."""
        original = torch.autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self in _get_current_function_mode_stack() else self:
                return original(*args, **kwargs)

        return mock.patch.object(torch.autograd, "_engine_run_backward", run)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _WATCHED and kwargs.get("device") is None:
            return func(*args, **kwargs)
        if not any(isinstance(mode, Ghosts) for mode in _get_current_dispatch_mode_stack()):
            return func(*args, **kwargs)
        if func in _METHODS:
            return _moved(func, args, kwargs)
        if func == _SET_DATA:
            return self._set_data(*args)
        device = _device(kwargs.get("device"))
        if func in _FROM_NUMBERS:
            return _from_numbers(func, args, kwargs, device)
        return func(*args, **{**kwargs, "device": HOST if device.type == "cpu" else device})

    def _set_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """`.data =`, as `Module.to` does; a tensor with data that is given a ghost becomes one, whoever holds it."""
        if isinstance(data, Ghost) and not isinstance(tensor, Ghost):
            torch.utils.swap_tensors(tensor, data.detach().requires_grad_(tensor.requires_grad))
            self._moved.append(tensor)
        else:
            _SET_DATA(tensor, data)


def _device(device: Any) -> torch.device:
    if device is None:  # torch.get_default_device() would make a tensor there
        contexts = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
        return contexts[-1].device if contexts else CPU
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _from_numbers(func: Any, args: Any, kwargs: Any, device: torch.device) -> torch.Tensor:
    data = args[0] if args else kwargs.get("data")
    if isinstance(data, Ghost):
        kept = data if func is not torch.tensor else data.detach().clone()
        return kept.to(device if kwargs.get("device") is not None else kept.device, kwargs.get("dtype") or kept.dtype)
    if device.type == "cpu":
        return func(*args, **kwargs)
    options = {**kwargs, "device": "cpu"}
    needs_gradient = options.pop("requires_grad", False)
    return aten._to_copy(func(*args, **options), device=device).requires_grad_(needs_gradient)


def _moved(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """A tensor with data goes to the GPU as a ghost; a ghost knows its own way."""
    tensor = args[0]
    if isinstance(tensor, Ghost):
        return func(*args, **kwargs)
    if func is torch.Tensor.pin_memory:
        return tensor
    if func is torch.Tensor.cuda:
        return aten._to_copy(tensor, device=CUDA)
    device, dtype, _, memory_format = parse_to(args[1:], kwargs)
    if device is None or device.type != "cuda":
        return func(*args, **kwargs)
    return aten._to_copy(tensor, device=device, dtype=dtype, memory_format=memory_format)

"""Handles tensors that Python code sends to a GPU in a plan, before PyTorch looks for a real one."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from stepscope.planner.emulation.dataless import DatalessMode
from stepscope.planner.emulation.planned_tensor import CPU, CUDA, HOST, PlannedTensor, parse_to

aten = torch.ops.aten
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_METHODS = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.pin_memory)
_SET_DATA = torch.Tensor.data.__set__
_WATCHED = frozenset((*_device_constructors(), *_METHODS, _SET_DATA))


class DeviceMoves(TorchFunctionMode):  # type: ignore[misc]  # torch is not type checked here
    """Redirects what Python sends to a CUDA device, and what it leaves on the host.

    Numbers become a host tensor that is copied, which makes it a planned tensor. Factories get the host's other name,
    because C++ uses the plain one for whatever it makes for a GPU tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._moved: list[PlannedTensor] = []
        """Tensors that had data when moved: probably made before the plan, and alive after it."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor in self._moved:
            tensor._stepscope_is_over = True

    def in_backwards(self) -> Any:
        """Return a patch that keeps the mode active in autograd's engine, where checkpoints are recomputed."""
        original = torch.autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self in _get_current_function_mode_stack() else self:
                return original(*args, **kwargs)

        return mock.patch.object(torch.autograd, "_engine_run_backward", run)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _WATCHED and kwargs.get("device") is None:
            return func(*args, **kwargs)
        if not any(isinstance(mode, DatalessMode) for mode in _get_current_dispatch_mode_stack()):
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
        """Handle `.data =`, as used by `Module.to`. A tensor with data becomes a planned tensor everywhere."""
        if isinstance(data, PlannedTensor) and not isinstance(tensor, PlannedTensor):
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
    if isinstance(data, PlannedTensor):
        kept = data if func is not torch.tensor else data.detach().clone()
        return kept.to(device if kwargs.get("device") is not None else kept.device, kwargs.get("dtype") or kept.dtype)
    if device.type == "cpu":
        return func(*args, **kwargs)
    options = {**kwargs, "device": "cpu"}
    needs_gradient = options.pop("requires_grad", False)
    return aten._to_copy(func(*args, **options), device=device).requires_grad_(needs_gradient)


def _moved(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Move a tensor with data to the GPU as a planned tensor. Planned tensors move themselves."""
    tensor = args[0]
    if isinstance(tensor, PlannedTensor):
        return func(*args, **kwargs)
    if func is torch.Tensor.pin_memory:
        return tensor
    if func is torch.Tensor.cuda:
        return aten._to_copy(tensor, device=CUDA)
    device, dtype, _, memory_format = parse_to(args[1:], kwargs)
    if device is None or device.type != "cuda":
        return func(*args, **kwargs)
    return aten._to_copy(tensor, device=device, dtype=dtype, memory_format=memory_format)

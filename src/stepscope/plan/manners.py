"""CUDA's manners on a build of PyTorch that has none: which op a call becomes where the choice depends on the device.

Ghosts have a CPU's dispatch keys, so composite ops take the CPU's way. Registered over it here, for as long as the
context lasts: attention's choice of back end, the fused dropout and RMSNorm, autocast's lists, and the foreach
optimizers that CUDA gets by default.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from stepscope.plan import attention
from stepscope.plan.ghosts import Ghost

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class Manners:
    """Where a plan's tensors are, and while the context lasts, how composite ops behave there."""

    def __init__(self, device: str, compute_capability: tuple[int, int] = (9, 0)) -> None:
        self.device = CUDA if device == "cuda" else torch.device("cpu")
        self.kernels: dict[Any, Callable[..., Any]] = {}
        if device == "cuda":
            self.kernels = {
                aten.dropout.default: _dropout,
                aten.softmax.int: _widening(aten._softmax),
                aten.log_softmax.int: _widening(aten._log_softmax),
                aten.scaled_dot_product_attention.default: attention.on_cuda(compute_capability),
            }
        else:
            self.kernels = {aten.scaled_dot_product_attention.default: attention.on_cpu}
        self._stack = ExitStack()

    def __enter__(self) -> Manners:
        library = torch.library.Library("aten", "IMPL")
        with ExitStack() as stack, warnings.catch_warnings():
            stack.callback(library._destroy)
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for op, kernel in self.kernels.items():
                library.impl(op.name().removeprefix("aten::"), kernel, "AutogradCPU")
            if self.device.type == "cuda":
                # There is a kernel, so that autograd has its own formula for it instead of the parts it is made of.
                library.impl("_fused_rms_norm", _never, "CPU")
                for name, kernel in _autocast_kernels():
                    library.impl(name, kernel, "AutocastCPU")
                stack.callback(register_optimizer_step_pre_hook(_prefer_foreach).remove)
                for patch in _patches():
                    stack.enter_context(patch)
                stack.enter_context(_Moves())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _Moves(TorchFunctionMode):  # type: ignore[misc]
    """What Python sends to a CUDA device, where PyTorch would look for one before any op runs.

    Numbers become a host's tensor and are copied, which makes the ghost; a ghost is there already.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and _is_cuda(kwargs.get("device")):
            needs_gradient = kwargs.pop("requires_grad", False)
            host = func(*args, **{**kwargs, "device": "cpu"})
            return aten._to_copy(host, device=kwargs["device"]).requires_grad_(needs_gradient)
        if func is torch.Tensor.cuda:
            return self._moved(args[0], None, None, False)
        if func is torch.Tensor.to and not (len(args) > 1 and isinstance(args[1], torch.Tensor)):
            is_copy = kwargs.pop("copy", False)
            device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
            if _is_cuda(device):
                return self._moved(args[0], dtype, memory_format, is_copy)
            kwargs["copy"] = is_copy
        return func(*args, **kwargs)

    def _moved(self, tensor: Any, dtype: Any, memory_format: Any, is_copy: bool) -> torch.Tensor:
        if not isinstance(tensor, Ghost):
            return aten._to_copy(tensor, device=CUDA, dtype=dtype, memory_format=memory_format)
        options = {} if memory_format is None else {"memory_format": memory_format}
        return torch.Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=is_copy, **options)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _patches() -> Iterator[Any]:
    """What in torch would find out that there is no CUDA device."""
    yield mock.patch.object(torch.autocast, "__init__", _autocast_anywhere(torch.autocast.__init__))
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        yield mock.patch.object(torch, name, _of_cpu(getattr(torch, name)))
    yield mock.patch.object(torch.cuda, "_lazy_init", lambda: None)
    for name in ("synchronize", "empty_cache"):
        yield mock.patch.object(torch.cuda, name, lambda *args: None)


def _never(*args: Any) -> Any:
    raise AssertionError("a ghost's op never reaches a kernel")


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros_like(x)
    return aten.native_dropout(x, p, True)[0]


def _widening(op: Any) -> Callable[..., torch.Tensor]:
    """A softmax of half-precision numbers that gives float32 reads them as they are: no converted copy."""

    def kernel(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if _is_low(x) and dtype is torch.float32:
            return op(x, dim, True)
        return op(x if dtype is None else x.to(dtype), dim, False)

    return kernel


def _prefer_foreach(optimizer: Any, args: Any, kwargs: Any) -> None:
    """What torch.optim does on CUDA where nothing was chosen."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not group.get("differentiable", False)


def _autocast_anywhere(init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and not args and "dtype" not in kwargs:
            kwargs["dtype"] = torch.float16  # CUDA's own default
        init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return __init__


def _of_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any) -> Any:
        return function(*("cpu" if value == "cuda" else value for value in args))

    return asked


# --- autocast: the CPU's lists differ from CUDA's in what is computed in float32 ---


LISTS = ("AT_FORALL_LOWER_PRECISION_FP", "AT_FORALL_FP32", "AT_FORALL_FP32_SET_OPT_DTYPE", "AT_FORALL_PROMOTE")


def autocast_list(macro: str) -> list[str]:
    """The ops of one of CUDA's autocast lists, from the header of the PyTorch that is installed, as `name.overload`.

    >>> "softmax.int" in autocast_list("AT_FORALL_FP32_SET_OPT_DTYPE")
    True
    """
    text = _HEADER.read_text(encoding="utf-8")
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)+.*)", text)
    pairs = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1)) if body else []
    return [f"{name}.{overload}" if overload else name for name, overload in pairs]


def _autocast_kernels() -> Iterator[tuple[str, Any]]:
    of_cuda = {name for macro in LISTS for name in autocast_list(macro)}
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"):
        if name.startswith("aten::") and name.removeprefix("aten::") not in of_cuda:
            yield name.removeprefix("aten::"), torch.library.fallthrough_kernel
    for name in autocast_list("AT_FORALL_FP32"):
        if (op := _op(name)) is not None:
            yield name, _in_float32(op)
    for name in autocast_list("AT_FORALL_FP32_SET_OPT_DTYPE"):
        if (op := _op(name)) is not None:
            yield name, _with_float32(op)
    for name in autocast_list("AT_FORALL_PROMOTE"):
        if (op := _op(name)) is not None:
            yield name, _in_widest(op)


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _mapped(value: Any, dtype: torch.dtype) -> Any:
    if _is_low(value):
        return value.to(dtype)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, dtype) for part in value)
    return value


def _in_float32(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return op(*_mapped(args, torch.float32), **{k: _mapped(v, torch.float32) for k, v in kwargs.items()})

    return kernel


def _with_float32(op: Any) -> Callable[..., Any]:
    places = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            named = {**dict(zip(places, args)), **kwargs}
            if _is_low(args[0]) and named.get("dtype") is None:
                named["dtype"] = torch.float32
            given = [named.pop(place) for place in places[: len(args)]]
            return op(*given, **named)

    return kernel


def _in_widest(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            is_wide = any(isinstance(a, torch.Tensor) and a.dtype is torch.float32 for a in args)
            return op(*_mapped(args, torch.float32) if is_wide else args, **kwargs)

    return kernel

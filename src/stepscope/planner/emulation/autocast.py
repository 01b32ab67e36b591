"""CUDA's autocast on a PyTorch build without CUDA: registers CUDA's op lists under the CPU's dispatch key."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from stepscope.errors import UsageError
from stepscope.planner.emulation.ops import mapped
from stepscope.recorder.values import tensors_in

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

LISTS = ("AT_FORALL_LOWER_PRECISION_FP", "AT_FORALL_FP32", "AT_FORALL_FP32_SET_OPT_DTYPE", "AT_FORALL_PROMOTE")


def autocast_list(macro: str) -> list[str]:
    """Return the ops of one of CUDA's autocast lists, from the installed PyTorch's header, as `name.overload`.

    Empty if the header does not have the list.

    >>> "softmax.int" in autocast_list("AT_FORALL_FP32_SET_OPT_DTYPE")
    True
    """
    text = _HEADER.read_text(encoding="utf-8") if _HEADER.is_file() else ""
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)+.*)", text)
    pairs = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1)) if body else []
    return [f"{name}.{overload}" if overload else name for name, overload in pairs]


def patches() -> Iterator[Any]:
    """Yield patches that redirect CUDA's autocast functions to the CPU's."""
    yield mock.patch.object(torch.autocast, "__init__", _anywhere(torch.autocast.__init__))
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        yield mock.patch.object(torch, name, partial(_on_cpu, getattr(torch, name)))
    yield mock.patch.object(torch, "get_autocast_gpu_dtype", partial(torch.get_autocast_dtype, "cpu"))
    yield mock.patch.object(torch, "set_autocast_gpu_dtype", partial(torch.set_autocast_dtype, "cpu"))


def _anywhere(init: Callable[..., None]) -> Callable[..., None]:
    missing = [macro for macro in LISTS if not autocast_list(macro)]

    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if missing and device_type == "cuda" and (args[1] if len(args) > 1 else kwargs.get("enabled", True)):
            raise UsageError(
                f"autocast: torch {torch.__version__} lacks the lists {', '.join(missing)} in {_HEADER.name}, which "
                "define autocast on a GPU: plan without autocast (--dtype fp32 or bf16), or with another torch"
            )
        if device_type == "cuda" and not args and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float16  # CUDA's own default
        init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return __init__


def _on_cpu(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not any(isinstance(value, str) for value in (*args, *kwargs.values())):
        args = ("cuda", *args)  # without a device, these functions refer to CUDA
    plain = {name: "cpu" if value == "cuda" else value for name, value in kwargs.items()}
    return function(*("cpu" if value == "cuda" else value for value in args), **plain)


def kernels() -> Iterator[tuple[str, Any]]:
    """Yield the name and kernel of every op that CUDA's autocast handles."""
    of_cuda = {name for macro in LISTS for name in autocast_list(macro)}
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"):
        if name.startswith("aten::") and name.removeprefix("aten::") not in of_cuda:
            yield name.removeprefix("aten::"), torch.library.fallthrough_kernel
    for macro, change in zip(LISTS[1:], (_in_float32, _with_float32, _in_widest)):
        for name in autocast_list(macro):
            packet, _, overload = name.partition(".")
            if (op := getattr(getattr(aten, packet, None), overload or "default", None)) is not None:
                yield name, partial(_changed, op, change)


def _changed(op: Any, change: Callable[..., tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
    """Run an op outside of autocast, with arguments changed as autocast would."""
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        args, kwargs = change(op, args, kwargs)
        return op(*args, **kwargs)


def is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALF


def _widened(value: Any) -> Any:
    return value.to(torch.float32) if is_low(value) else value


def _in_float32(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return mapped(_widened, args), mapped(_widened, kwargs)


def _with_float32(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    places = [argument.name for argument in op._schema.arguments]
    named = {**dict(zip(places, args)), **kwargs}
    if is_low(args[0]) and named.get("dtype") is None:
        named["dtype"] = torch.float32
    return [named.pop(place) for place in places[: len(args)]], named


def _in_widest(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    is_wide = any(tensor.dtype is torch.float32 for tensor in tensors_in(args))
    return mapped(_widened, args) if is_wide else args, kwargs

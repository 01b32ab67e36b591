"""The outputs of ops on meta tensors, from an op's own meta kernel where that is correct, cached by input shapes."""

from collections.abc import Callable
from typing import Any

import torch

from stepscope.planner.emulation.arguments import meta_like
from stepscope.planner.emulation.op_kinds import Kind
from stepscope.planner.emulation.planned_tensor import META, DataNeeded
from stepscope.recorder.ledger.storages import tensors_in

aten = torch.ops.aten


def _widened(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float32 if half_to_float else x.dtype)


def _grouped(a: torch.Tensor, b: torch.Tensor, ends: Any = None, bias: Any = None, dtype: Any = None) -> torch.Tensor:
    if a.dtype is torch.bfloat16:
        return aten._grouped_mm.default(a, b, ends, bias, dtype)
    groups = () if a.dim() != b.dim() else (len(a) if ends is None else len(ends),)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=dtype)


SHAPES: dict[Any, Callable[..., Any]] = {
    # Their meta kernels reject what a GPU does: read bfloat16 and write float32.
    aten._softmax.default: _widened,
    aten._log_softmax.default: _widened,
    # As many bins as requested: more would depend on data.
    aten.bincount.default: lambda x, weights=None, minlength=0: torch.empty(
        minlength, dtype=torch.int64, device=META
    ),
    aten._amp_foreach_non_finite_check_and_unscale_.default: lambda *args: None,  # scales and checks in place
    aten._amp_update_scale_.default: lambda scale, *args: scale,
}  # outputs of ops without a correct meta kernel
if hasattr(aten, "_grouped_mm"):  # torch 2.8 and later. Its meta kernel supports only bfloat16
    SHAPES[aten._grouped_mm.default] = _grouped


class Shapes:
    """Runs ops on meta tensors. Those that make new tensors are slow in Python, so their shapes are cached."""

    def __init__(self) -> None:
        self._seen: dict[Any, Any] = {}

    def run(self, func: Any, kind: Kind, args: Any, kwargs: Any) -> Any:
        if kind.only_writes:
            position, name = kind.written[0]
            written = args[position] if position < len(args) else kwargs[name]
            return written if func._schema.returns else None
        try:
            if not kind.is_new or kwargs:
                return SHAPES.get(func, func)(*args, **kwargs)
            key = (func, *map(_look, args))
            if key in self._seen:
                return meta_like(self._seen[key])
            out = SHAPES.get(func, func)(*args)
        except NotImplementedError as error:
            raise DataNeeded(
                f"the op {func}, whose output shape is unknown unless it runs",
                "torch.library.register_fake defines one",
            ) from error
        outputs, inputs = ({t.untyped_storage()._cdata for t in tensors_in(values)} for values in (out, args))
        if not outputs & inputs:  # the schema of `_unsafe_view` does not say that it shares its input's memory
            self._seen[key] = meta_like(out)
        return out


def _look(value: Any) -> Any:
    """Return what decides the shapes of new tensors about an argument."""
    if isinstance(value, torch.Tensor):
        return (*value.shape, *value.stride(), value.dtype, value.is_meta)
    if isinstance(value, list | tuple):
        return (type(value), *map(_look, value))
    return (type(value), str(value))

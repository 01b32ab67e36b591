"""Ops on planned tensors: their properties, their arguments without wrappers, the shapes of their outputs."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.nn import Parameter

from stepscope.planner.emulation.planned_tensor import META, DataNeeded, PlannedTensor, like
from stepscope.recorder.values import tensors_in

aten = torch.ops.aten
VALUES = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.item.default)
"""Ops that return a Python number."""
_OVERWRITING = ("fill_", "zero_", "copy_", "random_", "uniform_", "normal_", "bernoulli_")
_ON_ONE_DEVICE = ("mm", "addmm", "bmm", "baddbmm", "embedding", "convolution", "native_layer_norm", "cat")


class Kind:
    def __init__(self, func: Any) -> None:
        schema, tags = func._schema, func.tags
        name = func.name()
        is_aten = func.namespace == "aten"
        plain = schema.name.partition("::")[2]
        self.is_lift = func is aten.lift_fresh.default
        self.is_sum = func is aten.add.Tensor
        self.gives_number = func in VALUES
        self.written = tuple(
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        self.overwrites = plain in _OVERWRITING
        self.changes_shape = torch.Tag.inplace_view in tags
        self.has_dynamic_shape = torch.Tag.dynamic_output_shape in tags
        self.is_random = torch.Tag.nondeterministic_seeded in tags
        self.keeps_values = is_aten and "empty" not in plain
        is_new = not schema.is_mutable and all(result.alias_info is None for result in schema.returns)
        self.is_new = is_aten and is_new and not self.gives_number and not self.has_dynamic_shape
        # Not every fused optimizer has a meta kernel. Ops that only write and return nothing need none.
        is_written = is_aten and (plain.startswith("_foreach") or not schema.returns)
        self.only_writes = bool(self.written) and (self.is_random or is_written)
        self.needs_one_device = plain in _ON_ONE_DEVICE or (torch.Tag.pointwise in tags and "copy" not in plain)
        names = [argument.name for argument in schema.arguments]
        self.device_at = names.index("device") if "device" in names else None
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        self.is_composite = is_aten and has(name, "CompositeImplicitAutograd") and not has(name, "CPU")
        # What torch.library.custom_op wraps: running it instead of the op's fake shows its allocations.
        definition = None if is_aten else OPDEFS.get(schema.name)
        functions = {} if definition is None else definition._backend_fns
        self.body = functions.get("cuda") or functions.get(None)

    def device(self, args: Any, kwargs: Any) -> torch.device | None:
        place = len(args) if self.device_at is None else self.device_at
        found: torch.device | None = args[place] if place < len(args) else kwargs.get("device")
        return found

    def makes_tensors(self, args: Any, kwargs: Any) -> bool:
        """Return whether an op without planned inputs makes one: a factory, or a copy to another device."""
        if self.device_at is None:
            return False
        device = self.device(args, kwargs)
        if device is not None and device.type == "meta":
            return False  # the program's own meta tensors
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        is_sent = device is not None and (device.type != "cpu" or any(tensor.is_meta for tensor in tensors))
        return not tensors or is_sent

    def without_device(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of an op that takes a device, with `meta` in its place."""
        if self.device_at is not None and self.device_at < len(args):
            args[self.device_at] = META
            return args, kwargs
        kwargs = {**kwargs, "device": META}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return args, kwargs


@functools.cache
def kind_of(func: Any) -> Kind:
    return Kind(func)


PLANNED, HOSTED, NUMBER, REAL = 1, 2, 4, 8
"""Flags for an op's arguments: planned tensors on the device, on the host, on the host without dimensions; and
tensors with data."""
DATALESS = PLANNED | HOSTED | NUMBER


def unwrapped(arguments: Any, planned: torch.device) -> tuple[list[Any], int]:
    """Return the arguments with planned tensors replaced by meta tensors, and flags for what they contain."""
    inner: list[Any] = []
    seen = 0
    for value in arguments:
        kind = type(value)
        if kind is PlannedTensor:
            inner.append(value._stepscope_inner)
            if value._stepscope_device is planned:
                seen |= PLANNED
            else:
                seen |= HOSTED if value.dim() else NUMBER
        elif kind is list or kind is tuple:
            parts, more = unwrapped(value, planned)
            inner.append(parts if kind is list else tuple(parts))
            seen |= more
        else:
            inner.append(value)
            if (kind is torch.Tensor or kind is Parameter) and value.dim():
                seen |= REAL
    return inner, seen


def wrapped(out: Any, device: torch.device, outer: tuple[Any, ...], inner: tuple[Any, ...]) -> Any:
    """Return the outputs with meta tensors wrapped. An input that is returned stays the same object."""
    if isinstance(out, torch.Tensor):
        for planned, tensor in zip(outer, inner):
            if tensor is out:
                return planned
        return PlannedTensor(out, device) if out.is_meta else out
    if isinstance(out, tuple | list):
        return type(out)([wrapped(part, device, outer, inner) for part in out])
    return out


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with `change` applied to it, or to what is in its lists, tuples and dictionaries."""
    if isinstance(value, dict):
        return {name: mapped(change, part) for name, part in value.items()}
    return type(value)([mapped(change, part) for part in value]) if isinstance(value, list | tuple) else change(value)


def meta_like(value: Any) -> Any:
    return mapped(lambda part: like(part, META) if isinstance(part, torch.Tensor) else part, value)


def without_data(value: Any) -> Any:
    """Return the arguments with meta tensors for those that have data and dimensions."""

    def changed(part: Any) -> Any:
        has_data = isinstance(part, torch.Tensor) and part.dim() and not part.is_meta
        return like(part, META) if has_data else part

    return mapped(changed, value)


aten = torch.ops.aten


def _widened(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float32 if half_to_float else x.dtype)


def _grouped(a: torch.Tensor, b: torch.Tensor, ends: Any = None, bias: Any = None, dtype: Any = None) -> torch.Tensor:
    if a.dtype is torch.bfloat16:
        return aten._grouped_mm.default(a, b, ends, bias, dtype)
    groups = () if a.dim() != b.dim() else (len(a) if ends is None else len(ends),)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=dtype)


def _loss(func: Any) -> Callable[..., torch.Tensor]:
    """Return the shape of a loss whose kernels make it of the memory of all it is a mean or sum of."""

    def shape(x: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = func(x, target, *args, **kwargs)
        if out.dim():
            return out
        elements = torch.broadcast_shapes(x.shape, target.shape)
        return torch.empty(elements, dtype=out.dtype, device=META).as_strided((), ())

    return shape


LOSSES = (
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
)  # fmt: skip
SHAPES: dict[Any, Callable[..., Any]] = {
    **{func: _loss(func) for func in LOSSES},
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
    """Runs ops on meta tensors. Those that make new tensors are slow in Python, so their shapes are cached.

    `ask(func, args, kwargs)` may return meta tensors like an op's outputs, or NotImplemented.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, Any] = {}
        self.ask: Callable[[Any, Any, Any], Any] = lambda func, args, kwargs: NotImplemented

    def run(self, func: Any, kind: Kind, args: Any, kwargs: Any) -> Any:
        if kind.only_writes:
            position, name = kind.written[0]
            written = args[position] if position < len(args) else kwargs[name]
            return written if func._schema.returns else None
        try:
            if not kind.is_new or kwargs:
                return SHAPES.get(func, func)(*args, **kwargs)
            key = (func, *map(look, args))
            if key in self._seen:
                return meta_like(self._seen[key])
            if (out := self.ask(func, args, kwargs)) is not NotImplemented:
                return out
            out = SHAPES.get(func, func)(*args)
        except NotImplementedError as error:
            raise DataNeeded(
                f"the op {func}, whose output shape is unknown unless it runs",
                "torch.library.register_fake defines one",
            ) from error
        outputs, inputs = ({t.untyped_storage()._cdata for t in tensors_in(values)} for values in (out, args))
        # The schema of `_unsafe_view` does not say that it shares its input's memory; a loss has more than its shape.
        if not outputs & inputs and func not in LOSSES:
            self._seen[key] = meta_like(out)
        return out


def look(value: Any) -> Any:
    """Return what decides the shapes of new tensors about an argument."""
    if isinstance(value, torch.Tensor):
        return (*value.shape, *value.stride(), value.dtype, value.is_meta)
    if isinstance(value, list | tuple):
        return (type(value), *map(look, value))
    return (type(value), str(value))

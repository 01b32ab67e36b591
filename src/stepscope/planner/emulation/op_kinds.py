"""Properties of an op that do not depend on its inputs."""

import functools
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

aten = torch.ops.aten
META = torch.device("meta")
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

"""Tensors without data: every op runs on `meta`, while autograd, autocast and the program believe in a device.

A ghost carries a meta tensor, and `Ghosts`, the mode, unwraps, runs and wraps. What stays real: tensors made from
Python numbers (`torch.tensor`), which live on the host in a training script too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from stepscope.errors import UsageError
from stepscope.plan import values
from stepscope.plan.kinds import Kind, kind_of
from stepscope.plan.launches import launching_nothing
from stepscope.plan.tensors import HOST, META, Ghost
from stepscope.plan.values import DataNeeded, known_values, users_place
from stepscope.record.nodes import backward_runs

__all__ = ["DataNeeded", "Ghost", "Ghosts"]

aten = torch.ops.aten
PLANNED, HOSTED, NUMBER, REAL = 1, 2, 4, 8
"""What is among the arguments of an op: ghosts of the planned device, of the host, of the host without dimensions;
tensors with data."""
GHOSTS = PLANNED | HOSTED | NUMBER


def _widened(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float32 if half_to_float else x.dtype)


def _counted(x: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
    return torch.empty(minlength, dtype=torch.int64, device=META)


def _unscaled(*args: Any) -> None:
    """Gradients are divided, and found to be finite or not, in place."""


def _grouped(a: torch.Tensor, b: torch.Tensor, ends: Any = None, bias: Any = None, dtype: Any = None) -> torch.Tensor:
    if a.dtype is torch.bfloat16:
        return aten._grouped_mm.default(a, b, ends, bias, dtype)
    groups = () if a.dim() != b.dim() else (len(a) if ends is None else len(ends),)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=dtype)


SHAPES: dict[Any, Callable[..., Any]] = {
    # Their own meta kernels refuse what a GPU does: bfloat16 read, float32 written.
    aten._softmax.default: _widened,
    aten._log_softmax.default: _widened,
    # As many bins as are asked for: more would be data.
    aten.bincount.default: _counted,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
    aten._amp_update_scale_.default: lambda scale, *args: scale,
}
"""Outputs of ops that have no meta kernel, or not the right one."""
if hasattr(aten, "_grouped_mm"):  # torch 2.8 and later; its meta kernel knows bfloat16 alone, a loop runs the others
    SHAPES[aten._grouped_mm.default] = _grouped
IN_PLACE = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
}
"""What autograd's formulas do to zeros that they have just made, unless tensors are of a subclass."""
ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


class Ghosts(TorchDispatchMode):  # type: ignore[misc]  # torch is not type checked here
    """Makes every new tensor a ghost: of `device`, or of the host where the program asks for that.

    `kernels`: what an op that is made of others becomes on this device. `after_op(func, args, kwargs, out)` is told
    of each op of `device` when it has run, with meta tensors.
    """

    def __init__(
        self,
        device: torch.device,
        kernels: Mapping[Any, Callable[..., Any]],
        after_op: Callable[[Any, Any, Any, Any], None],
    ) -> None:
        super().__init__()
        self._device = device
        self._kernels = kernels
        self._after_op = after_op
        self._shapes: dict[Any, Any] = {}
        self._zeros: weakref.ref[Ghost] | None = None  # what the last op gave, if those are zeros
        self.unseen: dict[str, str] = {}
        """Ops that hide what they allocate, and why."""
        self.assumptions: set[str] = set()
        """What was taken for granted where only data would tell."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a plan, and the wrapper would cost time at every op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # in a backward the program's modes are on, for what it runs again
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        inner_args, seen = _opened(args, self._device)
        inner_kwargs = kwargs
        if kwargs:
            parts, more = _opened(kwargs.values(), self._device)
            inner_kwargs, seen = dict(zip(kwargs, parts)), seen | more
        if not seen & GHOSTS:
            if kind.is_lift or not kind.makes_tensors(args, kwargs):
                return func(*args, **kwargs)
        elif (kernel := self._kernels.get(func)) is not None:
            with self:
                return kernel(*args, **kwargs)
        elif kind.is_composite:
            # Below autograd nobody has taken it apart yet.
            with self:
                return func.decompose(*args, **kwargs)
        elif kind.gives_number:
            known = known_values((*args, *kwargs.values()))
            if known is None:
                raise DataNeeded("a value of a tensor (if, while, int(), .item(), torch.equal)")
            with _disable_current_modes():
                return func(*known)
        device = self._place(kind, args, kwargs, seen)
        if kind.device_at is not None:
            inner_args, inner_kwargs = kind.without_device(inner_args, inner_kwargs)
            if device is META:
                return func(*inner_args, **inner_kwargs)
        if kind.is_sum and _is_engine_sum(args):
            return args[0]
        if func in IN_PLACE and self._zeros is not None and args[0] is self._zeros() and _is_formula():
            return self._dispatched(IN_PLACE[func], args, kwargs)
        if kind.body is not None and (found := self._run_body(func, kind.body, args, kwargs)) is not NotImplemented:
            return found
        if kind.has_dynamic_shape and _is_sized_by_values(func, args, kwargs):
            known = known_values(args)
            if known is not None:
                return self._sized(func, kind, known, kwargs, device)
            if func not in SHAPES:
                raise DataNeeded(
                    f"a size that follows from values ({func.__name__})",
                    "torch.where and masked_fill keep sizes; or give every part a fixed capacity",
                )
        out = self._run(func, kind, inner_args, inner_kwargs)
        if kind.changes_shape:
            with self:
                torch.Tensor.data.__set__(args[0], Ghost(args[0]._stepscope_inner, device))
        if device is self._device:
            self._after_op(func, inner_args, inner_kwargs, out)
        wrapped = _wrapped(out, device, (*args, *kwargs.values()), (*inner_args, *inner_kwargs.values()))
        self._zeros = weakref.ref(wrapped) if func in ZEROS else None
        if type(wrapped) is Ghost or kind.written or type(wrapped) in (list, tuple):
            values.keep(wrapped, func, kind, args, kwargs, device.type == "cpu")
        return wrapped

    def _place(self, kind: Kind, args: Any, kwargs: Any, seen: int) -> torch.device:
        """The device of what an op gives."""
        if kind.device_at is not None and (device := kind.device(args, kwargs)) is not None:
            return self._asked(device, bool(kwargs.get("pin_memory")))
        if kind.needs_one_device and seen & PLANNED and seen & (HOSTED | REAL) and self._device.type != "cpu":
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {self._device} and "
                f"cpu! (at {users_place()})"
            )
        if kind.written:
            position, name = kind.written[0]
            target = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(target, list | tuple):
                target = next(iter(target), None)
            if type(target) is Ghost:
                return target._stepscope_device
            if isinstance(target, torch.Tensor):
                raise DataNeeded(
                    "what to write into a tensor that was made from numbers", "make that tensor with torch.zeros"
                )
        return self._device if seen & PLANNED or not seen & GHOSTS else HOST

    def _asked(self, device: torch.device, is_pinned: bool) -> torch.device:
        if device.type == "meta":
            return META
        if self._device.type != "cpu":
            if is_pinned or device == HOST:
                return HOST
            if device.type == "cpu" or (device.type == self._device.type and device.index in (None, 0)):
                return self._device
        elif device.type == "cpu":
            return self._device
        raise UsageError(
            f"the program asks for the device {device} at {users_place()}: the plan is for one device, {self._device}"
        )

    def _run(self, func: Any, kind: Kind, args: Any, kwargs: Any) -> Any:
        """The op on meta tensors; one that makes new ones, slow to ask in Python, is asked once for such inputs."""
        if kind.only_writes:
            return args[0] if func._schema.returns else None
        try:
            if not kind.is_new or kwargs:
                return SHAPES.get(func, func)(*args, **kwargs)
            key = (func, *map(_look, args))
            seen = self._shapes.get(key)
            if seen is not None:
                return _made(seen)
            out = SHAPES.get(func, func)(*args)
        except NotImplementedError as error:
            raise DataNeeded(
                f"the op {func}, whose output's shape is not known without running it",
                "torch.library.register_fake gives it one",
            ) from error
        if not _is_part(out, args):
            self._shapes[key] = _made_like(out)
        return out

    def _sized(self, func: Any, kind: Kind, known: list[Any], kwargs: Any, device: torch.device) -> Any:
        """What an op gives whose outputs are as large as the values of its inputs say."""
        real = values.run(func, kind, known, kwargs)
        out = _meta(real)
        if device is self._device:
            self._after_op(func, _meta(known), kwargs, out)
        wrapped = _wrapped(out, device, (), ())
        values.give(wrapped, real)
        return wrapped

    def _run_body(self, func: Any, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            with self, launching_nothing(may_import=True):
                return body(*args, **kwargs)
        except (DataNeeded, UsageError):
            raise
        except Exception as error:
            self.unseen.setdefault(str(func), f"what it takes inside is not seen ({type(error).__name__}: {error})")
            return NotImplemented


def _opened(arguments: Any, planned: torch.device) -> tuple[list[Any], int]:
    """The arguments with meta tensors for ghosts, and what there is among them."""
    inner: list[Any] = []
    seen = 0
    for value in arguments:
        kind = type(value)
        if kind is Ghost:
            inner.append(value._stepscope_inner)
            if value._stepscope_device is planned:
                seen |= PLANNED
            else:
                seen |= HOSTED if value.dim() else NUMBER
        elif kind is list or kind is tuple:
            parts, more = _opened(value, planned)
            inner.append(parts if kind is list else tuple(parts))
            seen |= more
        else:
            inner.append(value)
            if kind is torch.Tensor and value.dim():
                seen |= REAL
    return inner, seen


def _wrapped(out: Any, device: torch.device, outer: tuple[Any, ...], inner: tuple[Any, ...]) -> Any:
    if isinstance(out, torch.Tensor):
        for ghost, tensor in zip(outer, inner):
            if tensor is out:
                return ghost
        return Ghost(out, device) if out.is_meta else out
    if isinstance(out, tuple | list):
        return type(out)([_wrapped(part, device, outer, inner) for part in out])
    return out


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, list | tuple):
        return type(value)([_meta(part) for part in value])
    return value


def _look(value: Any) -> Any:
    """What of an argument decides over the shapes of new tensors."""
    if isinstance(value, torch.Tensor):
        return (*value.shape, *value.stride(), value.dtype, value.is_meta)
    if isinstance(value, list | tuple):
        return (type(value), *map(_look, value))
    return (type(value), str(value))


class _Shape(NamedTuple):
    size: Any
    stride: Any
    dtype: torch.dtype


def _made_like(out: Any) -> Any:
    """All that is needed to make such tensors again."""
    if isinstance(out, torch.Tensor):
        return _Shape(out.shape, out.stride(), out.dtype)
    return type(out)([_made_like(part) for part in out]) if isinstance(out, list | tuple) else out


def _made(like: Any) -> Any:
    if isinstance(like, _Shape):
        return torch.empty_strided(like.size, like.stride, dtype=like.dtype, device=META)
    return type(like)([_made(part) for part in like]) if isinstance(like, list | tuple) else like


def _is_part(out: Any, args: Any) -> bool:
    """Whether an output lies in an input's memory: no schema says so of `_unsafe_view`."""
    outputs, inputs = ({t.untyped_storage()._cdata for t in _tensors(values)} for values in (out, args))
    return bool(outputs & inputs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _is_sized_by_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op that may give as many elements as the values say does so for these arguments."""
    if func is aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return kwargs.get("output_size") is None


def _is_formula() -> bool:
    """Whether autograd computes gradients; where it recomputes a checkpoint, gradients are enabled."""
    return not torch.is_grad_enabled() and backward_runs()


def _is_engine_sum(args: Any) -> bool:
    """Whether autograd's engine adds a second gradient to a first that nobody else has.

    To a plain tensor it adds in place; of a subclass it makes a new one.
    """
    if not _is_formula():
        return False
    if torch._C._current_autograd_node() is not None or len(args) != 2:
        return False
    first, second = args
    if type(first) is not Ghost or type(second) is not Ghost:
        return False
    if first.shape != second.shape or first.dtype is not second.dtype:
        return False
    storage = first._stepscope_inner.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 2)

"""Tensors without data: every op runs on `meta`, while autograd, autocast and the program believe in a device.

PyTorch takes a ghost for a tensor on the CPU, so that any build has dispatch keys for it; Python code that asks sees
the device that is planned for. A ghost carries a meta tensor, and `Ghosts`, the mode, unwraps, runs and wraps. What
stays real: tensors made from Python numbers (`torch.tensor`), which live on the host in a training script too.

Whole numbers that follow from sizes alone (positions, masks of positions) keep their values beside them, so that a
program may look at them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten
MOST_VALUES = 1 << 20
CPU, META = torch.device("cpu"), torch.device("meta")
VALUES = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.item.default)
"""Ops that give a Python number."""


def _widened(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float32 if half_to_float else x.dtype)


def _counted(x: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
    return torch.empty(minlength, dtype=torch.int64, device=META)


SHAPES = {
    # Their own meta kernels refuse what a GPU does: bfloat16 read, float32 written.
    aten._softmax.default: _widened,
    aten._log_softmax.default: _widened,
    # As many bins as are asked for: more would be data.
    aten.bincount.default: _counted,
}
"""Outputs of ops that have no meta kernel, or not the right one."""
ASSUMPTIONS: set[str] = set()
"""What was taken for granted where only data would tell, since it was last cleared."""


class DataNeeded(Exception):
    """The program asks for something that only data can give."""


class Ghost(torch.Tensor):  # type: ignore[misc]  # torch is not type checked here
    """A tensor that has a shape, a dtype and a storage's identity, and no data."""

    _stepscope_inner: torch.Tensor
    _stepscope_device: torch.device
    _stepscope_value: torch.Tensor | None = None

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> Ghost:
        ghost = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CPU,
        )
        ghost._stepscope_inner, ghost._stepscope_device = inner, device
        return ghost  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a tensor of a plan was used after the plan")

    @property
    def device(self) -> torch.device:
        return self._stepscope_device

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, other)
        self._stepscope_inner = getattr(other, "_stepscope_inner", other)

    @property
    def is_cuda(self) -> bool:
        return bool(self._stepscope_device.type == "cuda")

    def tolist(self) -> Any:
        known = _values((self,))
        if known is None:
            raise DataNeeded("a tensor's values (.tolist())")
        return known[0].tolist()

    def assume(self, values: Any, why: str) -> Any:
        """The values that a program proposes where it knows that there may be no data."""
        ASSUMPTIONS.add(why)
        return values

    def __repr__(self) -> str:
        return f"Ghost(shape={tuple(self.shape)}, dtype={self.dtype})"


class Ghosts(TorchDispatchMode):  # type: ignore[misc]
    """Makes every new tensor a ghost of `device`.

    `kernels`: what an op that is made of others becomes on this device. `after_op(func, args, kwargs, out)` is told
    of each op when it has run, with meta tensors.
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
        self.unseen: dict[str, str] = {}
        """Ops that hide what they allocate, and why."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        inner_args = tuple([_inner(value) for value in args])
        inner_kwargs = {name: _inner(value) for name, value in kwargs.items()} if kwargs else kwargs
        if not _has_ghost((*args, *kwargs.values())):
            if kind.is_lift or not kind.makes_tensors(args, kwargs):
                return func(*args, **kwargs)
            inner_args = tuple([META if isinstance(value, torch.device) else value for value in inner_args])
            if not any(value is META for value in inner_args):
                inner_kwargs = {**inner_kwargs, "device": META}
        elif (kernel := self._kernels.get(func)) is not None:
            with self:
                return kernel(*args, **kwargs)
        elif kind.is_composite:
            # Below autograd nobody has taken it apart yet.
            with self:
                return func.decompose(*args, **kwargs)
        elif func is aten._to_copy.default and _only_moves(args[0], kwargs):
            return Ghost(inner_args[0].view_as(inner_args[0]), self._device)
        elif func in VALUES:
            known = _values((*args, *kwargs.values()))
            if known is None:
                raise DataNeeded("a value of a tensor (.item(), if, print, int(), float())")
            with _disable_current_modes():
                return func(*known)
        elif "device" in kwargs:
            inner_kwargs = {**inner_kwargs, "device": META}
        if kind.is_sum and _is_engine_sum(args):
            return args[0]
        if kind.body is not None and (found := self._run_body(func, kind.body, args, kwargs)) is not NotImplemented:
            return found
        if inner_kwargs.get("pin_memory"):
            inner_kwargs = {**inner_kwargs, "pin_memory": False}
        out = _run(func, kind, inner_args, inner_kwargs)
        self._after_op(func, inner_args, inner_kwargs, out)
        wrapped = self._wrapped(out, (*args, *kwargs.values()), (*inner_args, *inner_kwargs.values()))
        if type(wrapped) is Ghost:
            _keep_value(wrapped, func, kind, args, kwargs)
        return wrapped

    def _run_body(self, func: Any, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            with self:
                return body(*args, **kwargs)
        except DataNeeded:
            raise
        except Exception as error:
            self.unseen.setdefault(str(func), f"what it takes inside is not seen ({type(error).__name__}: {error})")
            return NotImplemented

    def _wrapped(self, out: Any, outer: tuple[Any, ...], inner: tuple[Any, ...]) -> Any:
        if isinstance(out, torch.Tensor):
            for ghost, tensor in zip(outer, inner):
                if tensor is out:
                    return ghost
            return Ghost(out, self._device) if out.is_meta else out
        if isinstance(out, tuple | list):
            return type(out)([self._wrapped(part, outer, inner) for part in out])
        return out


class _Kind:
    """What of an op does not depend on its inputs."""

    __slots__ = (
        "body", "is_composite", "is_lift", "is_pointwise", "is_random", "is_sum", "keeps_values",
        "takes_device", "writes",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        self.is_lift = func is aten.lift_fresh.default
        self.is_sum = func is aten.add.Tensor
        self.writes = func._schema.is_mutable
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.keeps_values = func.namespace == "aten" and "empty" not in func._schema.name
        self.is_pointwise = torch.Tag.pointwise in func.tags and not func._schema.is_mutable
        self.takes_device = any(argument.name == "device" for argument in func._schema.arguments)
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        name = func.name()
        self.is_composite = (
            func.namespace == "aten" and has(name, "CompositeImplicitAutograd") and not has(name, "CPU")
        )
        # What torch.library.custom_op wraps: run instead of the op's fake, it shows what it allocates inside.
        definition = None if func.namespace == "aten" else OPDEFS.get(func._schema.name)
        functions = {} if definition is None else definition._backend_fns
        self.body = functions.get("cuda") or functions.get(None)

    def makes_tensors(self, args: Any, kwargs: Any) -> bool:
        """Whether an op without ghosts among its inputs gives one: a factory, or a copy to another device."""
        if not self.takes_device:
            return False
        device = kwargs.get("device")
        return not any(isinstance(value, torch.Tensor) for value in args) or (
            device is not None and torch.device(device).type != "cpu"
        )


_SHAPES_SEEN: dict[Any, tuple[Any, Any, torch.dtype]] = {}


def _run(func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
    """The op on meta tensors; an elementwise one, slow to ask in Python, is asked once for each kind of inputs."""
    if not kind.is_pointwise or kwargs:
        return SHAPES.get(func, func)(*args, **kwargs)
    key = (func, *[_look(value) for value in args])
    seen = _SHAPES_SEEN.get(key)
    if seen is not None:
        return torch.empty_strided(seen[0], seen[1], dtype=seen[2], device=META)
    out = func(*args)
    if isinstance(out, torch.Tensor):
        _SHAPES_SEEN[key] = (tuple(out.shape), out.stride(), out.dtype)
    return out


def _look(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (*value.shape, *value.stride(), value.dtype, value.is_meta)
    return (type(value), str(value))


_KINDS: dict[Any, _Kind] = {}


def _kind(func: Any) -> _Kind:
    found = _KINDS.get(func)
    if found is None:
        found = _KINDS[func] = _Kind(func)
    return found


def _keep_value(out: Ghost, func: Any, kind: _Kind, args: Any, kwargs: Any) -> None:
    """Give whole numbers that follow from values that are known their values; forget those written over."""
    is_small = not out.dtype.is_floating_point and not out.dtype.is_complex and out.numel() <= MOST_VALUES
    known = _values(args) if is_small and not kind.is_random and kind.keeps_values else None
    storage = out._stepscope_inner.untyped_storage()._cdata
    if known is None or any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        if kind.writes:
            _OVERWRITTEN.add(storage)  # other views of it have values, too
        return
    if not kind.writes and not any(type(value) is Ghost for value in args):
        _OVERWRITTEN.discard(storage)  # a new one in an old one's place
    options = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    with _disable_current_modes():
        out._stepscope_value = func(*known, **options, **({"device": CPU} if kind.takes_device else {}))


_OVERWRITTEN: set[int] = set()
"""Storages that something unknown was written to."""


def _values(args: Any) -> list[Any] | None:
    """The arguments with the values of the ghosts among them; None where one has none."""
    found: list[Any] = []
    for value in args:
        if type(value) is Ghost:
            is_lost = value._stepscope_inner.untyped_storage()._cdata in _OVERWRITTEN
            value = None if is_lost else value._stepscope_value
            if value is None:
                return None
        elif isinstance(value, list | tuple):
            inside = _values(value)
            if inside is None:
                return None
            value = type(value)(inside)
        elif isinstance(value, torch.device):
            value = CPU
        found.append(value)
    return found


def _only_moves(tensor: Any, kwargs: Any) -> bool:
    return type(tensor) is Ghost and kwargs.get("dtype") in (None, tensor.dtype) and "memory_format" not in kwargs


def _inner(value: Any) -> Any:
    kind = type(value)
    if kind is Ghost:
        return value._stepscope_inner
    if kind is list or kind is tuple:
        return kind([_inner(part) for part in value])
    return value


def _has_ghost(values: Any) -> bool:
    for value in values:
        kind = type(value)
        if kind is Ghost or ((kind is list or kind is tuple) and _has_ghost(value)):
            return True
    return False


def _is_engine_sum(args: Any) -> bool:
    """Whether autograd's engine adds a second gradient to a first that nobody else has.

    To a plain tensor it adds in place; of a subclass it makes a new one.
    """
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() < 0:
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

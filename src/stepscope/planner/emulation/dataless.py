"""Runs every op on `meta` tensors, while autograd, autocast and the program see tensors on a device.

A planned tensor wraps a meta tensor. `DatalessMode` unwraps arguments, runs the op and wraps the outputs. Only
tensors made from Python numbers (`torch.tensor`) stay real: they are on the host in a training script too.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from stepscope.errors import UsageError
from stepscope.planner.emulation import known_values as values
from stepscope.planner.emulation.known_values import known_values
from stepscope.planner.emulation.ops import (
    DATALESS,
    HOSTED,
    PLANNED,
    REAL,
    SHAPES,
    Kind,
    Shapes,
    kind_of,
    meta_like,
    unwrapped,
    without_data,
    wrapped,
)
from stepscope.planner.emulation.planned_tensor import (
    HOST,
    META,
    DataNeeded,
    InPlaceSums,
    PlannedTensor,
    made_before,
    made_by,
    users_place,
)
from stepscope.planner.emulation.torch_support import launching_nothing
from stepscope.recorder.ledger.nodes import backward_runs
from stepscope.recorder.values import tensors_in

__all__ = ["DataNeeded", "DatalessMode", "PlannedTensor"]

aten = torch.ops.aten
IN_PLACE = {
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
}  # what autograd's formulas do in place to zeros they just made, except for tensor subclasses
ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


class DatalessMode(TorchDispatchMode):  # type: ignore[misc]  # torch is not type checked here
    """Makes every new tensor a planned tensor: on `device`, or on the host if the program asks for that.

    `kernels` replace composite ops on this device. `after_op(func, args, kwargs, out)` is called with meta tensors
    after each op on `device`.
    """

    def __init__(
        self,
        device: torch.device,
        kernels: Mapping[Any, Callable[..., Any]],
        after_op: Callable[[Any, Any, Any, Any], None],
    ) -> None:
        super().__init__()
        self._device, self._kernels, self._after_op = device, kernels, after_op
        self.shapes = Shapes()
        _num_references_of_engine()  # before the program's own backward
        self._zeros: weakref.ref[PlannedTensor] | None = None  # the last op's output, if it is zeros
        self.unseen: dict[str, str] = {}  # ops that hide their allocations, and why
        self.assumptions: set[str] = set()  # assumptions where only data could decide

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a plan, and the wrapper would slow down every op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # the program's modes are active when a backward recomputes
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        inner_args, seen = unwrapped(args, self._device)
        inner_kwargs = kwargs
        if kwargs:
            parts, more = unwrapped(kwargs.values(), self._device)
            inner_kwargs, seen = dict(zip(kwargs, parts)), seen | more
        if not seen & DATALESS:
            if kind.is_lift and seen & REAL and self._device.type == "cpu":
                return self._sized(func, kind, list(args), kwargs, self._device)
            if kind.is_lift or not kind.makes_tensors(args, kwargs):
                return func(*args, **kwargs)
        elif (kernel := self._kernels.get(func)) is not None:
            with self:
                return kernel(*args, **kwargs)
        elif kind.is_composite:
            # Below autograd it has not been decomposed yet.
            with self:
                return func.decompose(*args, **kwargs)
        elif kind.gives_number:
            known = known_values((*args, *kwargs.values()))
            if known is None:
                raise DataNeeded("a value of a tensor (if, while, int(), .item(), torch.equal)")
            with _disable_current_modes():
                return func(*known)
        is_mixed = seen & REAL and seen & DATALESS
        if is_mixed and any(tensor.requires_grad for tensor in tensors_in(inner_args) if not tensor.is_meta):
            raise made_before("is used")
        device = self._place(kind, args, kwargs, seen)
        if is_mixed:
            inner_args, inner_kwargs = without_data(inner_args), without_data(inner_kwargs)
        if kind.device_at is not None:
            inner_args, inner_kwargs = kind.without_device(inner_args, inner_kwargs)
            if device is META:
                return func(*inner_args, **inner_kwargs)
        if kind.is_sum and _is_engine_sum(args):
            return args[0]
        if kind.is_sum and InPlaceSums.depth and _is_only_reference(args[0]):
            return PlannedTensor(args[0]._stepscope_inner, device)
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
                    f"a size that depends on values ({func.__name__})",
                    "torch.where and masked_fill keep sizes, or give every part a fixed capacity",
                )
        out = self.shapes.run(func, kind, inner_args, inner_kwargs)
        if kind.changes_shape:
            with self:
                torch.Tensor.data.__set__(args[0], PlannedTensor(args[0]._stepscope_inner, device))
        if device is self._device:
            self._after_op(func, inner_args, inner_kwargs, out)
        result = wrapped(out, device, (*args, *kwargs.values()), (*inner_args, *inner_kwargs.values()))
        self._zeros = weakref.ref(result) if func in ZEROS else None
        if type(result) is PlannedTensor or kind.written or type(result) in (list, tuple):
            values.keep(result, func, kind, args, kwargs, device.type == "cpu")
        return result

    def _place(self, kind: Kind, args: Any, kwargs: Any, seen: int) -> torch.device:
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
            if type(target) is PlannedTensor:
                return target._stepscope_device
            if isinstance(target, torch.Tensor):
                raise DataNeeded(
                    "data to write into a tensor that was made from numbers", "make that tensor with torch.zeros"
                )
        return self._device if seen & PLANNED or not seen & DATALESS else HOST

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
            f"the program uses the device {device} at {users_place()}, but the plan is for one device, {self._device}"
        )

    def _sized(self, func: Any, kind: Kind, known: list[Any], kwargs: Any, device: torch.device) -> Any:
        """Return the outputs of an op whose sizes depend on known values of its inputs."""
        real = values.run(func, kind, known, kwargs)
        out = meta_like(real)
        if device is self._device:
            self._after_op(func, meta_like(known), kwargs, out)
        result = wrapped(out, device, (), ())
        values.give(result, real)
        return result

    def _run_body(self, func: Any, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            with self, launching_nothing(may_import=True):
                return body(*args, **kwargs)
        except (DataNeeded, UsageError):
            raise
        except Exception as error:
            self.unseen.setdefault(str(func), f"its scratch memory is unknown ({type(error).__name__}: {error})")
            return NotImplemented


def _is_sized_by_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the size of an op's output depends on values for these arguments."""
    if func is aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return kwargs.get("output_size") is None


def _is_formula() -> bool:
    """Return whether autograd computes gradients. Gradients are enabled when it recomputes a checkpoint."""
    return not torch.is_grad_enabled() and backward_runs()


def _is_engine_sum(args: Any) -> bool:
    """Return whether autograd's engine adds a second gradient to a first one that nothing else uses.

    For a plain tensor it adds in place, but for a subclass it makes a new tensor.
    """
    if not _is_formula() or len(args) != 2 or not _is_engines_call():
        return False
    first, second = args
    if not type(first) is type(second) is PlannedTensor:
        return False
    if first.shape != second.shape or first.dtype is not second.dtype or not _is_dense(first):
        return False
    if first._use_count() > _num_references_of_engine():
        return False
    node = torch._C._current_autograd_node()  # None in a sum before torch 2.13
    if node is not None and made_by(node) == first._stepscope_made_by:
        # A formula adds what it has made itself. The engine does so only for a node with two gradients for one input.
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if len(set(edges)) == len(edges):
            return False
    return _is_only_reference(first)


def _is_only_reference(tensor: PlannedTensor) -> bool:
    """Return whether no other tensor has this one's memory. Asking for its storage makes a second reference."""
    return bool(torch._C._storage_Use_Count(tensor._stepscope_inner.untyped_storage()._cdata) <= 2)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie next to each other, each once, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _is_engines_call() -> bool:
    """Return whether no Python of a hook or of an `autograd.Function` is between the engine and this package."""
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("stepscope.planner.emulation."):
        frame = frame.f_back  # type: ignore[assignment]  # it has none at the end
    return frame is not None and frame.f_globals.get("__name__") == "torch.autograd.graph"


@functools.cache
def _num_references_of_engine() -> int:
    """Return how many references a gradient has that only the engine has, when a dispatch mode sees it added."""
    found: list[int] = []

    class Observer(TorchDispatchMode):  # type: ignore[misc]  # torch is not type checked here
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.add.Tensor:
                found.append(args[0]._use_count())
            return func(*args, **(kwargs or {}))

    with _disable_current_modes(), torch.enable_grad():
        number = torch.ones((), requires_grad=True)
        total = number.sin() * number.cos()
        with Observer():
            total.backward()
    return found[0]

"""A tensor without data, as the program sees it: on its planned device, and with its value if that is known.

PyTorch treats a planned tensor as a CPU tensor, so that any build has dispatch keys for it. Python code sees the
planned device. In a plan for a GPU, host tensors are planned too. PyTorch has those on `cpu:0` and the GPU's on
`cpu`, so that whatever C++ makes with the options of a tensor is on the same device.
"""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from stepscope.errors import UsageError
from stepscope.recorder.frames import place, script_frames


class DataNeeded(Exception):
    """The program needs data. The message says what it needs, where, and what may help."""

    def __init__(self, what: str, advice: str = "") -> None:
        where = users_place()
        super().__init__(f"{what}{f' at {where}' if where else ''}{f' ({advice})' if advice else ''}")
        self.where = where


def users_place() -> str | None:
    """Return `train.py:42 step`, the innermost frame of the program; plus its caller if it is in a package."""
    frames = script_frames()
    first = next(frames, None)
    if first is None:
        return None
    found = f"{place(first)} {first.f_code.co_name}"
    if "site-packages" in first.f_code.co_filename:
        users = next((frame for frame in frames if "site-packages" not in frame.f_code.co_filename), None)
        if users is not None:
            found += f", called from {place(users)} {users.f_code.co_name}"
    return found


class UnknownNumber(float):
    """The result of `.item()` without data: it can be computed with and printed, but nothing may depend on it.

    From a floating-point tensor it counts as 1.0, so that a check for infinities passes. From integers it is `nan`,
    so that no size can follow from it. It prints as `nan`.
    """

    def __repr__(self) -> str:
        return "nan"

    __str__ = __repr__
    __hash__ = float.__hash__

    def __format__(self, spec: str) -> str:
        return format(float("nan"), f"{spec[:-1]}f" if spec[-1:] in ("d", "x", "X", "o", "b") else spec)

    def __round__(self, ndigits: Any = None) -> Any:
        return self if ndigits is not None else self.__int__()

    def __int__(self) -> int:
        raise DataNeeded("an integer from a tensor's value (int(), range(), an index, a size)")

    __index__ = __trunc__ = __floor__ = __ceil__ = __int__


def _computed(name: str) -> Any:
    method = getattr(float, name)

    def call(self: UnknownNumber, *others: Any) -> Any:
        found = method(self, *others)
        return UnknownNumber(found) if isinstance(found, float) else found

    return call


def _refused(self: UnknownNumber, *others: Any) -> Any:
    raise DataNeeded("a decision that depends on a tensor's value (a comparison, if, while, min(), max())")


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), "neg", "pos", "abs"):
    setattr(UnknownNumber, f"__{_name}__", _computed(f"__{_name}__"))
for _name in ("bool", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(UnknownNumber, f"__{_name}__", _refused)


aten = torch.ops.aten
CPU, CUDA, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
HOST = torch.device("cpu", 0)  # where PyTorch sees the host tensors of a plan for a GPU
_SAME = {device: device for device in (CPU, CUDA, HOST)}
"""One object for each device, so that they can be compared by identity."""
_to = torch.Tensor.to


def like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an empty tensor of the same shape, strides and dtype."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)


class PlannedTensor(torch.Tensor):  # type: ignore[misc]  # torch is not type checked here
    """A tensor with a shape, a dtype and a storage, but no data."""

    _stepscope_inner: torch.Tensor
    _stepscope_device: torch.device
    _stepscope_value: torch.Tensor | None = None
    _stepscope_is_over: bool = False
    _stepscope_made_by: int | None = None  # the node of the backward

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> PlannedTensor:
        device = _SAME[device]
        planned = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=HOST if device is HOST else CPU,
        )
        planned._stepscope_inner, planned._stepscope_device = inner, device
        planned._stepscope_made_by = made_by(torch._C._current_autograd_node())
        return planned  # type: ignore[no-any-return]  # torch is not type checked here

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            raise RuntimeError(
                f"{func}: a tensor of a plan was used in the thread {thread.name!r}; a plan follows only the thread "
                "that began it: let that thread do the work"
            )
        raise RuntimeError(f"{func}: a tensor of a plan was used after the plan")

    # --- device --------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return CPU if self._stepscope_device is HOST else self._stepscope_device

    @property
    def is_cuda(self) -> bool:
        return bool(self._stepscope_device.type == "cuda")

    @property
    def is_cpu(self) -> bool:
        return not self.is_cuda

    def get_device(self) -> int:
        return 0 if self.is_cuda else -1

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and type(args[0]) is torch.dtype and not kwargs:
            return _to(self, args[0])
        if self._stepscope_is_over:
            raise made_before("was moved to the device in an earlier plan, and is moved again")
        device, dtype, is_copy, memory_format = parse_to(args, kwargs)
        options: dict[str, Any] = {} if memory_format is None else {"memory_format": memory_format}
        if device is None or device.type == self.device.type:
            return _to(self, dtype=dtype or self.dtype, copy=is_copy, **options)
        target = HOST if device.type == "cpu" else device
        return aten._to_copy(self, dtype=dtype or self.dtype, device=target, **options)

    def cpu(self, **options: Any) -> torch.Tensor:
        return self.to(CPU, **options)

    def cuda(self, device: Any = None, non_blocking: bool = False, **options: Any) -> torch.Tensor:
        return self.to("cuda" if device is None else device, **options)

    def type(self, dtype: Any = None, non_blocking: bool = False) -> Any:
        if dtype is None:
            name = super().type()
            return name.replace("torch.", "torch.cuda.") if self.is_cuda else name
        if isinstance(dtype, torch.dtype):
            return self.to(dtype)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        device = torch.device("cuda") if ".cuda." in name else CPU
        return self.to(device, getattr(torch, name.rpartition(".")[2]).dtype)

    def type_as(self, other: torch.Tensor) -> torch.Tensor:
        return self.to(other)

    def pin_memory(self, *_: Any) -> PlannedTensor:
        return self

    def record_stream(self, stream: Any) -> None:
        return None

    # --- values --------------------------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, PlannedTensor):
            device = HOST if self._stepscope_device is not CPU else CPU
            value, other = other, PlannedTensor(like(other, META), device)
            other._stepscope_value = value
        torch.Tensor.data.__set__(self, other)
        self._stepscope_inner, self._stepscope_device = other._stepscope_inner, other._stepscope_device
        self._stepscope_value = other._stepscope_value

    def item(self) -> Any:
        known = value_of(self)
        if known is not None:
            return known.item()
        if self.numel() != 1:
            raise RuntimeError(f"a Tensor with {self.numel()} elements cannot be converted to Scalar")
        is_whole = not self.is_floating_point()
        assume(f"{users_place()}: the value of .item() or float() is {'an unknown integer' if is_whole else 1.0}")
        # An optimizer that compares a norm with a limit allocates the same either way.
        return 1.0 if _asks_in("torch.optim") else UnknownNumber(math.nan if is_whole else 1.0)

    def __bool__(self) -> bool:
        if value_of(self) is None and _asks_in("torch.nn.init"):
            return False  # initial values are within limits, so they are not drawn again
        return bool(torch.Tensor.__bool__(self))

    def __float__(self) -> float:
        return float(self.item())

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self) -> Any:
        known = value_of(self)
        if known is None and self.dim() == 0:
            return self.item()
        return self._known("a tensor's values (.tolist())").tolist()

    def numpy(self, **options: Any) -> Any:
        return self._known("a tensor's values (.numpy())").numpy(**options)

    def _known(self, what: str) -> torch.Tensor:
        known = value_of(self)
        if known is None:
            raise DataNeeded(what, "remove code that reads results from the step")
        return known

    def assume(self, answer: Any, why: str) -> Any:
        """Return the answer that a program proposes for when there is no data."""
        assume(why)
        return answer

    # --- copies --------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.clone()
            copied.requires_grad_(self.requires_grad)
            copied.__dict__.update({n: v for n, v in self.__dict__.items() if not n.startswith("_stepscope_")})
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DataNeeded(
            "a tensor's data, to send or save it", "use num_workers=0 in a DataLoader, and no torch.save in the step"
        )

    def __coerce_same_metadata_as_tangent__(self, meta: Any, expected_type: Any = None) -> PlannedTensor:
        return self  # called by compiled backward for tensor subclasses

    def __repr__(self) -> str:
        return f"PlannedTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


class InPlaceSums:
    """While active, PyTorch adds in place to what its own code has made, as it does unless a tensor is a subclass."""

    depth = 0

    def __enter__(self) -> None:
        InPlaceSums.depth += 1

    def __exit__(self, *_: object) -> None:
        InPlaceSums.depth -= 1


def made_by(node: Any) -> int | None:
    """Return the number of a node of the backward; None outside one."""
    return None if node is None else int(node._sequence_nr())


def value_of(tensor: PlannedTensor) -> torch.Tensor | None:
    """Return a planned tensor's value, or None if it is unknown."""
    value = tensor._stepscope_value
    if value is None or getattr(tensor._stepscope_inner.untyped_storage(), "_stepscope_is_unknown", False):
        return None
    return value


def _asks_in(package: str) -> bool:
    """Return whether the innermost caller outside this file is in a package."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back  # type: ignore[assignment]  # it has none at the end
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(package)


def made_before(what: str) -> UsageError:
    return UsageError(
        f"a weight that was made before the plan, most likely when the file was imported, {what} at {users_place()}: "
        "make the model inside the function"
    )


def assume(why: str) -> None:
    """Note an assumption where only data could decide."""
    for mode in _get_current_dispatch_mode_stack():
        if (assumptions := getattr(mode, "assumptions", None)) is not None:
            assumptions.add(why)


def parse_to(args: Any, kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, Any]:
    """Return device, dtype, whether to copy always, and memory format of a `Tensor.to` call."""
    kwargs = dict(kwargs)
    flags = [value for value in args if isinstance(value, bool)]  # non_blocking, copy
    is_copy = kwargs.pop("copy", len(flags) > 1 and flags[1])
    rest = [value for value in args if not isinstance(value, bool)]
    other = kwargs.pop("other", rest[0] if rest else None)
    if isinstance(other, torch.Tensor):
        return other.device, other.dtype, is_copy, kwargs.get("memory_format")
    if isinstance(other, int):  # a device's number
        rest[0] = torch.device("cuda", other)
    device, dtype, _, memory_format = torch._C._nn._parse_to(*rest, **kwargs)
    return device, dtype, is_copy, memory_format

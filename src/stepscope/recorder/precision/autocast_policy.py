"""What autocast does with an op on a device, found by calling torch and stopping before the op computes.

Autocast first casts an op's arguments and then calls the op. Each op gets one-element tensors in float32, in the low
dtype and in both, and a dispatch mode sees the casts and any added `dtype`. The op itself never runs.
"""

import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LOW = "low"  # arguments are cast to autocast's dtype
FLOAT32 = "float32"  # arguments are cast to float32, or the result is float32
WIDEST = "widest"  # arguments are cast to the widest dtype among them
REFUSED = "refused"  # the op raises under autocast
OTHER = "other"  # autocast lists the op, and none of these was seen
UNLISTED = None  # the op runs in the dtype of its arguments

_WIDE = torch.float32
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_HALF_TO_FLOAT = ("aten::_softmax", "aten::_log_softmax")  # their last argument makes the result float32


def policy(device_type: str, name: str, low: torch.dtype) -> str | None:
    """Return what autocast does with an op of this name (without namespace and overload); UNLISTED if nothing.

    If overloads differ, the majority wins. Overloads that could not be tested do not count.

    >>> [policy("cpu", name, torch.bfloat16) for name in ("mm", "mse_loss", "cat", "relu")]
    ['low', 'float32', 'widest', None]
    """
    found = [_tested(name_, device_type, low) for name_ in _listed(device_type) if name_.partition(".")[0] == name]
    known = [answer for answer in found if answer != OTHER] or found
    return max(known, key=known.count) if known else UNLISTED


def listed_name(device_type: str, names: Sequence[str]) -> str | None:
    """Return the first of these names that autocast lists on this device. Inner ops match the name of their op.

    >>> listed_name("cpu", ["_log_softmax", "cross_entropy"]), listed_name("cpu", ["add"])
    ('cross_entropy_loss', None)
    """
    known = {overload.partition(".")[0] for overload in _listed(device_type)}
    candidates = itertools.chain.from_iterable(map(_spellings, names))
    return next((name for name in candidates if name in known), None)


def _spellings(name: str) -> tuple[str, ...]:
    plain = name.lstrip("_").removeprefix("native_").removesuffix("_forward")
    if plain.startswith("scaled_dot_product"):
        return name, "scaled_dot_product_attention"
    return name, plain, f"{plain}_loss"


@functools.cache
def _listed(device_type: str) -> tuple[str, ...]:
    """Return the ops that autocast has a kernel for, as `name.overload`."""
    key = _KEYS.get(device_type)
    if key is None:
        return ()
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return tuple(sorted(name.removeprefix("aten::") for name in names if name.startswith("aten::")))


@functools.cache
def _tested(overload: str, device_type: str, low: torch.dtype) -> str:
    packet, _, kind = overload.partition(".")
    op = getattr(getattr(torch.ops.aten, packet, None), kind or "default", None)
    if op is None:
        return OTHER
    try:
        wide, narrow, both = (_seen(op, device_type, low, dtypes) for dtypes in ((_WIDE,), (low,), (low, _WIDE)))
    except TypeError:  # an argument of a type that cannot be made up
        return OTHER
    if wide is None or narrow is None or both is None:
        return REFUSED
    if low in wide:
        return LOW
    if _WIDE in narrow:
        return FLOAT32
    return WIDEST if _WIDE in both else OTHER


class _Stop(BaseException):
    """Raised when the op has passed autocast."""


class _Watch(TorchDispatchMode):  # type: ignore[misc]  # torch is not type checked here
    """Lets casts pass and records their target dtypes. Stops everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            self.targets.add(kwargs.get("dtype"))
            return func(*args, **kwargs)
        is_wide = any(value is _WIDE for value in (*args, *kwargs.values()))
        if is_wide or (func.name() in _HALF_TO_FLOAT and args[-1] is True):
            self.targets.add(_WIDE)
        raise _Stop


def _seen(op: Any, device_type: str, low: torch.dtype, dtypes: Sequence[torch.dtype]) -> set[Any] | None:
    """Return the dtypes to which autocast casts arguments of these dtypes; None if it refuses the op."""
    watch = _Watch()
    args, kwargs = _arguments(op._schema, device_type, dtypes)
    try:
        with warnings.catch_warnings(), torch.no_grad(), torch.autocast(device_type, dtype=low), watch:
            warnings.simplefilter("ignore")
            op(*args, **kwargs)
    except _Stop:
        pass
    except RuntimeError as error:
        if "unsafe to autocast" in str(error):
            return None
    except (TypeError, ValueError, IndexError, NotImplementedError):
        pass  # raised by the op, after autocast has cast its arguments
    return watch.targets


def _arguments(schema: Any, device_type: str, dtypes: Sequence[torch.dtype]) -> tuple[list[Any], dict[str, Any]]:
    """Return a value for every required argument and every tensor."""
    kinds = itertools.cycle(dtypes)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    by_name = False
    for argument in schema.arguments:
        kind = str(argument.type)
        by_name |= argument.kwarg_only
        if kind in ("Tensor", "Optional[Tensor]"):
            value: Any = torch.zeros(1, 1, dtype=next(kinds), device=device_type)
        elif "List[" in kind and "Tensor" in kind:
            value = [torch.zeros(1, 1, dtype=next(kinds), device=device_type) for _ in range(2)]
        elif argument.has_default_value():
            by_name = True  # for the arguments after the one that is left out
            continue
        elif kind not in _PLAIN and not kind.startswith("Optional"):
            raise TypeError(kind)
        else:
            value = _PLAIN.get(kind)
        if by_name:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


_PLAIN: dict[str, Any] = {
    "int": 0, "float": 1.0, "number": 1, "Scalar": 1, "bool": False, "str": "", "List[int]": [1],
}  # fmt: skip

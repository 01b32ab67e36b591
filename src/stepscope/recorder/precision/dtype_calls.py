"""Which torch functions, norms and modules a program calls, with dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stepscope.recorder.frames import caller
from stepscope.recorder.ledger.storages import tensors_in
from stepscope.recorder.model import plain_name
from stepscope.recorder.patches import Handle, remove_all

_RUNS_BACKWARD = frozenset(("backward", "grad"))
NORMS = {"rms_norm": 2, "layer_norm": 2}
"""Functions whose weight must have the input's dtype for the fused kernel, and the weight's position."""
_FUSED_NORMS = ("aten._fused_rms_norm", "aten.native_layer_norm")


def short(dtype: torch.dtype) -> str:
    """Return `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module takes or returns: in lists, dicts and dataclasses."""
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, one.name) for one in fields(value)]
    return tensors_in(value)


def logits_in(output: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor with dimensions: one without is a loss."""
    return next((tensor for tensor in tensors_of(output) if tensor.is_floating_point() and tensor.dim()), None)


class Functions(TorchFunctionMode):  # type: ignore[misc]  # torch is not type checked here
    """Tracks the torch function that the program is in, whether autocast is on, and the dtypes given to norms."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._open: list[tuple[str, bool]] = []
        self.norms: list[NormCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Checked here, because autocast is off inside its own kernels.
        self._open.append((name, bool(torch.is_autocast_enabled(self._device_type))))
        try:
            if name in NORMS:
                given = kwargs.get("input", args[0] if args else None)
                weight = kwargs.get("weight", args[NORMS[name]] if len(args) > NORMS[name] else None)
                dtypes = given.dtype, None if weight is None else weight.dtype
                self.norms.append(NormCall(name, *dtypes, caller(), self._open[-1][1]))
            return func(*args, **kwargs)
        finally:
            self._open.pop()

    def current(self) -> tuple[str | None, bool]:
        """Return the function that calls the current ops, and whether the program has autocast on.

        The function is None in a backward.
        """
        name, autocast = self._open[-1] if self._open else (None, False)
        return (None, False) if name in _RUNS_BACKWARD else (name, autocast)


@dataclass
class NormCall:
    """A call of a norm: the dtypes of its arguments, and the ops it ran as."""

    function: str
    input: torch.dtype
    weight: torch.dtype | None
    caller: str | None
    autocast: bool
    module: str | None = None
    ops: list[str] = field(default_factory=list)

    @property
    def is_mixed(self) -> bool:
        return self.weight is not None and self.weight != self.input

    @property
    def is_fused(self) -> bool:
        return any(op in _FUSED_NORMS for op in self.ops)


class ModuleDtypes:
    """Records the dtypes that each module takes and returns, from `start()` to `stop()`."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._handles: list[Handle] = []
        self.rows: dict[str, dict[str, Any]] = {}
        self.logits: torch.dtype | None = None  # the dtype of what the root returned besides a loss

    def start(self) -> None:
        for name, module in self._root.named_modules():
            own = {short(parameter.dtype) for parameter in module.parameters(recurse=False)}
            row = {"name": plain_name(name), "kind": type(module).__name__, "parameters": sorted(own)}
            self.rows[plain_name(name)] = {**row, "inputs": [], "outputs": [], "num_calls": 0}
            enter, leave = (partial(hook, plain_name(name)) for hook in (self._enter, self._leave))
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave))

    def stop(self) -> None:
        remove_all(self._handles)

    def _enter(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self.rows[name]["num_calls"] += 1
        _add(self.rows[name]["inputs"], (args, kwargs))

    def _leave(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        _add(self.rows[name]["outputs"], output)
        if not name and (logits := logits_in(output)) is not None:
            self.logits = logits.dtype


def _add(dtypes: list[str], given: Any) -> None:
    for tensor in tensors_of(given):
        name = short(tensor.dtype)
        if name not in dtypes:
            dtypes.append(name)

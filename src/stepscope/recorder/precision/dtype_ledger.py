"""Every op of a step with its input and output dtypes, and every cast with who requested it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stepscope.recorder.clock import BACKWARD, FORWARD, OPTIMIZER, OTHER
from stepscope.recorder.frames import caller
from stepscope.recorder.ledger.flops import Op
from stepscope.recorder.ledger.ledger import Ledger
from stepscope.recorder.ledger.storages import storage_key
from stepscope.recorder.model import plain_name
from stepscope.recorder.patches import Handle, remove_all
from stepscope.recorder.precision.autocast_policy import listed_name
from stepscope.recorder.values import tensors_in

_RUNS_BACKWARD = frozenset(("backward", "grad"))
NORMS = {"rms_norm": 2, "layer_norm": 2}
"""Functions whose weight must have the input's dtype for the fused kernel, and the weight's position."""
_FUSED_NORMS = ("aten._fused_rms_norm", "aten.native_layer_norm")


def short(dtype: torch.dtype) -> str:
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


# Who requested a cast.
BY_AUTOCAST, BY_CODE, BY_BACKWARD, BY_OPTIMIZER, BY_TORCH = "autocast", "code", "backward", "optimizer", "torch"
# What was cast.
WEIGHT, GRADIENT, ACTIVATION = "weight", "gradient", "activation"

_EXPLICIT = frozenset(("to", "float", "half", "bfloat16", "double", "type", "type_as", "_to_copy", "copy_", "clone"))
_NO_COMPUTATION = (
    *("aten.detach", "aten.alias", "aten.fill_", "aten.zero_"),
    *("aten._local_scalar_dense", "aten.lift_fresh"),
)


class DtypeLedger(Ledger):
    """A ledger that also records dtypes. `functions` must be active meanwhile; `micro_batch` is set from outside."""

    def __init__(
        self,
        root: nn.Module,
        optimizers: list[Any],
        phase: Callable[[], str | None],
        functions: Functions,
        device_type: str,
        autocast: torch.dtype | None,
        num_micro_batches: int = 1,
    ) -> None:
        super().__init__([root], optimizers, phase, callers=True)
        self._functions, self._device_type, self._autocast = functions, device_type, autocast
        self._asked_by = caller()
        self._num_micro_batches = num_micro_batches
        self.micro_batch = 0
        self.ops: dict[Any, dict[str, Any]] = {}  # rows of docs/precision.md, by what is equal in the calls of a row
        self.casts: dict[Any, dict[str, Any]] = {}
        self.weights_cast: dict[int, int] = {}  # parameter index -> its bytes
        self.num_weight_uses = 0
        self._origins: dict[int, str] = {}  # storage -> where its float32 comes from
        self._cast_before: set[tuple[Any, ...]] = set()  # storage, offset, shape, target, micro-batch

    @property
    def error(self) -> str | None:
        return self._error

    def start(self) -> None:
        super().start()
        self._storages.on_death = self._forget

    def _forget(self, key: int) -> None:
        self._parameter_of.pop(key, None)
        self._origins.pop(key, None)
        self._cast_before = {known for known in self._cast_before if known[0] != key}

    def note_batch(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if (key := storage_key(tensor)) is not None:
                self._origins[key] = "the batch"

    def _count(self, op: Op, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        phase = self._phase() or OTHER
        given = list(tensors_in((args, kwargs)))
        made = list(tensors_in(out))
        is_copy = op.name in ("aten._to_copy", "aten.copy_") and given and made
        source = given[-1 if op.name == "aten.copy_" else 0] if is_copy else None
        is_cast = source is not None and source.dtype != made[0].dtype
        if phase == OTHER:
            pass  # the audit's own ops
        elif source is not None and is_cast and source.is_floating_point() and made[0].is_floating_point():
            self._note_cast(source, made[0], phase)
        elif not op.is_view:
            self._note_op(op, given, made, phase)
        super()._count(op, func, args, kwargs, out)

    def _caller(self) -> str | None:
        """Return the model's line that is running, or None if the audit itself is the caller, as for backward."""
        who = caller() or self._backward_caller
        return None if who == self._asked_by else who

    def _note_cast(self, source: torch.Tensor, made: torch.Tensor, phase: str) -> None:
        source_key = storage_key(source)
        (function, autocast), who = self._functions.current(), self._caller()
        is_weight = source_key in self._parameter_of
        by = self._who(function, autocast, phase, is_weight)
        of = WEIGHT if is_weight else GRADIENT if by == BY_BACKWARD else ACTIVATION
        kind = {
            "source": short(source.dtype), "target": short(made.dtype), "phase": phase, "by": by, "of": of,
            "function": function, "module": self.module(), "caller": who,
        }  # fmt: skip
        sums = {"read_bytes": 0, "written_bytes": 0, "num_again": 0, "again_bytes": 0}
        new = {**kind, "num_by_micro_batch": [0] * self._num_micro_batches, **sums}
        entry = self.casts.setdefault(tuple(kind.values()), new)
        read_bytes, written_bytes = (source.numel() * tensor.element_size() for tensor in (source, made))
        entry["num_by_micro_batch"][self.micro_batch] += 1
        entry["read_bytes"] += read_bytes
        entry["written_bytes"] += written_bytes
        place = (source_key, source.storage_offset(), source.shape, source._version, made.dtype, self.micro_batch)
        if phase == FORWARD and place in self._cast_before:  # unchanged, and already cast to the same dtype
            entry["num_again"] += 1
            entry["again_bytes"] += read_bytes + written_bytes
        self._cast_before.add(place)
        if is_weight and by == BY_AUTOCAST:
            assert source_key is not None
            self.weights_cast[self._parameter_of[source_key]] = read_bytes
        self._set_origin([made], f"a cast at {who}" if by == BY_CODE and who else None)

    def _who(self, function: str | None, autocast: bool, phase: str, is_weight: bool) -> str:
        if phase == OPTIMIZER:
            return BY_OPTIMIZER
        if function in _EXPLICIT:
            return BY_CODE
        if function is None and phase == BACKWARD:
            # A checkpoint runs modules again, where functions are not visible.
            is_again = self._autocast is not None and (is_weight or bool(self._modules))
            return BY_AUTOCAST if is_again else BY_BACKWARD
        if function is None:
            return BY_TORCH
        is_in_autocast = autocast and not torch.is_autocast_enabled(self._device_type)
        return BY_AUTOCAST if is_in_autocast else BY_TORCH

    def _note_op(self, op: Op, given: list[torch.Tensor], made: list[torch.Tensor], phase: str) -> None:
        floating = [tensor for tensor in given if tensor.is_floating_point()]
        results = [tensor for tensor in made if tensor.is_floating_point()]
        is_factory = op.name.startswith(("aten.empty", "aten.new_")) or op.name.endswith("_like")
        if op.name in _NO_COMPUTATION or is_factory or not floating or not (results or phase == OPTIMIZER):
            self._set_origin(made, None)
            return
        function, autocast = self._functions.current()
        norm = self._functions.norms[-1] if function in NORMS and self._functions.norms else None
        if norm is not None:
            norm.ops.append(op.name)
            norm.module = norm.module or self.module()
        origin = self._origin(floating)
        row = {
            "op": op.name,
            "function": function,
            "phase": phase,
            "inputs": list(dict.fromkeys(short(tensor.dtype) for tensor in floating)),
            "output": short(results[0].dtype) if results else None,
            "autocast": autocast,  # whether the program had it on
            "origin": origin if phase == FORWARD else None,
            "is_mixed_norm": norm is not None and norm.is_mixed,
        }
        key = tuple(map(str, row.values()))
        if key not in self.ops:
            self.ops[key] = {**row, "num_calls": 0, "module": self.module(), "caller": self._caller()}
        self.ops[key]["num_calls"] += 1
        if phase == FORWARD and self._autocast is not None:
            low = {storage_key(tensor) for tensor in floating if tensor.dtype is self._autocast}
            self.num_weight_uses += len(low & self._parameter_of.keys())
        if self._autocast is not None:
            name = listed_name(self._device_type, [op.name.removeprefix("aten."), *([function] if function else [])])
            origin = origin if name is None else f"{name}, which autocast knows"
        self._set_origin(made, origin)

    def _origin(self, floating: list[torch.Tensor]) -> str | None:
        """Return where an op's float32 arguments come from: the batch, a cast, parameters, or an op on a list."""
        wide = [tensor for tensor in floating if tensor.dtype is torch.float32]
        keys = [key for tensor in wide if (key := storage_key(tensor)) is not None]
        found = [self._origins[key] for key in keys if key in self._origins]
        weights = [key for key in keys if key in self._parameter_of]
        if not found and weights and len(weights) == len(keys):
            return "float32 parameters"
        return found[0] if found else None

    def _set_origin(self, made: Iterable[torch.Tensor], origin: str | None) -> None:
        for tensor in made:
            key = storage_key(tensor)
            if key is None:
                continue
            if origin is None or tensor.dtype is not torch.float32:
                self._origins.pop(key, None)
            else:
                self._origins[key] = origin

"""One step with every op seen: its FLOPs by op, phase and dtype, and the birth and death of every storage.

A dispatch mode sees each op once autograd and autocast are through with it, forward and backward,
on any device. It runs in a window of its own: the clock's samples never meet it.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.record.clock import BACKWARD, FORWARD, OTHER
from stepscope.record.flops import OpFlops, count_flops
from stepscope.record.model import CallHooks, visible_modules
from stepscope.record.patches import Handle, remove_all

MAX_ALLOCATIONS = 200_000

PARAMETER = "parameter"
BUFFER = "buffer"
GRADIENT = "gradient"
OPTIMIZER_STATE = "optimizer_state"
INPUT = "input"
WEIGHT_CAST = "autocast_weight_cast"
ACTIVATION = "activation"
TEMPORARY = "temporary"


class Ledger(TorchDispatchMode):  # type: ignore[misc]  # torch is not type checked here
    """Counts FLOPs and follows storages from `start()` to `stop()`."""

    supports_higher_order_operators = True
    # Torch that does not know `ignore_compile_internals` guards compiled code on the modes that are on.
    passes_compiled_code = hasattr(TorchDispatchMode, "ignore_compile_internals")

    def __init__(self, roots: list[nn.Module], optimizers: list[Any], phase: Callable[[], str | None]) -> None:
        super().__init__()
        self._phase = phase
        self._optimizers = optimizers
        self._modules: list[str] = []
        self._handles: list[Handle] = []
        self._entered = False
        self._began_ns = 0

        self._flops: Counter[tuple[str, str, str, bool]] = Counter()
        self._model_flops: Counter[str] = Counter()
        self._uncounted: dict[str, list[int]] = {}
        self._error: str | None = None
        self._weight_flops: Counter[int] = Counter()
        self._activation_flops = 0  # forward products of two activations: attention
        self._looked_up: set[int] = set()
        self._touched: set[int] = set()
        self._backward_makes_graph = False

        self._allocations: list[dict[str, Any]] = []
        self._live: dict[int, int] = {}  # storage key -> index into the allocations
        self._references: dict[int, weakref.ref[Any]] = {}
        self._parameter_of: dict[int, int] = {}  # storage key -> parameter index, casts included
        self._num_elements: list[int] = []
        self._num_dimensions: list[int] = []
        self._hidden: dict[str, None] = {}  # ops that multiply a weight by a formula nobody wrote
        self._dropped = 0
        self._roots = roots

    # Without this Dynamo marks a frame it meets while we are looking on as never to be compiled.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def start(self) -> None:
        self._began_ns = time.perf_counter_ns()
        for root in self._roots:
            for name, parameter in root.named_parameters():
                key = _key(parameter)
                if key is not None and key not in self._parameter_of:
                    self._parameter_of[key] = len(self._num_elements)
                    self._num_elements.append(parameter.numel())
                    self._num_dimensions.append(parameter.dim())
                    self._born(parameter, "before the window", PARAMETER, module=name)
                if parameter.grad is not None:
                    self._born(parameter.grad, "before the window", GRADIENT, module=name)
            for name, buffer in root.named_buffers():
                self._born(buffer, "before the window", BUFFER, module=name)
            for name, module in visible_modules(root):
                self._handles.append(CallHooks(module, self._entering(name), self._leaving))
        self._note_optimizer_state()
        self.__enter__()
        self._entered = True

    def stop(self) -> None:
        if self._entered:
            self.__exit__(None, None, None)
            self._entered = False
        self._note_optimizer_state()
        remove_all(self._handles)

    # --- what the session reports --------------------------------------------------------------

    def note_inputs(self, args: Any, kwargs: Any) -> None:
        """The tensors the root module is called with are inputs."""
        self._own((t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)), INPUT, "outside an op")

    def backward_begins(self, create_graph: bool = False) -> None:
        """What the forward made and is still alive now is kept for backward."""
        self._backward_makes_graph = create_graph
        for index in list(self._live.values()):  # a storage may die meanwhile
            if self._allocations[index]["owner"] == TEMPORARY and self._allocations[index]["phase"] == FORWARD:
                self._allocations[index]["owner"] = ACTIVATION

    def note_gradients(self, optimizer: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._own((p.grad for p in parameters if p.grad is not None), GRADIENT, "outside an op")

    def _note_optimizer_state(self) -> None:
        for optimizer in self._optimizers:
            tensors = (t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, torch.Tensor))
            self._own(tensors, OPTIMIZER_STATE, "before the window")

    # --- ops -----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            self._guarded(func, args, kwargs, None)
            return func(*args, **kwargs)
        if func.namespace != "prim" and count_flops.has_no_formula(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        out = func(*args, **kwargs)
        self._guarded(func, args, kwargs, out)
        return out

    def _guarded(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        # A shape we did not think of is a gap in the count, said aloud; never the end of a training run.
        try:
            self._count(func, args, kwargs, out)
        except Exception as error:
            self._error = self._error or f"{func}: {type(error).__name__}: {error}"

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        phase, name = self._phase() or OTHER, count_flops.name(func)
        op = count_flops(func, args, kwargs, out)
        weights: set[int] = set()
        if phase == FORWARD:
            keys = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            weights = {self._parameter_of[key] for key in keys if key in self._parameter_of}
        if op is None:
            if not getattr(func, "is_view", False) and out is not None:
                num_elements = sum(t.numel() for t in _outputs(out))
                entry = self._uncounted.setdefault(name, [0, 0])
                entry[0] += 1
                entry[1] += num_elements
                if any(self._num_dimensions[index] > 1 for index in weights) and not _moves_or_maps(func, name):
                    self._hidden.setdefault(name)
                if num_elements:  # an expert that got no token is called with an empty tensor
                    self._touched |= weights
        elif op.flops:
            self._add(op, func, phase, weights)
        if out is None:
            return
        if name == "aten.embedding":
            key = _key(args[0])
            if key in self._parameter_of:
                self._looked_up.add(self._parameter_of[key])
        for tensor in _outputs(out):
            key = _key(tensor)
            if key is None or key in self._live:
                continue
            owner = TEMPORARY
            if name == "aten._to_copy" and phase == FORWARD and (source := _key(args[0])) in self._parameter_of:
                owner = WEIGHT_CAST
                self._parameter_of[key] = self._parameter_of[source]
            self._born(tensor, name, owner, phase, self._modules[-1] if self._modules else None)

    def _add(self, op: OpFlops, func: Any, phase: str, weights: set[int]) -> None:
        # Backward formulas run with gradients off, unless a graph of them is asked for; a checkpointed
        # forward that is run again turns them on.
        recomputed = phase == BACKWARD and torch.is_grad_enabled() and not self._backward_makes_graph
        self._flops[count_flops.name(func), phase, op.dtype, recomputed] += op.flops
        if not recomputed:
            self._model_flops[op.dtype] += op.model_flops
        if phase == FORWARD:
            for index in weights:
                self._weight_flops[index] += op.flops
            if not weights:
                self._activation_flops += op.model_flops

    # --- storages ------------------------------------------------------------------------------

    def _born(
        self, tensor: torch.Tensor, op: str, owner: str, phase: str | None = None, module: str | None = None
    ) -> None:
        key = _key(tensor)
        if key is None or key in self._live:
            return
        if len(self._allocations) >= MAX_ALLOCATIONS:
            self._dropped += 1
            return
        storage = tensor.untyped_storage()
        self._live[key] = len(self._allocations)
        self._allocations.append(
            {
                "bytes": storage.nbytes(),
                "device": str(tensor.device),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "owner": owner,
                "op": op,
                "phase": phase,
                "module": module,
                "born_ns": time.perf_counter_ns() - self._began_ns if self._entered else None,
                "died_ns": None,
            }
        )
        self._references[key] = weakref.ref(storage, lambda _reference: self._died(key))

    def _died(self, key: int) -> None:
        index = self._live.pop(key, None)
        self._references.pop(key, None)
        self._parameter_of.pop(key, None)
        if index is not None:
            self._allocations[index]["died_ns"] = time.perf_counter_ns() - self._began_ns

    def _own(self, tensors: Iterable[torch.Tensor], owner: str, op: str) -> None:
        for tensor in tensors:
            key = _key(tensor)
            if key is None:
                continue
            if key in self._live:
                self._allocations[self._live[key]]["owner"] = owner
            else:
                self._born(tensor, op, owner)

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
            self._modules.append(name)

        return enter

    def _leaving(self, _module: nn.Module) -> None:
        if self._modules:
            self._modules.pop()

    # --- results -------------------------------------------------------------------------------

    def flops(self, compiled: bool) -> dict[str, Any]:
        """FLOPs of the step by op, phase and dtype, what had no formula, and each weight's share."""
        return {
            "by_op": [
                {"op": op, "phase": phase, "dtype": dtype, "recomputed": recomputed, "flops": flops}
                for (op, phase, dtype, recomputed), flops in self._flops.most_common()
            ],
            "model_flops_by_dtype": dict(self._model_flops),
            "uncounted": [
                {"op": op, "num_calls": calls, "num_elements": elements}
                for op, (calls, elements) in sorted(self._uncounted.items(), key=lambda item: -item[1][1])
            ],
            "forward_activation_flops": self._activation_flops,
            "compiled": compiled,
            "hidden_products": list(self._hidden),
            "error": self._error,
            "weights": [
                {
                    "num_elements": num_elements,
                    "forward_flops": self._weight_flops.get(index, 0),
                    "looked_up": index in self._looked_up,
                    # Compiled code reads its parameters unseen.
                    "used": compiled or index in self._touched or index in self._weight_flops,
                }
                for index, num_elements in enumerate(self._num_elements)
            ],
        }

    def memory(self) -> dict[str, Any]:
        """Every storage seen in the window with its owner and lifetime; null `born_ns`: it was there before."""
        return {"num_dropped": self._dropped, "allocations": self._allocations}


def _moves_or_maps(func: Any, name: str) -> bool:
    """Whether an op without a formula is a copy, a lookup or elementwise: no product is missing then."""
    moves = ("aten._to_copy", "aten.clone", "aten.copy_", "aten.embedding", "aten.detach", "aten.cat", "aten.stack")
    return name in moves or torch.Tag.pointwise in getattr(func, "tags", ())


def _outputs(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    return [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]


def _key(tensor: Any) -> int | None:
    """What identifies a tensor's storage while it lives; None for tensors that have none of their own."""
    try:
        storage = tensor.untyped_storage()
        return int(storage._cdata) if storage.nbytes() else None
    except (NotImplementedError, RuntimeError, AttributeError):
        return None

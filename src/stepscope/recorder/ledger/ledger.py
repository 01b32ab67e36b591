"""Observes every op of one step: FLOPs by op, phase and dtype, and the lifetime of every storage.

A dispatch mode sees each op after autograd and autocast, forward and backward, on any device. It runs in a separate
window and never affects timed steps.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.recorder.clock import BACKWARD, FORWARD, OTHER
from stepscope.recorder.frames import caller
from stepscope.recorder.ledger import storages as owner
from stepscope.recorder.ledger.flops import FlopTally, Op
from stepscope.recorder.ledger.nodes import NodeModules, saved_bytes
from stepscope.recorder.ledger.op_log import OpLog
from stepscope.recorder.ledger.padding import Padding
from stepscope.recorder.ledger.storages import BEFORE, OUTSIDE, Stage, Storages, storage_key
from stepscope.recorder.model import CallHooks, named_modules, plain_name
from stepscope.recorder.modes import ctc_loss_below_modes, enter_below, leave
from stepscope.recorder.patches import Around, Handle, remove_all
from stepscope.recorder.values import (
    named_buffers_in,
    named_parameters_in,
    parameters_in,
    stored,
    stored_in,
    tensors_in,
)
from stepscope.recorder.wall import pass_on

MEMORY_SCHEMA_VERSION = 2
_MAX_ERROR = 200
LOSS = "loss"  # the end of a forward: after the last root module, before the backward


class Ledger(TorchDispatchMode):  # type: ignore[misc]  # torch is not type checked here
    """Counts FLOPs and follows storages from `start()` to `stop()`.

    `callers` records who requested each storage, `logs_ops` the line and the storages of each op. `storages` passed
    in stay open after the ledger stops. If `is_passive`, the ledger observes nothing itself, and `saw()` reports each
    op to it.
    """

    supports_higher_order_operators = True
    # Torch versions without `ignore_compile_internals` guard compiled code on the active modes.
    passes_compiled_code = hasattr(TorchDispatchMode, "ignore_compile_internals")

    def __init__(
        self,
        roots: list[nn.Module],
        optimizers: list[Any],
        phase: Callable[[], str | None],
        *,
        callers: bool = False,
        storages: Storages | None = None,
        is_passive: bool = False,
        logs_ops: bool = False,
    ) -> None:
        super().__init__()
        # Weak references: the script may release its models.
        self._root_references = [weakref.ref(root) for root in roots]
        self._optimizer_references = [weakref.ref(one) for one in optimizers]
        self._phase, self._callers = phase, callers
        self._modules: list[str] = []
        self._left_root = False
        self._last_phase: str | None = None
        self._handles: list[Handle] = []
        self._entered = self._is_over = False
        self._ops: dict[Any, Op] = {}

        self._error: str | None = None
        self._tally = FlopTally(self._weights)
        self._parameter_of: dict[int, int] = {}  # storage key -> parameter index, casts included
        self._holders: dict[int, str] = {}  # id of a parameter -> the module that owns it
        self._nodes = NodeModules()
        self._num_nodes: dict[str, int] = {}
        self._backward_caller: str | None = None
        self.saved_error: str | None = None
        self.padding = Padding()
        self._saved: dict[str | None, tuple[int, int]] = {}  # module -> bytes, tensors: the largest of all backwards
        self._storages = storages or Storages(self._stage)
        self._owns_storages = storages is None
        self._is_passive = is_passive
        self.log = OpLog(self._storages.live.get) if logs_ops else None

    # Without this, Dynamo marks any frame it meets inside the mode as never to be compiled.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def start(self) -> None:
        storages = self._storages
        storages.stage = self._stage
        storages.on_death = lambda key: self._parameter_of.pop(key, None)
        for root, prefix, modules in named_modules(self._roots):
            for name, parameter in named_parameters_in(root, prefix):
                holder = self._holders.setdefault(id(parameter), _holder(name))
                key = storage_key(parameter)
                if key is not None and key not in self._parameter_of:
                    self._parameter_of[key] = self._tally.add_weight(parameter)
                    storages.own((parameter,), owner.PARAMETER, BEFORE, holder)
            for name, buffer in named_buffers_in(root, prefix):
                if storage_key(buffer) not in self._parameter_of:
                    storages.own((buffer,), owner.BUFFER, BEFORE, _holder(name))
            for name, module in modules:
                self._nodes.names.setdefault(id(module), plain_name(name))
                self._handles.append(CallHooks(module, partial(self._entering, plain_name(name)), self._leaving))
        # Some parameters have no module, or one that is never called.
        loose = [p for p in optimized(self._optimizers) if id(p) not in self._holders]
        storages.own(loose, owner.PARAMETER, BEFORE)
        self.note_parameter_gradients()
        self._note_optimizer_state()
        storages.open()
        if not self._is_passive:
            self._handles.append(Around(torch, "ctc_loss", ctc_loss_below_modes))
            enter_below(self)
            self._entered = True

    def stop(self) -> None:
        self._is_over = True
        self._num_nodes = self._nodes.made()
        if self._entered:
            self._entered = not leave(self)
        self.note_parameter_gradients()
        self._note_optimizer_state()
        if self._owns_storages:
            self._storages.close()
        remove_all(self._handles)

    @property
    def _roots(self) -> list[nn.Module]:
        return [root for one in self._root_references if (root := one()) is not None]

    @property
    def _optimizers(self) -> list[Any]:
        return [optimizer for one in self._optimizer_references if (optimizer := one()) is not None]

    def indices(self, keys: Iterable[int]) -> list[int]:
        """Return the numbers of storages that are alive."""
        return [self._storages.live[key] for key in keys if key in self._storages.live]

    # --- reports from the session --------------------------------------------------------------

    def note_inputs(self, args: Any, kwargs: Any) -> None:
        self._storages.own(tensors_in((args, kwargs)), owner.INPUT, OUTSIDE)
        self.padding.note(args, kwargs)

    def note_before(self, held: Iterable[tuple[torch.Tensor, str | None]], left_alive: bool = False) -> None:
        """Add tensors that exist before `start()`, with their holders. Call this first for those `left_alive`."""
        whose = owner.LEFT_ALIVE if left_alive else owner.OTHERS
        for tensor, holder in ((part, holder) for each, holder in held for part in stored(each)):
            key = storage_key(tensor)
            if key is not None and key not in self._storages.live:
                self._storages.born(key, tensor, BEFORE, whose, caller=holder, before=True)

    def backward_begins(self, create_graph: bool = False, tensors: Any = ()) -> None:
        """Mark what the forward made and is still alive as kept for backward, which starts from `tensors`."""
        self._tally.backward_makes_graph = create_graph
        self._backward_caller = caller() if self._callers else None
        self._storages.keep_for_backward(FORWARD)
        try:
            saved = saved_bytes(
                [tensor.grad_fn for tensor in tensors_in(tensors)],
                self._nodes,
                lambda key: self._storages.owner_of(key) == owner.PARAMETER,
            )
            for module, entry in saved.items():
                self._saved[module] = max(self._saved.get(module, entry), entry)
        except Exception as error:  # an unexpected graph must not end a training run
            pass_on(error)
            self.saved_error = f"{type(error).__name__}: {error}"

    def note_gradients(self, optimizer: Any) -> None:
        self._note_gradients(optimized([optimizer]))

    def note_parameter_gradients(self) -> None:
        self._note_gradients(chain(*(parameters_in(root) for root in self._roots), optimized(self._optimizers)))

    def _note_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._storages.own((parameter.grad,), owner.GRADIENT, OUTSIDE, self._holders.get(id(parameter)))

    def _note_optimizer_state(self) -> None:
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                self._storages.own(tensors_in(state), owner.OPTIMIZER_STATE, BEFORE, self._holders.get(id(parameter)))

    # --- ops -----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, op, decomposes = kwargs or {}, None, False
        # Called from Python, an op would show itself to subclasses of Tensor, as it does not in a backward.
        with torch._C.DisableTorchFunctionSubclass():
            try:
                if not self._is_over:
                    op = self._ops.get(func) or self._ops.setdefault(func, Op(func))
                    decomposes = op.decomposes and not any(map(_is_nested, args))
                    if op.is_higher_order:
                        self._count(op, func, args, kwargs, None)
            except Exception as error:
                self._failed(func, error)
            if decomposes:
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            out = func(*args, **kwargs)
            try:
                if op is not None and not op.is_higher_order:
                    self._count(op, func, args, kwargs, out)
            except Exception as error:
                self._failed(func, error)
            return out

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        try:
            op = self._ops.get(func) or self._ops.setdefault(func, Op(func))
            self._count(op, func, args, kwargs or {}, out)
        except Exception as error:
            self._failed(func, error)

    def _failed(self, func: Any, error: Exception) -> None:
        # An unexpected shape leaves a reported gap in the counts. It must not end a training run.
        pass_on(error)
        what = next(iter(str(error).splitlines()), "")
        self._error = self._error or f"{func}: {type(error).__name__}: {what[:_MAX_ERROR]}"

    def _count(self, op: Op, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        phase = self._phase() or OTHER
        if phase != self._last_phase:  # a phase may allocate nothing
            if self._last_phase == BACKWARD:  # the optimizer may have run the backward
                self.note_parameter_gradients()
            self._last_phase = phase
            self._storages.note_stage()
        outputs = tuple(tensors_in(stored_in(out)))
        held = stored_in(args), stored_in(kwargs)
        self._follow(outputs, op, *held, phase)  # first, so that a formula's error does not lose bytes
        if self.log is not None:
            self.log.note(func, op, *held, outputs, phase)
        self.padding.note_loss(op.name, args)
        self._tally.count(op, func, args, kwargs, out, outputs, phase)

    def _follow(self, outputs: tuple[torch.Tensor, ...], op: Op, args: Any, kwargs: Any, phase: str) -> None:
        """Add the output storages that are not known yet."""
        born: dict[int, torch.Tensor] = {}
        for tensor in outputs:
            key = storage_key(tensor)
            if key is not None and key not in self._storages.live:
                born.setdefault(key, tensor)
        taken = {storage_key(tensor) for tensor in tensors_in((args, kwargs))} if born else set()
        for key, tensor in born.items():
            if op.is_view or key in taken:  # it existed before
                self._storages.born(key, tensor, BEFORE, owner.OTHERS, before=True)
                continue
            source = storage_key(args[0]) if op.name == "aten._to_copy" and phase == FORWARD else None
            is_cast = source is not None and source in self._parameter_of
            if source is not None and is_cast:
                self._parameter_of[key] = self._parameter_of[source]
            whose = owner.WEIGHT_CAST if is_cast else owner.TEMPORARY
            who = (caller() or self._backward_caller) if self._callers else None
            self._storages.born(key, tensor, op.name, whose, phase, self.module(), who)

    def _weights(self, given: Any) -> set[int]:
        keys = map(storage_key, tensors_in(given))
        return {self._parameter_of[key] for key in keys if key in self._parameter_of}

    # --- modules -------------------------------------------------------------------------------

    def _entering(self, name: str, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        self._modules.append(name)
        self._nodes.open(name)

    def _leaving(self, _module: nn.Module) -> None:
        if self._modules:
            self._modules.pop()
        self._nodes.open(self.module())
        self._left_root = not self._modules

    def module(self) -> str | None:
        """Return the innermost open module; in a backward, the module that made the running node."""
        if self._modules:
            return self._modules[-1]
        node, name = self._nodes.running()
        if name is None and (parameter := getattr(node, "variable", None)) is not None:
            return self._holders.get(id(parameter))  # a gradient is being accumulated
        return name

    def _stage(self) -> str:
        phase = self._phase() or OTHER
        self._left_root &= phase == FORWARD
        return LOSS if self._left_root and not self._modules else phase

    # --- results -------------------------------------------------------------------------------

    def flops(self, compiled: bool) -> dict[str, Any]:
        """Return the FLOPs of the step by op, phase and dtype, ops without a formula, and each weight's share."""
        return self._tally.table(compiled, self._error)

    def memory(self) -> dict[str, Any]:
        """Return the tables of `memory.json.gz` (docs/recording.md), without those that need a running process."""
        storages = self._storages
        parameters = [*(p for root in self._roots for p in parameters_in(root)), *optimized(self._optimizers)]
        return {
            "schema_version": MEMORY_SCHEMA_VERSION,
            "device": str(parameters[0].device) if parameters else "cpu",
            "num_dropped": storages.num_dropped,
            "allocations": storages.allocations,
            "stages": _without_pauses(storages.stages),
            "saved": [
                {"module": module, "bytes": num_bytes, "num_tensors": num}
                for module, (num_bytes, num) in sorted(self._saved.items(), key=lambda item: -item[1][0])
            ],
            "graphs": [{"module": module, "num_nodes": num} for module, num in self._num_nodes.items()],
            "left_alive": [],
            "allocator": None,
        }


def optimized(optimizers: list[Any]) -> Iterator[torch.Tensor]:
    return (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


def _holder(name: str) -> str:
    """Return the module that owns a parameter or buffer of this name.

    >>> _holder("blocks.0.up.weight"), _holder("scale")
    ('blocks.0.up', '')
    """
    return plain_name(name.rpartition(".")[0])


def _without_pauses(stages: list[Stage]) -> list[Stage]:
    """Return the stages, with pauses between two root modules of one forward merged into the forward."""
    kept: list[Stage] = []
    for stage in stages:
        if stage["name"] == FORWARD and [entry["name"] for entry in kept[-2:]] == [FORWARD, LOSS]:
            kept.pop()
        else:
            kept.append(stage)
    return kept


def _is_nested(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested  # has kernels of its own, and no sizes

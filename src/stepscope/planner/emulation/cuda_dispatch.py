"""Emulates CUDA-specific behavior on a CPU-only PyTorch build: which op a call becomes if that depends on the device.

Planned tensors have the CPU's dispatch keys, so composite ops would run as on a CPU. While the context is active, it
overrides attention's choice of backend, fused dropout and RMSNorm, autocast's lists, the foreach optimizers that are
CUDA's default, and the answers of `torch.cuda`.
"""

import inspect
import textwrap
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from stepscope.devices.limits import Device
from stepscope.errors import UsageError
from stepscope.planner.emulation import attention_backend as attention
from stepscope.planner.emulation import autocast, cuda_calls
from stepscope.planner.emulation.device_moves import DeviceMoves
from stepscope.planner.emulation.planned_tensor import CPU, CUDA, InPlaceSums, PlannedTensor, assume, users_place
from stepscope.planner.emulation.torch_support import launching_nothing

aten = torch.ops.aten
MIB = 1 << 20
RECURRENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
NOT_COMPILED = "compiled before the plan began, so planned op by op as it is written"


class CudaDispatch:
    """Gives composite ops the planned device's behavior while the context is active.

    `facts` describes the planned device for programs that ask for its name or memory.
    """

    def __init__(
        self, device: str, compute_capability: tuple[int, int] = (9, 0), facts: Device | None = None
    ) -> None:
        self._is_cuda = device == "cuda"
        self.device = CUDA if self._is_cuda else CPU
        self._facts = facts or Device("NVIDIA", {}, 80 << 30, 1, "", compute_capability=compute_capability)
        self.unseen: dict[str, str] = {}  # what is not planned the way it would run, and why
        attend = attention.kernel(compute_capability if self._is_cuda else None)
        self.kernels: dict[Any, Callable[..., Any]] = {
            aten.scaled_dot_product_attention.default: attend,
            aten.linear.default: _linear,
        }
        if self._is_cuda:
            self.kernels |= {
                aten.dropout.default: _dropout,
                aten.softmax.int: partial(_widen, aten._softmax),
                aten.log_softmax.int: partial(_widen, aten._log_softmax),
            }
            for name in RECURRENCES:
                for op in (getattr(aten, name).input, getattr(aten, name).data):
                    self.kernels[op] = partial(self._run_step_by_step, op)
        self._stack = ExitStack()
        self._failed_threads: list[str] = []

    def __enter__(self) -> "CudaDispatch":
        library = torch.library.Library("aten", "IMPL")
        with ExitStack() as stack, warnings.catch_warnings():
            stack.enter_context(_own_defaults())
            stack.callback(library._destroy)
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for op, kernel in self.kernels.items():
                library.impl(op.name().removeprefix("aten::"), kernel, "AutogradCPU")
            for patch in self._patches():
                stack.enter_context(patch)
            if self._is_cuda:
                # A kernel must exist so that autograd uses its own formula instead of decomposing the op.
                library.impl("_fused_rms_norm", _never, "CPU")
                for name, kernel in autocast.kernels():
                    library.impl(name, kernel, "AutocastCPU")
                stack.callback(register_optimizer_step_pre_hook(_prefer_foreach).remove)
                stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
                torch._C._set_mkldnn_enabled(False)  # it has its own recurrent ops
                moves = DeviceMoves()
                stack.enter_context(moves.in_backwards())
                stack.enter_context(moves)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check_threads(self) -> None:
        """Raise UsageError if a thread of the program has failed, because its work is missing."""
        if self._failed_threads:
            raise UsageError(
                f"a thread of the program failed, {self._failed_threads[0]}; a plan follows only the thread that "
                "began it: let that one do the work"
            )

    def _note_thread(self, original: Callable[[Any], Any], facts: Any) -> Any:
        """Replaces `threading.excepthook`."""
        frames = traceback.extract_tb(facts.exc_traceback)
        theirs = [frame for frame in frames if frame.filename != threading.__file__]
        where = f"{Path(theirs[0].filename).name}:{theirs[0].lineno}: " if theirs else ""
        said = textwrap.shorten(str(facts.exc_value), 150, placeholder=" …")
        self._failed_threads.append(f"{where}{facts.exc_type.__name__}: {said}")
        return original(facts)

    def _patches(self) -> Iterator[Any]:
        from torch._dynamo import eval_frame

        yield from refusals()
        yield from cuda_calls.patches(self._facts if self._is_cuda else None)
        if self._is_cuda:
            yield from autocast.patches()
            yield from attention.flex_patches(lambda why: self.unseen.update(flex_attention=why))
            yield _save_on_cpu_patch(lambda why: self.unseen.update(save_on_cpu=why))
        yield mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", _step_in_any_case)
        yield mock.patch.object(threading, "excepthook", partial(self._note_thread, threading.excepthook))
        yield mock.patch.object(DataLoader, "_get_iterator", _in_this_process)
        callback = getattr(eval_frame, "_callback_from_stance", None)
        if callback is not None:
            yield mock.patch.object(eval_frame, "_callback_from_stance", partial(self._note_compilation, callback))
        yield torch.compiler.set_stance("force_eager")
        yield launching_nothing(may_import=False)

    def _note_compilation(self, original: Callable[[Any], Any], callback: Any) -> Any:
        if callback is not None and callback is not False:
            self.unseen["torch.compile"] = NOT_COMPILED
        return original(callback)

    def _run_step_by_step(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a recurrence as the ops of its steps, and note that cuDNN's is one op."""
        why = "planned as the ops of its steps; the memory that cuDNN uses instead is not counted"
        self.unseen[op._schema.name.removeprefix("aten::")] = why
        return op.decompose(*args, **kwargs)


@contextmanager
def _own_defaults() -> Iterator[None]:
    """Restore settings that the program changes or modes that it does not exit, such as a default device."""
    dtype = torch.get_default_dtype()
    modes = _get_current_function_mode_stack()
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    device = torch.utils._device.CURRENT_DEVICE
    try:
        yield
    finally:
        while _get_current_function_mode_stack():
            _pop_mode()
        for mode in modes:
            _push_mode(mode)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = context
        torch.utils._device.CURRENT_DEVICE = device
        torch.set_default_dtype(dtype)


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("an op on a planned tensor must not reach a kernel")


def _in_this_process(loader: Any) -> Any:
    """Return a DataLoader's iterator that loads in this process."""
    with mock.patch.multiple(loader, num_workers=0, timeout=0), torch.device(CPU):
        return _Reader(loader)


class _Reader(_SingleProcessDataLoaderIter):  # type: ignore[misc]  # torch is not type checked here
    """Draws indices on the host, also while a default device is set."""

    def _next_index(self) -> Any:
        with torch.device(CPU):
            return super()._next_index()


def _step_in_any_case(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    assume("the gradient scaler finds no infinity, so no step is skipped")
    return optimizer.step(*args, **kwargs)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    with InPlaceSums() if type(x) is PlannedTensor else nullcontext():  # adds the bias
        return aten.linear.default.decompose(x, weight, bias)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros_like(x)
    return aten.native_dropout(x, p, True)[0]


def _widen(op: Any, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Run a softmax that reads half precision and writes float32 without a converted copy."""
    if autocast.is_low(x) and dtype is torch.float32:
        return op(x, dim, True)
    return op(x if dtype is None else x.to(dtype), dim, False)


def _prefer_foreach(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Choose torch.optim's default on CUDA. Adafactor uses its loop, which needs less memory."""
    if isinstance(optimizer, torch.optim.Adafactor):
        return
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not group.get("differentiable", False)


def _save_on_cpu_patch(note: Callable[[str], None]) -> Any:
    """Return a patch of `torch.autograd.graph.save_on_cpu` that calls `note` whenever its host memory peaks."""
    original = torch.autograd.graph.save_on_cpu.__init__
    live_bytes = most_bytes = 0

    def count(num_bytes: int) -> None:
        nonlocal live_bytes, most_bytes
        live_bytes += num_bytes
        if live_bytes > most_bytes:
            most_bytes = live_bytes
            note(f"keeps up to {most_bytes / MIB:,.1f} MiB in host memory, in addition to the device's")

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        pack = self.pack_hook

        def counted(tensor: torch.Tensor) -> Any:
            device, packed = pack(tensor)
            num_bytes = packed.numel() * packed.element_size()
            count(num_bytes)
            weakref.finalize(packed, count, -num_bytes).atexit = False
            return device, packed

        self.pack_hook = counted

    return mock.patch.object(torch.autograd.graph.save_on_cpu, "__init__", __init__)


ONE_DEVICE = "a plan is for one device: plan the module without it, with the batch of one device"
DENSE = "their sizes depend on data: plan with dense tensors, or measure with stepscope bench"
RAGGED = "plans do not support them: plan with padded tensors, or measure with stepscope bench"
_CALLS: tuple[tuple[Any, str, str, str], ...] = (
    (nn.DataParallel, "__init__", "torch.nn.DataParallel", ONE_DEVICE),
    (nn.parallel.DistributedDataParallel, "__init__", "DistributedDataParallel", ONE_DEVICE),
    (torch.nested, "nested_tensor", "nested tensors", RAGGED),
    (torch.nested, "as_nested_tensor", "nested tensors", RAGGED),
    (torch.nested, "nested_tensor_from_jagged", "nested tensors", RAGGED),
    (torch.nested, "narrow", "nested tensors", RAGGED),
    (torch, "_nested_tensor_from_mask", "nested tensors (enable_nested_tensor)", RAGGED),
    (torch, "sparse_coo_tensor", "sparse tensors", DENSE),
    (torch, "sparse_csr_tensor", "sparse tensors", DENSE),
    (torch.Tensor, "to_sparse", "sparse tensors", DENSE),
)


def refusals() -> Iterator[Any]:
    """Yield patches that reject calls that no plan can follow, with their place in the program."""
    for owner, name, what, advice in _CALLS:
        if hasattr(owner, name):
            yield mock.patch.object(owner, name, _refusing(what, advice))
    for name in ("embedding", "embedding_bag"):
        yield mock.patch.object(functional, name, _with_dense_gradient(getattr(functional, name)))


def _refusing(what: str, advice: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UsageError(f"{what} at {users_place()}: {advice}")

    return refuse


def _with_dense_gradient(lookup: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(lookup)

    def look_up(*args: Any, **kwargs: Any) -> Any:
        named = signature.bind(*args, **kwargs).arguments
        if named.get("sparse") and torch.is_grad_enabled() and named["weight"].requires_grad:
            raise UsageError(
                f"the sparse gradient of an embedding at {users_place()}: its size depends on data. Plan with "
                "sparse=False, whose gradient is as large as the weights, or measure with stepscope bench"
            )
        return lookup(*args, **kwargs)

    return look_up

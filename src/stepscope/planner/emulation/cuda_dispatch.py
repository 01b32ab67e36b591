"""A device's manners on a build of PyTorch that has it not: which op a call becomes where that depends on the device.

Ghosts have a CPU's dispatch keys, so composite ops take the CPU's way. Registered over it here, for as long as the
context lasts: attention's choice of back end, the fused dropout and RMSNorm, autocast's lists, the foreach optimizers
that CUDA gets by default, and what `torch.cuda` answers.
"""

from __future__ import annotations

import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from stepscope.devices.peaks import Device
from stepscope.errors import UsageError
from stepscope.planner import host_memory as host
from stepscope.planner.emulation import attention_backend as attention
from stepscope.planner.emulation import autocast, cuda_calls, flex, refusals
from stepscope.planner.emulation.device_moves import Moves
from stepscope.planner.emulation.planned_tensor import CPU, CUDA, assume
from stepscope.planner.emulation.triton_launches import launching_nothing

aten = torch.ops.aten
RECURRENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
NOT_COMPILED = "compiled before the plan began: planned as it is written, op by op"


class Manners:
    """Where a plan's tensors are, and while the context lasts, how composite ops behave there.

    `facts`: the planned device as the table has it, for programs that ask for its name or memory.
    """

    def __init__(
        self, device: str, compute_capability: tuple[int, int] = (9, 0), facts: Device | None = None
    ) -> None:
        self._is_cuda = device == "cuda"
        self.device = CUDA if self._is_cuda else CPU
        self._facts = facts or Device("NVIDIA", {}, 80 << 30, 1, "", compute_capability=compute_capability)
        self.unseen: dict[str, str] = {}
        """What is not planned as it would run, and why."""
        attend = attention.kernel(compute_capability if self._is_cuda else None)
        self.kernels: dict[Any, Callable[..., Any]] = {aten.scaled_dot_product_attention.default: attend}
        if self._is_cuda:
            self.kernels |= {
                aten.dropout.default: _dropout,
                aten.softmax.int: _widening(aten._softmax),
                aten.log_softmax.int: _widening(aten._log_softmax),
            }
            for name in RECURRENCES:
                for op in (getattr(aten, name).input, getattr(aten, name).data):
                    self.kernels[op] = self._step_by_step(op)
        self._stack = ExitStack()
        self._failed_threads: list[str] = []

    def __enter__(self) -> Manners:
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
                # There is a kernel, so that autograd has its own formula for it instead of the parts it is made of.
                library.impl("_fused_rms_norm", _never, "CPU")
                for name, kernel in autocast.kernels():
                    library.impl(name, kernel, "AutocastCPU")
                stack.callback(register_optimizer_step_pre_hook(_prefer_foreach).remove)
                stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
                torch._C._set_mkldnn_enabled(False)  # it has recurrences of its own
                moves = Moves()
                stack.enter_context(moves.in_backwards())
                stack.enter_context(moves)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check_threads(self) -> None:
        """Raise where a thread of the program has failed: what it was to do is missing."""
        if self._failed_threads:
            raise UsageError(
                f"a thread of the program failed, {self._failed_threads[0]}; a plan follows the thread that began it "
                "only: let that one do the work"
            )

    def _noting_threads(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def failed(facts: Any) -> Any:
            frames = traceback.extract_tb(facts.exc_traceback)
            theirs = [frame for frame in frames if frame.filename != threading.__file__]
            where = f"{Path(theirs[0].filename).name}:{theirs[0].lineno}: " if theirs else ""
            said = textwrap.shorten(str(facts.exc_value), 150, placeholder=" …")
            self._failed_threads.append(f"{where}{facts.exc_type.__name__}: {said}")
            return original(facts)

        return failed

    def _patches(self) -> Iterator[Any]:
        from torch._dynamo import eval_frame

        yield from refusals.patches()
        yield from cuda_calls.patches(self._facts if self._is_cuda else None)
        if self._is_cuda:
            yield from autocast.patches()
            yield from flex.patches(lambda why: self.unseen.update(flex_attention=why))
            yield host.patch(lambda why: self.unseen.update(save_on_cpu=why))
        yield mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", _step_in_any_case)
        yield mock.patch.object(threading, "excepthook", self._noting_threads(threading.excepthook))
        yield mock.patch.object(DataLoader, "_get_iterator", _in_this_process)
        callback = getattr(eval_frame, "_callback_from_stance", None)
        if callback is not None:
            yield mock.patch.object(eval_frame, "_callback_from_stance", self._noting_compilation(callback))
        yield torch.compiler.set_stance("force_eager")
        yield launching_nothing(may_import=False)

    def _noting_compilation(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def asked(callback: Any) -> Any:
            if callback is not None and callback is not False:
                self.unseen["torch.compile"] = NOT_COMPILED
            return original(callback)

        return asked

    def _step_by_step(self, op: Any) -> Callable[..., Any]:
        """A recurrence as the ops of each of its steps, and a note that cuDNN's is one op."""
        name = op._schema.name.removeprefix("aten::")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            self.unseen[name] = "planned as the ops of its steps; what cuDNN keeps and takes instead is not counted"
            return op.decompose(*args, **kwargs)

        return kernel


@contextmanager
def _own_defaults() -> Iterator[None]:
    """What the program sets or enters and does not leave, above all a default device, ends with the plan."""
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
    raise AssertionError("a ghost's op never reaches a kernel")


def _in_this_process(loader: Any) -> Any:
    """What a DataLoader gives, read where the plan is on."""
    with mock.patch.multiple(loader, num_workers=0, timeout=0), torch.device(CPU):
        return _Reader(loader)


class _Reader(_SingleProcessDataLoaderIter):  # type: ignore[misc]  # torch is not type checked here
    """Draws on the host, as in a program that has set no default device; while a function builds, it has one."""

    def _next_index(self) -> Any:
        with torch.device(CPU):
            return super()._next_index()


def _step_in_any_case(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    assume("the gradient scaler finds no infinity: no step is left out")
    return optimizer.step(*args, **kwargs)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros_like(x)
    return aten.native_dropout(x, p, True)[0]


def _widening(op: Any) -> Callable[..., torch.Tensor]:
    """A softmax of half-precision numbers that gives float32 reads them as they are: no converted copy."""

    def kernel(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if autocast.is_low(x) and dtype is torch.float32:
            return op(x, dim, True)
        return op(x if dtype is None else x.to(dtype), dim, False)

    return kernel


def _prefer_foreach(optimizer: Any, args: Any, kwargs: Any) -> None:
    """What torch.optim does on CUDA where nothing was chosen; Adafactor takes the loop, which needs less memory."""
    if isinstance(optimizer, torch.optim.Adafactor):
        return
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not group.get("differentiable", False)

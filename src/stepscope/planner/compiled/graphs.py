"""Plans what torch.compile makes of a program, without a device to compile for.

Inductor itself turns autograd's joint graph into the Python that calls its kernels. That Python shows which buffers
are allocated, reused and freed, and when. It runs here on planned tensors, with kernels that do nothing.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from traceback import extract_tb
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx import traceback
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from stepscope.errors import UsageError
from stepscope.planner.compiled.inductor import AfterOp, Names, Padding, cuda_device, loaded, lowered
from stepscope.planner.emulation.dataless import DatalessMode, DataNeeded
from stepscope.planner.emulation.planned_tensor import CPU, CUDA, like
from stepscope.planner.hardware import Hardware

ERROR_BAR = 0.03
"""Of a compiled program's peak, in either direction. On an H200 the worst of eight points was 0.84 % off."""
PADDED_ERROR_BAR = 0.10
"""If products are assumed to be padded: that assumption alone was 9.8 % of one of those points."""
FLEX = "torch.nn.attention.flex_attention"
NOTE = "an approximation, ±{:.0%}: each compiled function is assumed to be one graph without breaks"


class Compiler:
    """While the context is active, `torch.compile` returns what Inductor would run on a device, or on a CPU."""

    def __init__(
        self, hardware: Hardware | None, mode: DatalessMode, after_op: AfterOp, padding: Padding | None
    ) -> None:
        self._hardware, self._mode, self._after_op, self._padding = hardware, mode, after_op, padding
        self._patch = mock.patch.object(torch, "compile", self._compile)
        self.notes: dict[str, str] = {}  # notes for the plan if anything was compiled

    @property
    def error_bar(self) -> float | None:
        """Relative error of the peak in either direction; None if nothing was compiled."""
        bar = PADDED_ERROR_BAR if self._padding is not None and self._padding.products else ERROR_BAR
        return bar if self.notes else None

    def __enter__(self) -> Compiler:
        _forget_kernels()
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()
        _forget_kernels()

    def _compile(self, model: Any = None, *, mode: str | None = None, disable: bool = False, **options: Any) -> Any:
        if model is None:
            return lambda function: self._compile(function, mode=mode, disable=disable, **options)
        backend = options.get("backend", "inductor")
        # flex_attention is planned as the kernel that it becomes, with or without compilation.
        if disable or backend in ("eager", "aot_eager") or getattr(model, "__module__", None) == FLEX:
            return model
        if mode not in (None, "default"):
            raise UsageError(
                f"compile={mode}: a plan supports only the default mode (CUDA graph pools and kernels chosen by a "
                "benchmark are not modeled). Use --compile default, or measure with stepscope bench"
            )
        if backend != "inductor":
            raise UsageError(f"compile: a plan supports only the backend inductor, not {backend}")
        if isinstance(model, nn.Module):
            return _CompiledModule(model, _Program(model, model.forward, self._build))
        owner = getattr(model, "__self__", None)
        if not isinstance(owner, nn.Module):
            return _Program(None, model, self._build)
        if getattr(model, "__name__", "") == "_call_impl":  # nn.Module.compile()
            return _CompiledModule(owner, _Program(owner, owner.forward, self._build)).forward
        return _Program(owner, model, self._build)

    def _build(self, function: _Function, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Return what Inductor compiles a function of tensors to."""
        fakes = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
        with _disable_current_modes(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch._functorch import config as autograd_config
            from torch._inductor import compile_fx
            from torch._inductor import config as inductor_config

            with fakes:
                examples = [like(tensor, CPU).requires_grad_(tensor.requires_grad) for tensor in inputs]
            with (
                self._padding or nullcontext(),
                inductor_config.patch(force_disable_caches=True),
                _patched(autograd_config, enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
                # Inductor chooses the layout of tensors kept for backward if it knows that they are no outputs.
                mock.patch.object(
                    compile_fx, "get_num_model_outputs", lambda _graph: function.num_outputs(), create=True
                ),
            ):
                compiled: Callable[..., Any] = compile_fx.compile_fx(function, examples, inner_compile=self._inner)
        padding = None if self._padding is None else self._padding.note()
        self.notes["compiled"] = NOTE.format(ERROR_BAR if padding is None else PADDED_ERROR_BAR)
        self.notes |= {} if padding is None else {"padded products": padding}
        return compiled

    def _inner(self, module: Any, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
        """Return Inductor's Python for one graph, forward or backward, running on planned tensors."""
        with torch._C.DisableTorchFunction(), cuda_device(self._hardware) if self._hardware else nullcontext():
            text, constants = lowered(module, inputs, options, None if self._hardware is None else CUDA)
        call = loaded(text, Names(self._after_op, constants))

        def run(args: list[Any]) -> Any:
            with _disable_current_modes(), self._mode:
                return call(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # the arguments are a list that the callee clears
        return run


class _CompiledModule(nn.Module):  # type: ignore[misc]  # torch is not type checked here
    """A module that keeps its own hooks, and whose forward is a compiled program."""

    def __init__(self, module: nn.Module, program: _Program) -> None:
        super().__init__()
        self._orig_mod, self._program = module, program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(self._orig_mod, "forward", self._program):
            return self._orig_mod(*args, **kwargs)


class _Program:
    """A function that is compiled at its first call for each kind of inputs."""

    def __init__(self, owner: nn.Module | None, function: Callable[..., Any], build: Callable[..., Any]) -> None:
        self._owner, self._function, self._build = owner, function, build
        self._built: dict[Any, tuple[Callable[..., Any], Callable[[Sequence[Any]], Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        state = {} if self._owner is None else dict((*self._owner.named_parameters(), *self._owner.named_buffers()))
        tensors = [*state.values(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
        key = (
            str(spec),
            tuple(_look(leaf) for leaf in (*state.values(), *leaves)),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            self._owner is not None and self._owner.training,
        )
        if key not in self._built:
            function = _Function(self._owner, self._function, list(state), leaves, spec)
            try:
                self._built[key] = self._build(function, tensors), function.result
            except (UsageError, DataNeeded):
                raise
            except Exception as error:
                raise UsageError(_refusal(self._function, error)) from error
        compiled, result = self._built[key]
        from torch._functorch import config

        with _patched(config, check_custom_op_aliasing=False):  # the check rejects planned tensors
            return result(compiled(*tensors))


class _Function(nn.Module):  # type: ignore[misc]  # torch is not type checked here
    """A function of tensors only: a module's parameters and buffers, then the tensors among its arguments."""

    def __init__(
        self, owner: nn.Module | None, function: Callable[..., Any], names: list[str], leaves: list[Any], spec: Any
    ) -> None:
        super().__init__()
        self._call = (owner, function)  # in a tuple, so that the owner does not become a child module
        self._names, self._spec = names, spec
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._results: list[Any] = []
        self._result_spec: Any = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        owner, function = self._call
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors[len(self._names) :]):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        state = dict(zip(self._names, tensors))
        with_state = stateless._reparametrize_module(owner, state, tie_weights=True) if owner else nullcontext()
        # Programs that check this flag read no values while compiling. torch.export sets it too.
        is_compiling = mock.patch.object(torch.compiler, "_is_compiling_flag", True, create=True)
        with with_state, is_compiling, _HostOnly(), _checkpoints():
            found = function(*args, **kwargs)
        results, self._result_spec = pytree.tree_flatten(found)
        self._results = [_TENSOR if isinstance(part, torch.Tensor) else part for part in results]
        return tuple(part for part in results if isinstance(part, torch.Tensor))

    def num_outputs(self) -> int:
        return self._results.count(_TENSOR)

    def result(self, tensors: Sequence[Any]) -> Any:
        """Return what the function would have returned with these tensors."""
        given = iter(tensors)
        return pytree.tree_unflatten(
            [next(given) if part is _TENSOR else part for part in self._results], self._result_spec
        )


_TENSOR = object()


def _forget_kernels() -> None:
    """Clear Python's caches of op kernels, because a plan registers its own."""
    for packet in list(vars(torch.ops.aten).values()):
        for op in list(getattr(packet, "__dict__", {}).values()):
            if isinstance(op, torch._ops.OpOverload):
                op._dispatch_cache.clear()


def _patched(config: Any, **values: Any) -> Any:
    """Return a context with changed settings, without those that this torch version lacks."""
    return config.patch({name: value for name, value in values.items() if hasattr(config, name)})


def _refusal(function: Any, error: Exception) -> str:
    name = getattr(getattr(function, "__self__", None), "__class__", type(function)).__name__
    theirs = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THEIRS)]
    place = f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}: " if theirs else ""
    text = str(error).strip().splitlines() or [""]
    return (
        f"compile: {name} cannot be planned as one graph ({place}{type(error).__name__}: {text[0][:160]}): plan it "
        "without --compile, or measure it with stepscope bench"
    )


_NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")


def _look(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
    return (type(leaf), repr(leaf))


class _HostOnly(torch.overrides.TorchFunctionMode):  # type: ignore[misc]  # torch is not type checked here
    """Keeps tensors on the host while a program is traced, even if it sends them to a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        args = tuple(_to_host(value) for value in args)
        return func(*args, **{name: _to_host(value) for name, value in (kwargs or {}).items()})


def _to_host(value: Any) -> Any:
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "cuda")
    return CPU if is_device and torch.device(value).type == "cuda" else value


@contextmanager
def _checkpoints() -> Iterator[None]:
    """Mark the ops of checkpoints for recomputation, because a compiler does not run a forward twice."""
    from torch.utils import checkpoint

    number = count(1)

    @contextmanager
    def marked() -> Iterator[None]:
        with traceback.preserve_node_meta():
            marks = {"recompute": checkpoint.CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(number)}
            traceback.get_current_meta().update(marks)
            yield

    def around(
        function: Any, preserve: Any = True, context: Any = checkpoint.noop_context_fn, *_: Any, **__: Any
    ) -> Any:
        if context is not checkpoint.noop_context_fn:
            raise UsageError("compile: a checkpoint with its own context_fn cannot be planned: leave context_fn out")
        with marked():
            yield

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        with marked():
            return function(*args)

    reentrant = types.SimpleNamespace(apply=apply)
    with (
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", around),
        mock.patch.object(checkpoint, "CheckpointFunction", reentrant),
    ):
        yield

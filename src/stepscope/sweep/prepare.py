"""Turns a point into a callable pass: builds the workload and applies the run knobs."""

import copy
import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.errors import UsageError
from stepscope.recorder.clock import BACKWARD, FORWARD, OPTIMIZER
from stepscope.sweep.protocol import CannotRun
from stepscope.sweep.run_knobs import CUDA_GRAPH_MODES, has_backward
from stepscope.workloads.optimizers import make_optimizer
from stepscope.workloads.workload import Batch, Built, Value, WholeStep

AUTOCAST = {"autocast_bf16": torch.bfloat16, "autocast_fp16": torch.float16}
WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_machine(run: Mapping[str, Value]) -> None:
    """Raise CannotRun if this machine lacks what the run knobs need. Initializes CUDA only if they name it.

    In a plan, `torch.cuda` answers for the planned device.
    """
    on_cuda = run["device"] == "cuda"
    if on_cuda and not torch.cuda.is_available():
        raise CannotRun("no CUDA device found: use --device cpu, or run `stepscope doctor`")
    if run["dtype"] == "tf32":
        if not on_cuda or torch.version.hip:
            raise CannotRun("tf32 needs an NVIDIA GPU")
        if torch.cuda.get_device_capability() < (8, 0):
            raise CannotRun("tf32 needs compute capability 8.0")
    if run["bf16_reduction"] != "auto" and not on_cuda:
        raise CannotRun("bf16_reduction applies to CUDA matmuls only")
    if run["compile"] == "reduce-overhead" and not on_cuda:
        raise CannotRun("compile=reduce-overhead uses CUDA graphs: it needs a CUDA device")
    if run["sdpa"] in ("efficient", "cudnn") and not on_cuda:
        raise CannotRun(f"sdpa={run['sdpa']} needs a CUDA device")


def apply_settings(run: Mapping[str, Value]) -> None:
    """Set torch's process-wide switches according to the run knobs."""
    is_tf32 = run["dtype"] == "tf32"
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    if run["device"] == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer torch deprecates this name; older torch has no other
            torch.backends.cudnn.allow_tf32 = is_tf32
            if run["bf16_reduction"] != "auto":
                allowed = run["bf16_reduction"] == "on"
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
        if run["compile"] != "off":
            use_torch_ptxas(Path(torch.__file__).parent)


def use_torch_ptxas(torch_folder: Path) -> None:
    """Make Triton in this process use the same ptxas as Inductor's workers: the one in torch's folder.

    Triton's cache key includes the version of ptxas. Torch sets its own ptxas for the workers only, so max-autotune
    would compile each candidate twice: in the workers in parallel, then again here, 0.2 s each, and it would time
    code from a different ptxas than the code that runs (seen with torch 2.11 for CUDA 13).
    """
    assembler = torch_folder / "bin" / "ptxas"
    if "TRITON_PTXAS_PATH" not in os.environ and os.access(assembler, os.X_OK):
        os.environ["TRITON_PTXAS_PATH"] = str(assembler)


def build(workload: Any, config: Any, seed: int, device: str) -> Any:
    """Return what the workload builds for a configuration on a device, from a seed."""
    torch.manual_seed(seed)
    with default_device(device):
        built = workload.build(config)
    if isinstance(built, WholeStep):
        _check_arguments(built.step, workload.name)
    return built


def make_batch(built: Built, seed: int, device: str) -> Batch:
    """Return a batch that does not depend on how many random numbers the build used."""
    torch.manual_seed(seed + 1)
    with default_device(device):
        return built.batch()


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """Create new tensors on the device. If the program sets its own default meanwhile, that one stays."""

    def current() -> Any:
        return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)

    before = current()
    torch.set_default_device(device)
    ours = current()
    try:
        yield
    finally:
        if current() is ours:
            torch.set_default_device(None if before is None else before.device)


def _check_arguments(step: Callable[..., object], name: str) -> None:
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # not every callable has a signature
        return
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(
            f"{name} returned a step that cannot be called without arguments ({error}). "
            "Let the step create its own inputs, such as its batch."
        ) from None


def cast(batch: Batch, dtype: torch.dtype | None = None, device: str | None = None) -> Batch:
    """Return the batch with floating-point tensors in another dtype, or on another device; leaves stay leaves."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        # Always a copy: two modules must not accumulate gradients in one leaf.
        return tensor.detach().to(device=device, dtype=target, copy=True).requires_grad_(tensor.requires_grad)

    return {name: moved(tensor) for name, tensor in batch.items()}


def weights_dtype(run: Mapping[str, Value]) -> torch.dtype:
    return WEIGHTS.get(str(run["dtype"]), torch.float32)


def cast_to_point(built: Built, run: Mapping[str, Value]) -> Batch:
    """Cast the module to the point's dtype and return a batch in that dtype."""
    dtype = weights_dtype(run)
    built.module.to(dtype)
    return cast(make_batch(built, int(run["seed"]), str(run["device"])), dtype)


def compiled(module: nn.Module, run: Mapping[str, Value]) -> nn.Module:
    """Return the module, compiled if the point asks for it. A user's own module is compiled without our wrapper."""
    if run["compile"] == "off":
        return module
    mode = None if run["compile"] == "default" else run["compile"]
    inner = users_own(module)
    if inner is module:
        return torch.compile(module, mode=mode)
    around = copy.copy(module)
    around._modules = {name: torch.compile(child, mode=mode) for name, child in module.named_children()}
    return around


def users_own(module: nn.Module) -> nn.Module:
    children = list(module.children())
    is_ours = type(module).__module__ in ("stepscope.workloads.factory", "stepscope.workloads.huggingface")
    return children[0] if is_ours and len(children) == 1 else module


class Contexts:
    """`with contexts():` around a forward, `with contexts.attention():` around a backward."""

    def __init__(self, run: Mapping[str, Value]) -> None:
        self._device = str(run["device"])
        self._autocast = AUTOCAST.get(str(run["dtype"]))
        self._backend = None
        if run["sdpa"] != "free":
            names = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
            self._backend = getattr(SDPBackend, names.get(str(run["sdpa"]), "MATH"))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        autocast = nullcontext() if self._autocast is None else torch.autocast(self._device, dtype=self._autocast)
        with autocast, self.attention():
            yield

    def attention(self) -> AbstractContextManager[Any]:
        """Force the backend in the backward pass too: a checkpointed forward runs again inside it."""
        return nullcontext() if self._backend is None else sdpa_kernel(self._backend)


class Pass:
    """One sample's work in the given mode. Calling it returns the detached loss, or None without a loss."""

    def __init__(self, module: nn.Module, batch: Batch, run: Mapping[str, Value]) -> None:
        self.mode = str(run["mode"])
        self.plain = module
        self.module = compiled(module, run)
        self.module.train(self.mode != "inference")
        self.batch: Batch = without_targets(batch) if self.mode == "inference" else dict(batch)
        self._contexts = Contexts(run)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._leaves = [tensor for tensor in self.batch.values() if tensor.requires_grad]
        self._gradients: list[torch.Tensor] | None = None
        self._seed = int(run["seed"])
        self._cuda_graphs = run["compile"] in CUDA_GRAPH_MODES
        self._has_backward = has_backward(run)
        # Without a scaler fp16 gradients underflow; nobody trains with fp16 autocast without one.
        scaled = self._has_backward and run["dtype"] == "autocast_fp16"
        self._scaler = torch.amp.GradScaler(str(run["device"])) if scaled else None
        if self.mode == "step" and not self._parameters:
            raise CannotRun(
                "the workload has no parameters to update: use mode=forward+backward instead of mode=step"
            )
        self.optimizer = optimizer_of(str(run["optimizer"]), self._parameters) if self.mode == "step" else None

    def __call__(self, on_phase: Callable[[str], None] | None = None, module: nn.Module | None = None) -> Any:
        """Call `on_phase` with each phase as it begins; `module` replaces the point's module."""
        begin = on_phase or (lambda _phase: None)
        module = module or self.module
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if self.mode == "inference":
            begin(FORWARD)
            with torch.inference_mode(), self._contexts():
                module(**self.batch)
            return None
        self.drop_gradients()
        begin(FORWARD)
        with self._contexts():
            out = module(**self.batch)
        loss = scalar_loss(out)
        if self._has_backward:
            begin(BACKWARD)
            with self._contexts.attention():
                self._backward(out, loss)
        if self.optimizer is not None:
            begin(OPTIMIZER)
            if self._scaler is None:
                self.optimizer.step()
            else:
                self._scaler.step(self.optimizer)
                self._scaler.update()
        return None if loss is None else loss.detach()

    def drop_gradients(self) -> None:
        for tensor in (*self._parameters, *self._leaves):
            tensor.grad = None

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor that exists before a pass: weights, buffers, inputs, optimizer state."""
        found = [*self.plain.parameters(), *self.plain.buffers(), *self.batch.values(), *(self._gradients or ())]
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                found += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return found

    def _backward(self, out: Any, loss: torch.Tensor | None) -> None:
        if loss is not None:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            return
        outputs = differentiable(out)
        self._gradients = self._gradients or random_gradients(outputs, self._seed)
        torch.autograd.backward(outputs, self._gradients)


def optimizer_of(name: str, parameters: Iterable[torch.Tensor]) -> Any:
    """Return an optimizer by name; CannotRun if torch refuses it on this machine."""
    try:
        return make_optimizer(name, parameters)
    except RuntimeError as error:
        raise CannotRun(f"optimizer={name}: {str(error).splitlines()[0]}") from None


def without_targets(batch: Batch) -> dict[str, torch.Tensor]:
    """Return what a forward pass takes that returns outputs instead of a loss."""
    return {name: tensor for name, tensor in batch.items() if name != "targets"}


def scalar_loss(out: Any) -> torch.Tensor | None:
    return out if isinstance(out, torch.Tensor) and out.dim() == 0 else None


def backward(out: Any, contexts: Contexts, seed: int, scale: float = 1.0) -> None:
    """Run the backward pass from a loss, or from outputs with fixed random gradients."""
    loss = scalar_loss(out)
    starts = differentiable(out) if loss is None else [loss]
    gradients = random_gradients(starts, seed) if loss is None else None
    with contexts.attention():
        torch.autograd.backward(starts if scale == 1.0 else [start * scale for start in starts], gradients)


def tensors_of(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else [t for t in out if isinstance(t, torch.Tensor)]


def differentiable(out: Any) -> list[torch.Tensor]:
    """Return the outputs that a backward pass can start from; CannotRun if there are none."""
    outputs = [tensor for tensor in tensors_of(out) if tensor.requires_grad]
    if not outputs:
        raise CannotRun("no output requires a gradient, so there is no backward pass: use mode=forward")
    return outputs


def random_gradients(outputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Return gradients to start a backward pass from: the same values on every device and in every dtype."""
    generator = torch.Generator().manual_seed(seed + 2)
    return [torch.randn(t.shape, generator=generator, device="cpu").to(t.detach()) for t in outputs]

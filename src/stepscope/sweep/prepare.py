"""From a point to something that can be called: the run knobs applied to a built workload."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.recorder.clock import BACKWARD, FORWARD, OPTIMIZER
from stepscope.workloads.optimizers import make_optimizer
from stepscope.workloads.workload import Batch, Built, Value, WholeStep

AUTOCAST = {"autocast_bf16": torch.bfloat16, "autocast_fp16": torch.float16}
WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class CannotRun(Exception):
    """The point means nothing, or is not possible, on this machine; the message is the row's reason."""


def check_machine(run: Mapping[str, Value]) -> None:
    """Raise CannotRun where this machine has not what the run knobs ask for. Touches CUDA if they name it.

    In a plan, `torch.cuda` answers for the device that is planned for.
    """
    on_cuda = run["device"] == "cuda"
    if on_cuda and not torch.cuda.is_available():
        raise CannotRun("there is no CUDA device here")
    if run["dtype"] == "tf32":
        if not on_cuda or torch.version.hip:
            raise CannotRun("tf32 is there on NVIDIA GPUs only")
        if torch.cuda.get_device_capability() < (8, 0):
            raise CannotRun("tf32 needs compute capability 8.0")
    if run["bf16_reduction"] != "auto" and not on_cuda:
        raise CannotRun("bf16_reduction is a setting of CUDA's matrix products")
    if run["compile"] == "reduce-overhead" and not on_cuda:
        raise CannotRun("compile=reduce-overhead is CUDA graphs: it needs a CUDA device")
    if run["sdpa"] in ("efficient", "cudnn") and not on_cuda:
        raise CannotRun(f"sdpa={run['sdpa']} is there on CUDA devices only")


def apply_settings(run: Mapping[str, Value]) -> None:
    """Set torch's process-wide switches as the run knobs say."""
    precise = run["dtype"] != "tf32"
    torch.set_float32_matmul_precision("highest" if precise else "high")
    if run["device"] == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer torch would have us use a name that older torch has not
            torch.backends.cudnn.allow_tf32 = not precise
            if run["bf16_reduction"] != "auto":
                allowed = run["bf16_reduction"] == "on"
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
        if run["compile"] != "off":
            one_assembler(Path(torch.__file__).parent)


def one_assembler(torch_folder: Path) -> None:
    """Let Triton assemble here with the ptxas that Inductor's workers take: the one in torch's own folder.

    Triton's cache knows the assembler's version. torch sets the workers' to its own and leaves this process Triton's,
    so that max-autotune would compile each of its candidates twice: in the workers side by side, and here again in
    turn, 0.2 s each, to time code that another assembler made than what will run (seen with torch 2.11 for CUDA 13).
    """
    assembler = torch_folder / "bin" / "ptxas"
    if "TRITON_PTXAS_PATH" not in os.environ and os.access(assembler, os.X_OK):
        os.environ["TRITON_PTXAS_PATH"] = str(assembler)


def build(workload: Any, config: Any, seed: int, device: str) -> Any:
    """What the workload builds for a configuration on a device, from a seed."""
    torch.manual_seed(seed)
    with default_device(device):
        built = workload.build(config)
    if isinstance(built, WholeStep):
        _check_arguments(built.step, workload.name)
    return built


def make_batch(built: Built, seed: int, device: str) -> Batch:
    """A batch that does not depend on how many random numbers building took."""
    torch.manual_seed(seed + 1)
    with default_device(device):
        return built.batch()


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """New tensors are on the device; a default that the program sets itself meanwhile stays when this is over."""

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
    except (TypeError, ValueError):  # not every callable can say
        return
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(
            f"{name} returned a step that cannot be called without arguments ({error}): let it get what it needs, "
            "such as its batch, itself"
        ) from None


def cast(batch: Batch, dtype: torch.dtype | None = None, device: str | None = None) -> Batch:
    """The batch with its floating-point tensors in another dtype, all on another device; leaves stay leaves."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        # A copy also where nothing changes: two modules must not add gradients to one leaf.
        return tensor.detach().to(device=device, dtype=target, copy=True).requires_grad_(tensor.requires_grad)

    return {name: moved(tensor) for name, tensor in batch.items()}


def weights_dtype(run: Mapping[str, Value]) -> torch.dtype:
    """The dtype of weights and of floating-point inputs."""
    return WEIGHTS.get(str(run["dtype"]), torch.float32)


def compiled(module: nn.Module, run: Mapping[str, Value]) -> nn.Module:
    """The module, compiled if the point says so; of a user's own what the user wrote, not what is around it."""
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
    """A user's own module, without what Stepscope has put around it."""
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
            from torch.nn.attention import SDPBackend

            names = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
            self._backend = getattr(SDPBackend, names.get(str(run["sdpa"]), "MATH"))

    def __call__(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if self._autocast is not None:
            stack.enter_context(torch.autocast(self._device, dtype=self._autocast))
        stack.enter_context(self.attention())
        return stack

    def attention(self) -> AbstractContextManager[Any]:
        """A checkpointed forward runs again inside the backward: its attention must take the same back end."""
        if self._backend is None:
            return nullcontext()
        from torch.nn.attention import sdpa_kernel

        return sdpa_kernel(self._backend)  # type: ignore[no-any-return]


class Pass:
    """One sample's worth of work, as the mode says. Call it; it returns the loss, detached, where there is one."""

    def __init__(self, module: nn.Module, batch: Batch, run: Mapping[str, Value]) -> None:
        self.mode = str(run["mode"])
        self.plain = module
        self.module = compiled(module, run)
        self.module.train(self.mode != "inference")
        targets = ("targets",) if self.mode == "inference" else ()
        self.batch: Batch = {name: tensor for name, tensor in batch.items() if name not in targets}
        self._contexts = Contexts(run)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._leaves = [tensor for tensor in self.batch.values() if tensor.requires_grad]
        self._gradients: list[torch.Tensor] | None = None
        self._seed = int(run["seed"])
        self._cuda_graphs = run["compile"] in ("reduce-overhead", "max-autotune")
        # Half-precision gradients vanish without it; nobody trains with fp16 autocast otherwise.
        scaled = self.has_backward and run["dtype"] == "autocast_fp16"
        self._scaler = torch.amp.GradScaler(str(run["device"])) if scaled else None
        self.optimizer = self._make_optimizer(str(run["optimizer"])) if self.mode == "step" else None

    @property
    def has_backward(self) -> bool:
        return self.mode in ("forward+backward", "step")

    def _make_optimizer(self, name: str) -> Any:
        if not self._parameters:
            raise CannotRun("it has no parameters: mode=step means nothing, take mode=forward+backward")
        try:
            return make_optimizer(name, self._parameters)
        except RuntimeError as error:
            raise CannotRun(f"optimizer={name}: {str(error).splitlines()[0]}") from None

    def __call__(self, on_phase: Callable[[str], None] | None = None, module: nn.Module | None = None) -> Any:
        """`on_phase` is told forward, backward and optimizer as each begins; `module` takes the module's place."""
        tell = on_phase or (lambda _phase: None)
        module = module or self.module
        if self._cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if self.mode == "inference":
            tell(FORWARD)
            with torch.inference_mode(), self._contexts():
                module(**self.batch)
            return None
        self.drop_gradients()
        tell(FORWARD)
        with self._contexts():
            out = module(**self.batch)
        loss = out if isinstance(out, torch.Tensor) and out.dim() == 0 else None
        if self.has_backward:
            tell(BACKWARD)
            with self._contexts.attention():
                self._backward(out, loss)
        if self.optimizer is not None:
            tell(OPTIMIZER)
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
        """Everything that is there before a pass begins: weights, buffers, inputs, the optimizer's state."""
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
        if self._gradients is None:
            self._gradients = random_gradients(outputs, self._seed)
        torch.autograd.backward(outputs, self._gradients)


def tensors_of(out: Any) -> list[torch.Tensor]:
    """The tensors of what a module returned."""
    return [out] if isinstance(out, torch.Tensor) else [t for t in out if isinstance(t, torch.Tensor)]


def differentiable(out: Any) -> list[torch.Tensor]:
    """The outputs that a backward can start from; CannotRun when there are none."""
    outputs = [tensor for tensor in tensors_of(out) if tensor.requires_grad]
    if not outputs:
        raise CannotRun("its outputs need no gradient: there is no backward, take mode=forward")
    return outputs


def random_gradients(outputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Gradients to start a backward from: the same for the same shapes, whatever device and dtype."""
    generator = torch.Generator().manual_seed(seed + 2)
    return [torch.randn(t.shape, generator=generator, device="cpu").to(t.detach()) for t in outputs]

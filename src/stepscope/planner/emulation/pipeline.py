"""One stage of a pipeline: PyTorch's own tracer, stage and schedule on planned tensors.

`torch.distributed.pipelining` splits the model, and its schedule decides which micro-batches are alive together. Only
sending and receiving do nothing.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from stepscope.errors import UsageError
from stepscope.planner.emulation.fsdp import units
from stepscope.planner.emulation.ops import meta_like
from stepscope.planner.emulation.ranks import COMMUNICATION, Ranks
from stepscope.planner.parallel import Parallel
from stepscope.recorder.ledger.storages import OUTSIDE, Storages
from stepscope.sweep import prepare
from stepscope.sweep.run_knobs import has_backward
from stepscope.workloads.factory import UserModule
from stepscope.workloads.workload import Batch, Value

SCHEDULES = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}
TARGETS = "targets"


class Pipeline(Ranks):
    """While the context is active, `shard` returns one stage's module."""

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        is_cpu = self._device.type == "cpu"
        yield schedules, "_batch_p2p", lambda ops, **_: [_Exchange([op.tensor for op in ops], is_cpu)] if ops else []

    def shard(self, module: nn.Module, batch: Batch) -> nn.Module:
        module = users_own(module)
        tensors = dict(module.named_parameters(remove_duplicate=False))
        tensors |= dict(module.named_buffers(remove_duplicate=False))
        self._loss = loss_of(module)
        with _disable_current_modes():
            # PyTorch can trace meta tensors.
            _replace(module, lambda name, tensor: meta_like(tensor))
            pipes = self._parallel.pipes
            if not pipes:
                pipes["pipe"] = split(module, self._parallel, {name: meta_like(t) for name, t in batch.items()})
            self._stage = pipes["pipe"].build_stage(self._parallel.stage, self._device)

        taken: list[torch.Tensor] = []  # each once: PyTorch copies what two stages share

        def planned(name: str, tensor: torch.Tensor) -> torch.Tensor:
            own = tensors.get(name) if tensor.is_meta else tensor
            if own is None or any(own is other for other in taken):
                own = torch.empty_like(tensor, device=self._device)
            taken.append(own)
            return own

        stage, parallel = self._stage.submod, self._parallel
        _replace(stage, planned)
        how = f"{SCHEDULES[parallel.schedule].__name__} with {parallel.num_microbatches} micro-batches"
        what = f"stage {parallel.stage + 1} of {parallel.pp}; {how} and return_outputs=False"
        self._note("pipeline", f"{what}. The least time has no bubbles")
        return stage

    def make_pass(self, module: nn.Module, batch: Batch, run: Mapping[str, Value]) -> "StagePass":
        return StagePass(self._stage, self._loss, self._parallel, batch, run, self._storages)


class _Exchange:
    """What a schedule waits for. It holds the tensors that are sent: NCCL's until then, gloo's while it lives."""

    def __init__(self, tensors: list[torch.Tensor], is_gloo: bool) -> None:
        self._tensors, self._is_gloo = tensors, is_gloo

    def wait(self) -> None:
        self._tensors = self._tensors if self._is_gloo else []


class StagePass:
    """One step of a stage: its schedule's micro-batches, and its optimizer."""

    def __init__(
        self,
        stage: Any,
        loss: Callable[..., Any],
        parallel: Parallel,
        batch: Batch,
        run: Mapping[str, Value],
        storages: Storages | None = None,
    ) -> None:
        if not has_backward(run):
            raise UsageError("--pp is planned with its backward: use --mode step or forward+backward")
        self._stage, self._storages = stage, storages
        self._schedule = SCHEDULES[parallel.schedule](stage, parallel.num_microbatches, loss_fn=loss)
        self._contexts = prepare.Contexts(run)
        self._options: dict[str, Any] = {}
        if "return_outputs" in inspect.signature(self._schedule.step).parameters:
            self._options["return_outputs"] = False
        # A rank only has what its stage reads.
        inputs, targets = separated(batch)
        self._inputs, self._targets = inputs if stage.is_first else {}, targets if stage.is_last else None
        self._parameters = [p for p in stage.submod.parameters() if p.requires_grad]
        is_step = run["mode"] == "step"
        self.optimizer = prepare.optimizer_of(str(run["optimizer"]), self._parameters) if is_step else None

    def __call__(self) -> None:
        self.drop_gradients()
        with self._contexts():
            losses: list[Any] = []
            self._schedule.step(
                *positional(self._inputs), target=self._targets, losses=losses if self._stage.is_last else None,
                **named(self._inputs), **self._options,
            )  # fmt: skip
        if self.optimizer is not None:
            self.optimizer.step()
        if self._storages is not None:
            self._storages.own(self._received(), COMMUNICATION, OUTSIDE)

    def _received(self) -> list[torch.Tensor]:
        """Return the buffers for what other stages send."""
        received = (*self._stage.args_recv_info.values(), *self._stage.grad_recv_info.values())
        return [info.buffer for infos in received for info in infos if info.buffer is not None]

    def drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def split(module: nn.Module, parallel: Parallel, batch: Batch) -> Any:
    """Return PyTorch's pipe of a module, traced with the first micro-batch; UsageError if it cannot be split."""
    inputs, _ = separated(batch)
    number = parallel.num_microbatches
    if any(not t.dim() or t.shape[0] % number for t in batch.values()):
        sizes = sorted({t.shape[0] if t.dim() else 1 for t in batch.values()})
        rows = " and ".join(map(str, sizes))
        default = " (one for each stage)" * (number == parallel.pp)
        raise UsageError(f"--microbatches {number}{default}: it must divide the batch, which has {rows} rows")
    first = {name: tensor[: tensor.shape[0] // number] for name, tensor in inputs.items()}
    points = dict.fromkeys(split_points(module, parallel), pipelining.SplitPoint.BEGINNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about PyTorch's own code
            pipe = pipelining.pipeline(module, positional(first), named(first), points)
            if pipe.num_stages != parallel.pp:
                raise ValueError(
                    "something must run before each, and each must be a module that is called, not a list"
                )
            return pipe
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        why = str(cause).strip().partition("\n")[0].rstrip(".") or type(cause).__name__
        raise UsageError(
            f"--pp: torch.distributed.pipelining cannot split the model at {', '.join(points)}: {why}. Its forward "
            "must return outputs without targets; name other modules where stages begin: --pp NAME,NAME"
        ) from None


def users_own(module: nn.Module) -> nn.Module:
    """Return the user's module without Stepscope's wrapper, whose arguments PyTorch cannot trace."""
    return module.module if isinstance(module, UserModule) else module


def separated(batch: Batch) -> tuple[Batch, torch.Tensor]:
    """Return the inputs of a batch, and its `targets`: the tensor of that name, or the last of a tuple."""
    names = list(batch)
    last = TARGETS if TARGETS in batch else names[-1]
    if len(names) < 2 or not (last == TARGETS or last.isdigit()):
        raise UsageError("--pp: the last stage computes the loss from targets: name a tensor of the batch 'targets'")
    return {name: batch[name] for name in names if name != last}, batch[last]


def positional(inputs: Batch) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a tuple; a batch that is a tuple has numbers for names."""
    return tuple(tensor for name, tensor in inputs.items() if name.isdigit())


def named(inputs: Batch) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in inputs.items() if not name.isdigit()}


def split_points(module: nn.Module, parallel: Parallel) -> list[str]:
    """Return the names of the modules that begin a stage, except the first: the same number of blocks each."""
    names = {part: name for name, part in module.named_modules()}
    blocks = [names[block] for block in units(module)[:-1]]
    if parallel.split:
        unknown = [name for name in parallel.split if name not in names.values()]
        if unknown:
            raise UsageError(
                f"--pp: the model has no module {unknown[0]!r}. Its blocks: {', '.join(blocks) or 'none'}"
            )
        return list(parallel.split)
    number = parallel.num_ranks
    if len(blocks) < number:
        raise UsageError(
            f"--pp {number}: the model has {len(blocks)} blocks in module lists. Name the modules where stages 2 to "
            f"{number} begin: --pp NAME,NAME"
        )
    return [blocks[len(blocks) * stage // number] for stage in range(1, number)]


def loss_of(module: nn.Module) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Return the model's own `loss_fn(outputs, targets)`; if it has none, the mean cross entropy of the classes."""
    own = getattr(module, "loss_fn", None)
    return own if callable(own) else _cross_entropy


def _cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _replace(module: nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer of a module by what `make` returns for its name and itself, called once."""
    made: dict[int, torch.Tensor] = {}
    for part_name, part in module.named_modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in made:
                    new = make(f"{part_name}.{name}".lstrip("."), tensor)
                    is_plain = held is part._parameters and not isinstance(new, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_plain else new
                if tensor is not None:
                    held[name] = made[id(tensor)]

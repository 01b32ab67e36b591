"""One step of a workload as a callable, on one device or as one of several ranks."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.planner.parallel import Parallel
from stepscope.recorder.ledger.storages import Storages
from stepscope.sweep import prepare
from stepscope.workloads.workload import Built, Value

if TYPE_CHECKING:
    from stepscope.planner.emulation.ranks import AfterOp, Ranks


def ranks_of(
    parallel: Parallel | None, run: Mapping[str, Value], device: torch.device, storages: Storages, after_op: "AfterOp"
) -> "Ranks | None":
    """Return what makes the module one of several ranks; None if there is one."""
    if parallel is None or (way := parallel.way) is None:
        return None
    if run["compile"] != "off":
        raise UsageError(f"--{way} and --compile cannot be planned together: leave one out")
    if run["mode"] == "inference":
        raise UsageError(f"--{way} is planned for training only: use --mode forward instead of inference")
    if not torch.distributed.is_available():
        raise UsageError(f"--{way} needs torch.distributed, which this build of PyTorch does not have")
    # They take a second to import.
    chosen: type[Ranks]
    if way == "fsdp":
        from stepscope.planner.emulation.fsdp import Sharding as chosen
    elif way == "ddp":
        from stepscope.planner.emulation.data_parallel import DataParallel as chosen
    elif way == "tp":
        from stepscope.planner.emulation.tensor_parallel import TensorParallel as chosen
    else:
        from stepscope.planner.emulation.pipeline import Pipeline as chosen
    return chosen(parallel, device, storages, after_op)


def step_of(
    built: Any, run: Mapping[str, Value], device: str, ranks: "Ranks | None", offloads: bool
) -> tuple[Callable[[], Any], tuple[list[nn.Module], list[Any]] | None]:
    """Return one step of the workload as a callable, and its modules and optimizers if they are known."""
    if not isinstance(built, Built):
        if ranks is not None or offloads:
            raise UsageError(
                "A whole step has its model inside: for a plan of several ranks, let the function return the model"
            )
        return built.step, None
    dtype = prepare.weights_dtype(run)
    built.module.to(dtype)
    batch = prepare.cast(prepare.make_batch(built, int(run["seed"]), device), dtype)
    module = built.module if ranks is None else ranks.shard(built.module, batch)
    if offloads:
        _offload(module)
    make_pass = prepare.Pass if ranks is None else ranks.make_pass
    one_pass = make_pass(module, batch, run)
    return one_pass, ([module], [] if one_pass.optimizer is None else [one_pass.optimizer])


def _offload(module: nn.Module) -> None:
    """Let a module save its activations in pinned host memory, as a forward in `save_on_cpu` does."""
    forward = module.forward

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return forward(*args, **kwargs)

    module.forward = offloaded

"""One of several ranks without the others: a process group in which collectives do nothing."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepscope.errors import UsageError
from stepscope.planner.emulation.dataless import DatalessMode, PlannedTensor
from stepscope.planner.emulation.torch_support import replaced
from stepscope.planner.parallel import Parallel
from stepscope.recorder.ledger.storages import Storages
from stepscope.sweep import prepare
from stepscope.workloads.workload import Batch, Value

COMMUNICATION = "communication"  # buffers of the parallelism itself, for gathering and reducing
ERROR_BAR = 0.02
"""Of a rank's peak, in either direction. On an H200 the worst of nine points was 0.05 % off. Without ranks, the worst
of 46 was 1.2 % off, because the allocator's blocks are larger than tensors."""
OPTIMIZERS_OWN = ("aten::_foreach_", "aten::_fused_")
FAKE = torch._C._TorchDispatchModeKey.FAKE
WAIT = torch.ops._c10d_functional.wait_tensor.default
AfterOp = Callable[[Any, Any, Any, Any], None]


class Ranks:
    """While the context is active, `shard` makes a module one of several that train it together.

    `after_op` is the plan's. Its entries in `storages` get what only the parallelism knows.
    """

    def __init__(self, parallel: Parallel, device: torch.device, storages: Storages, after_op: AfterOp) -> None:
        self._parallel, self._device, self._storages, self._after_op = parallel, device, storages, after_op
        self._stack = ExitStack()
        self._mesh: Any = None
        self.error_bar = ERROR_BAR  # relative error of the peak in either direction
        self.notes: dict[str, str] = {}  # notes for the plan

    def __enter__(self) -> "Ranks":
        num_ranks, num_replicas = self._parallel.num_ranks, self._parallel.replicas
        if dist.is_initialized():
            raise UsageError("The program made its own process group: let build only make the model")
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            dist.init_process_group("fake", rank=self._parallel.stage, world_size=num_ranks, store=FakeStore())
            stack.callback(dist.destroy_process_group)
            # PyTorch treats planned tensors as CPU tensors. What asks in Python sees the planned device.
            shape = (num_ranks,) if num_replicas == 1 else (num_replicas, num_ranks // num_replicas)
            # DTensor keeps what it derived for equal meshes, and the mesh in it: other ways must have other names.
            names = (str(self._parallel.way),) if num_replicas == 1 else ("replicate", "shard")
            self._mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            stack.enter_context(replaced(*self._replacements()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield the functions of torch to replace: their owner, their name and the replacement."""
        return iter(())

    @abstractmethod
    def shard(self, module: nn.Module, batch: Batch) -> nn.Module:
        """Return the module as one rank has it."""

    def make_pass(self, module: nn.Module, batch: Batch, run: Mapping[str, Value]) -> Any:
        """Return what runs one step of `shard`'s module."""
        return prepare.Pass(module, batch, run)

    def dataless_mode(self, kernels: Any) -> DatalessMode:
        """Return the mode for planned tensors that lets distributed tensors unwrap themselves."""
        return LocalDatalessMode(self._device, kernels, self._saw)

    def _note(self, name: str, what: str) -> None:
        """Set the notes for the plan: how exact it is, and `what` it assumes."""
        bar = f"an approximation, ±{ERROR_BAR:.0%} of allocated memory and more of reserved memory"
        nccl = "its buffers, a few hundred MiB outside PyTorch, and its time are not counted"
        self.notes = {name: f"{bar}: {what}", "NCCL": nccl}

    def _saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._after_op(func, args, kwargs, out)


class LocalDatalessMode(DatalessMode):
    mixes = False  # whether ops may have sharded and plain tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._get_dispatch_mode(FAKE) is not None:
            return func(*args, **(kwargs or {}))  # distributed tensors ask for shapes only
        if func is WAIT and type(args[0]) is PlannedTensor:
            return args[0]  # torch's function for shapes makes a new tensor
        if any(issubclass(kind, DTensor) for kind in types):
            is_optimizers = func._schema.name.startswith(OPTIMIZERS_OWN)
            if not is_optimizers or not (func._schema.is_mutable or self.mixes):
                if not self.mixes and any(issubclass(kind, PlannedTensor) for kind in types):
                    raise UsageError(
                        f"--fsdp: {func} uses a sharded parameter: FSDP2 gathers a block's parameters only while the "
                        "block is called. Use them in the block's forward"
                    )
                return NotImplemented
            # Works on every shard alone: asking how they are sharded takes a second per op and never varies.
            args = [[_local(part) for part in value] if isinstance(value, list) else _local(value) for value in args]
        return super().__torch_dispatch__(func, types, args, kwargs)


def _local(value: Any) -> Any:
    return getattr(value, "_local_tensor", value)

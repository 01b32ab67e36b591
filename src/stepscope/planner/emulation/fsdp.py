"""One rank of FSDP2 without the others: PyTorch's own `fully_shard` on planned tensors, with a fake process group.

FSDP2's own code decides what is sharded, gathered, prefetched, kept and reduced, and when. Collectives do nothing,
streams and events are placeholders, and storages that FSDP2 empties and refills are freed and allocated again.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepscope.errors import UsageError
from stepscope.planner.emulation import cuda_calls
from stepscope.planner.emulation.dataless import DatalessMode, PlannedTensor
from stepscope.planner.emulation.torch_support import replaced
from stepscope.recorder.ledger.storages import OUTSIDE, WEIGHT_CAST, Storages, storage_key, storage_of

UNSHARDED_PARAMETER, UNSHARDED_GRADIENT = "unsharded_parameter", "unsharded_gradient"
COMMUNICATION = "communication"  # buffers of FSDP2 itself, for gathering and reducing
ERROR_BAR = 0.02
"""Of a rank's peak, in either direction. On an H200 the worst of nine points was 0.05 % off. Without ranks, the worst
of 46 was 1.2 % off, because the allocator's blocks are larger than tensors."""
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single")

OPTIMIZERS_OWN = ("aten::_foreach_", "aten::_fused_")
FAKE = torch._C._TorchDispatchModeKey.FAKE
AfterOp = Callable[[Any, Any, Any, Any], None]


def units(module: nn.Module) -> list[nn.Module]:
    """Return what is sharded and gathered together: elements of the outermost module lists, and last the whole.

    >>> [type(unit).__name__ for unit in units(nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]), nn.ReLU()))]
    ['Linear', 'Sequential']
    """
    return [*dict.fromkeys(_listed(module)), module]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if isinstance(module, nn.ModuleList) and not is_container:
            yield child
        else:
            yield from _listed(child)


class Sharding:
    """While the context is active, `shard` makes a module one of `num_ranks` that train it together.

    `after_op` is the plan's. Its entries in `storages` get the owners and streams that only FSDP2 knows.
    """

    def __init__(self, num_ranks: int, device: torch.device, storages: Storages, after_op: AfterOp) -> None:
        self._num_ranks, self._device, self._storages, self._after_op = num_ranks, device, storages, after_op
        self._streams = _Streams()
        self._stack = ExitStack()
        self._mesh: Any = None
        self.error_bar = ERROR_BAR  # relative error of the peak in either direction
        self.notes: dict[str, str] = {}  # notes for the plan

    def __enter__(self) -> "Sharding":
        if not hasattr(FSDPParam, "alloc_all_gather_outputs"):
            raise UsageError(f"--fsdp: torch {torch.__version__} is too new for this plan; use torch 2.13 or earlier")
        if dist.is_initialized():
            raise UsageError("--fsdp: the program made its own process group; let build only make the model")
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            dist.init_process_group("fake", rank=0, world_size=self._num_ranks, store=FakeStore())
            stack.callback(dist.destroy_process_group)
            # PyTorch treats planned tensors as CPU tensors. FSDP2, which asks in Python, sees the planned device.
            self._mesh = init_device_mesh("cpu", (self._num_ranks,))
            # FSDP2's modules import names from each other.
            package = FSDPParam.__module__.rpartition(".")[0]
            modules = [module for name, module in list(sys.modules.items()) if name.startswith(package)]
            replacement = replaced(
                *((module, "_get_device_handle", lambda *_: self._streams) for module in modules),
                *((module, "_get_device_from_mesh", lambda *_: self._device) for module in modules),
                *((dist, name, lambda *args, **kwargs: None) for name in COLLECTIVES),
                (FSDPParam, "alloc_all_gather_outputs", lambda parameter: self._fill(parameter)),
                (FSDPParam, "free_unsharded_param", lambda parameter: self._empty(parameter)),
            )
            stack.enter_context(replacement)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def dataless_mode(self, kernels: Any) -> DatalessMode:
        """Return the mode for planned tensors that lets distributed tensors unwrap themselves."""
        return _LocalDatalessMode(self._device, kernels, self._saw)

    def shard(self, module: nn.Module) -> None:
        """Apply `fully_shard` to the elements of the module's lists, which are its blocks, and to the rest."""
        found = units(module)
        *blocks, whole = found
        inside = {part for block in blocks for part in block.modules()}
        rest = {p for part in whole.modules() if part not in inside for p in part.parameters(recurse=False)}
        if len(rest) + sum(len(set(block.parameters())) for block in blocks) != len(set(whole.parameters())):
            raise UsageError(
                "--fsdp: blocks share a parameter with other modules, which fully_shard does not support"
            )
        for unit in found:
            try:
                fsdp.fully_shard(unit, mesh=self._mesh)
            except (NotImplementedError, ValueError, AssertionError) as error:
                raise UsageError(f"--fsdp: fully_shard rejects {type(unit).__name__}: {error}") from None
        what = f"each of {len(blocks)} blocks and the rest" if blocks else "the model, which has no list of blocks"
        self.notes = {
            "FSDP2": f"an approximation, ±{ERROR_BAR:.0%} of allocated memory and more of reserved memory: one of "
            f"{self._num_ranks} ranks with its own batch; fully_shard with its defaults on {what}; the model is not "
            "created on the device",
            "NCCL": "its buffers, a few hundred MiB outside PyTorch, and its time are not counted",
        }

    # --- FSDP2's effects on memory -------------------------------------------------------------

    def _saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the stream of an op's memory, and the owners that FSDP2's own ops reveal."""
        storages = self._storages
        if func.namespace == "fsdp":
            if func._opname == "all_gather_copy_in":
                storages.own(out, COMMUNICATION, OUTSIDE)
            elif func._opname == "chunk_cat":
                storages.own(args[0], UNSHARDED_GRADIENT, OUTSIDE)
                storages.own((kwargs["out"],), COMMUNICATION, OUTSIDE)
            return
        num_known = len(storages.allocations)
        self._after_op(func, args, kwargs, out)
        if self._streams.current:
            for entry in storages.allocations[num_known:]:
                entry["stream"] = self._streams.current
        if func is torch.ops.aten._to_copy.default and self._is_unsharded(args[0]) and not self._is_unsharded(out):
            storages.own((out,), WEIGHT_CAST, OUTSIDE)

    def _is_unsharded(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor)
        return key is not None and self._storages.owner_of(key) == UNSHARDED_PARAMETER

    def _fill(self, parameter: Any) -> None:
        """Replace `FSDPParam.alloc_all_gather_outputs`: a parameter is about to be gathered."""
        storages = self._storages
        holder = (parameter._param_fqn or "").rpartition(".")[0]
        for tensor in parameter.all_gather_outputs:
            storage, num_bytes = storage_of(tensor), tensor.numel() * tensor.itemsize
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
                storages.born(storage._cdata, tensor, "resize_", UNSHARDED_PARAMETER, storages.stage(), holder)
            storages.own((tensor,), UNSHARDED_PARAMETER, OUTSIDE, holder)

    def _empty(self, parameter: Any) -> None:
        """Replace `FSDPParam.free_unsharded_param`."""
        for tensor in parameter.all_gather_outputs:
            self._storages.emptied(tensor)
            storage_of(tensor).resize_(0)


class _LocalDatalessMode(DatalessMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._get_dispatch_mode(FAKE) is not None:
            return func(*args, **(kwargs or {}))  # distributed tensors ask for shapes only
        if any(issubclass(kind, DTensor) for kind in types):
            if not func._schema.name.startswith(OPTIMIZERS_OWN) or not func._schema.is_mutable:
                if any(issubclass(kind, PlannedTensor) for kind in types):
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


# --- streams: only their numbers matter, because freed memory returns to the stream that allocated it ---


class _Streams:
    """Replaces the device module (`torch.cuda`) for FSDP2."""

    Event = cuda_calls.Event

    def __init__(self) -> None:
        self.current = 0  # the stream that allocates memory now; 0 is the default stream
        self._num_streams = 0

    def Stream(self, priority: int = 0) -> cuda_calls.Stream:
        self._num_streams += 1
        return cuda_calls.Stream(number=self._num_streams)

    def current_stream(self, *_: Any) -> cuda_calls.Stream:
        return cuda_calls.Stream(number=self.current)

    @contextmanager
    def stream(self, stream: cuda_calls.Stream) -> Iterator[None]:
        before, self.current = self.current, stream.number
        try:
            yield
        finally:
            self.current = before

"""One rank of FSDP2 without the others: PyTorch's own `fully_shard` on planned tensors, with a fake process group.

FSDP2's own code decides what is sharded, gathered, prefetched, kept and reduced, and when. Collectives do nothing,
streams and events are placeholders, and storages that FSDP2 empties and refills are freed and allocated again.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from stepscope.errors import UsageError
from stepscope.planner.emulation import cuda_calls
from stepscope.planner.emulation.ranks import COMMUNICATION, AfterOp, Ranks
from stepscope.planner.parallel import Parallel
from stepscope.recorder.ledger.storages import OUTSIDE, WEIGHT_CAST, Storages, storage_key, storage_of
from stepscope.workloads.workload import Batch

UNSHARDED_PARAMETER, UNSHARDED_GRADIENT = "unsharded_parameter", "unsharded_gradient"
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}


def policy_of(parallel: Parallel) -> fsdp.MixedPrecisionPolicy:
    """Return FSDP2's policy for the dtypes of a plan."""
    param_dtype, reduce_dtype = _DTYPES[parallel.param_dtype], _DTYPES[parallel.reduce_dtype]
    return fsdp.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


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


class Sharding(Ranks):
    """While the context is active, `shard` makes a module one of several that train it together with FSDP2."""

    def __init__(self, parallel: Parallel, device: torch.device, storages: Storages, after_op: AfterOp) -> None:
        super().__init__(parallel, device, storages, after_op)
        self._streams = _Streams()

    def __enter__(self) -> "Sharding":
        if not hasattr(FSDPParam, "alloc_all_gather_outputs"):
            raise UsageError(f"--fsdp: torch {torch.__version__} is too new for this plan; use torch 2.13 or earlier")
        super().__enter__()
        return self

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        # FSDP2's modules import names from each other.
        package = FSDPParam.__module__.rpartition(".")[0]
        for module in [module for name, module in list(sys.modules.items()) if name.startswith(package)]:
            yield module, "_get_device_handle", lambda *_: self._streams
            yield module, "_get_device_from_mesh", lambda *_: self._device
        for name in COLLECTIVES:
            yield dist, name, lambda *args, **kwargs: None
        yield FSDPParam, "alloc_all_gather_outputs", lambda parameter: self._fill(parameter)
        yield FSDPParam, "free_unsharded_param", lambda parameter: self._empty(parameter)

    def shard(self, module: nn.Module, batch: Batch) -> nn.Module:
        """Apply `fully_shard` to the elements of the module's lists, which are its blocks, and to the rest."""
        found = units(module)
        *blocks, whole = found
        inside = {part for block in blocks for part in block.modules()}
        rest = {p for part in whole.modules() if part not in inside for p in part.parameters(recurse=False)}
        if len(rest) + sum(len(set(block.parameters())) for block in blocks) != len(set(whole.parameters())):
            raise UsageError(
                "--fsdp: blocks share a parameter with other modules, which fully_shard does not support"
            )
        policy = policy_of(self._parallel)
        for unit in found:
            try:
                fsdp.fully_shard(unit, mesh=self._mesh, mp_policy=policy)
            except (NotImplementedError, ValueError, AssertionError) as error:
                raise UsageError(f"--fsdp: fully_shard rejects {type(unit).__name__}: {error}") from None
        what = f"each of {len(blocks)} blocks and the rest" if blocks else "the model, which has no list of blocks"
        how = "its defaults" if policy == fsdp.MixedPrecisionPolicy() else "a MixedPrecisionPolicy"
        ranks = f"one of {self._parallel.num_ranks} ranks with its own batch"
        self._note("FSDP2", f"{ranks}; fully_shard with {how} on {what}; the model is not created on the device")
        return module

    # --- FSDP2's effects on memory -------------------------------------------------------------

    def _saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the stream of an op's memory, and the owners that FSDP2's own ops reveal."""
        storages = self._storages
        if func.namespace == "fsdp":
            if func._opname == "all_gather_copy_in":
                storages.own(out, COMMUNICATION, OUTSIDE)
            if func._opname != "chunk_cat":
                return
            storages.own(args[0], UNSHARDED_GRADIENT, OUTSIDE)
            storages.own((kwargs["out"],), COMMUNICATION, OUTSIDE)
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

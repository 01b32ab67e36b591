"""One rank of DistributedDataParallel: PyTorch's own reducer on planned tensors, with its buckets and their rebuild.

Gradients are copied into buckets and back by the reducer's C++ code. The collective is a hook that is already done.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from stepscope.planner.emulation.dataless import DatalessMode
from stepscope.planner.emulation.ranks import COMMUNICATION, LocalDatalessMode, Ranks
from stepscope.planner.emulation.torch_support import replaced
from stepscope.recorder.ledger.storages import OUTSIDE
from stepscope.workloads.workload import Batch

_INIT = DistributedDataParallel.__init__  # a plan of one device refuses it
_EMPTY = torch.ops.aten.empty.memory_format


class DataParallel(Ranks):
    """While the context is active, `shard` wraps a module in DistributedDataParallel."""

    def dataless_mode(self, kernels: Any) -> DatalessMode:
        self._mode = _BucketMode(self._device, kernels, self._saw)
        return self._mode

    def shard(self, module: nn.Module, batch: Batch) -> nn.Module:
        with replaced((DistributedDataParallel, "__init__", _INIT)):
            # Without the first broadcast: it needs data, and its buffers are gone before the first step.
            wrapped = DistributedDataParallel(module, init_sync=False)
        wrapped.register_comm_hook(None, self._reduced)
        wrapped.reducer = _Reducer(wrapped.reducer, self._mode)
        ranks = f"one of {self._parallel.num_ranks} ranks with its own batch"
        self._note("DDP", f"{ranks}; DistributedDataParallel with its defaults")
        return wrapped

    def _reduced(self, _state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Replace the collective: the bucket is reduced at once."""
        buffer = bucket.buffer()
        self._storages.own((getattr(buffer, "_stepscope_inner", buffer),), COMMUNICATION, OUTSIDE)
        done: Future[torch.Tensor] = Future()
        done.set_result(buffer)
        return done


class _Reducer:
    """DDP's reducer. When it rebuilds its buckets, it reads numbers from tensors that it makes itself."""

    def __init__(self, reducer: Any, mode: "_BucketMode") -> None:
        self._reducer, self._mode = reducer, mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> Any:
        self._mode.makes_numbers = True
        try:
            return self._reducer._rebuild_buckets()
        finally:
            self._mode.makes_numbers = False


class _BucketMode(LocalDatalessMode):
    makes_numbers = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.makes_numbers and func is _EMPTY and (kwargs or {}).get("dtype") is torch.int32:
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

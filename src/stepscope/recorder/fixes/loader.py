"""`waiting_for_data`, `small_batch`, `pageable_copies`: changes the arguments of DataLoaders."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from stepscope.recorder.fixes.change import Change
from stepscope.recorder.patches import Patch

MOST_WORKERS = 8
PREFETCH_FACTOR = 4


class LoaderChange(Change):
    """`arguments_of(given)` returns the arguments to change."""

    nothing_seen = "no DataLoader was made"

    def start(self) -> None:
        self._names = list(inspect.signature(DataLoader.__init__).parameters)[1:]
        self.handles.append(Patch(DataLoader, "__init__", self._make))

    def _make(self, original: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self._names, args)), **kwargs}
        return original(loader, **{**given, **self.arguments_of(given)})

    def arguments_of(self, given: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class MoreWorkers(LoaderChange):
    """Raises `num_workers`, and keeps workers between epochs."""

    def arguments_of(self, given: dict[str, Any]) -> dict[str, Any]:
        wanted = int(self.value or min(MOST_WORKERS, max(2, os.cpu_count() or 2)))
        before = given.get("num_workers") or 0
        if isinstance(given.get("dataset"), IterableDataset):
            self.left["a DataLoader of an IterableDataset: each worker would read all of it"] += 1
            return {}
        if before >= wanted:
            self.left[f"a DataLoader has {before} workers already"] += 1
            return {}
        self.changed[f"DataLoaders with {wanted} workers instead of {before}"] += 1
        return {
            "num_workers": wanted,
            "persistent_workers": True,
            "prefetch_factor": given.get("prefetch_factor") or PREFETCH_FACTOR,
        }


class LargerBatch(LoaderChange):
    """Multiplies `batch_size`."""

    def arguments_of(self, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("batch_sampler") is not None or given.get("batch_size", 1) is None:
            self.left["a DataLoader has no batch_size: it was given whole batches, or a batch_sampler"] += 1
            return {}
        before = int(given.get("batch_size", 1))
        after = max(1, round(before * float(self.value or 2)))
        self.changed[f"DataLoaders with batch_size {after} instead of {before}"] += 1
        return {"batch_size": after}


class PinnedCopies(LoaderChange):
    """Sets `pin_memory=True`, and makes copies of pinned tensors non-blocking."""

    nothing_seen = "no DataLoader was made, and no pinned tensor was copied to a GPU"

    def start(self) -> None:
        super().start()
        self.handles.append(Patch(torch.Tensor, "to", self._copy))
        self.handles.append(Patch(torch.Tensor, "cuda", self._copy))

    def arguments_of(self, given: dict[str, Any]) -> dict[str, Any]:
        if not torch.cuda.is_available():
            self.left["a DataLoader: there is no GPU to copy to"] += 1
            return {}
        if given.get("pin_memory"):
            self.left["a DataLoader pins its memory already"] += 1
            return {}
        self.changed["DataLoaders with pin_memory=True"] += 1
        return {"pin_memory": True}

    def _copy(self, original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        says_so = "non_blocking" in kwargs or any(isinstance(value, bool) for value in args)
        if not says_so and tensor.device.type == "cpu" and torch.cuda.is_initialized() and tensor.is_pinned():
            result = original(tensor, *args, non_blocking=True, **kwargs)
            self.changed["copies made non_blocking"] += result.is_cuda
            return result
        return original(tensor, *args, **kwargs)

"""CUDA allocator counters over a window, the allocator history, and memory snapshots."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

MAX_HISTORY_ENTRIES = 200_000
SNAPSHOT_PROTOCOL = 4  # the newest that PyTorch's viewer reads


class AllocatorCounters:
    """The allocator's counters from `AllocatorCounters(device)` to `read()`.

    Resets the peak counters once: there is no other way to get a window's peak with the temporaries inside kernels.
    If the script had a higher peak before, `lowered` describes the effect.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        before = torch.cuda.memory_stats(device)
        self._start_bytes = before.get("allocated_bytes.all.current", 0)
        self._num_retries = before.get("num_alloc_retries", 0)
        self._peak_before = before.get("allocated_bytes.all.peak", 0)
        torch.cuda.reset_peak_memory_stats(device)
        self.lowered: str | None = None

    def read(self) -> dict[str, int]:
        after = torch.cuda.memory_stats(self._device)
        peak_bytes = after.get("allocated_bytes.all.peak", 0)
        if peak_bytes < self._peak_before:
            self.lowered = (
                "the peak counters were reset when the memory window began: the script's own "
                f"torch.cuda.max_memory_allocated() no longer includes its earlier peak of {self._peak_before} bytes"
            )
        return {
            "start_allocated_bytes": self._start_bytes,
            "peak_allocated_bytes": peak_bytes,
            "peak_reserved_bytes": after.get("reserved_bytes.all.peak", 0),
            "num_retries": after.get("num_alloc_retries", 0) - self._num_retries,
        }


class AllocatorHistory:
    """Records the allocator history with Python stacks. A history that the script itself records is left alone."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_wanted = False
        self._is_on = False

    def start_with_cuda(self) -> None:
        """Record history from the moment the script initializes CUDA: it may run out of memory in its first step."""
        self._is_wanted = True
        torch.cuda._lazy_call(self._cuda_initialized)

    def _cuda_initialized(self) -> None:
        if self._is_wanted and os.getpid() == self._pid:
            try:
                self.start()
            except Exception:
                pass  # an exception here would make the script's CUDA initialization fail

    def start(self) -> bool:
        """Start recording, and return whether this object records the history now."""
        self._is_wanted = True
        script_records = getattr(torch._C, "_cuda_isHistoryEnabled", bool)()
        if not self._is_on and not script_records:
            torch.cuda.memory._record_memory_history(
                enabled="all", context="alloc", stacks="python", max_entries=MAX_HISTORY_ENTRIES
            )
            self._is_on = True
        return self._is_on

    def stop(self) -> None:
        self._is_wanted = False
        if self._is_on:
            self._is_on = False
            torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(path: Path) -> None:
    """Write a snapshot of current allocations and the recorded history, for pytorch.org/memory_viz."""
    snapshot: Any = torch.cuda.memory._snapshot()
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as stream:
        pickle.dump(snapshot, stream, protocol=SNAPSHOT_PROTOCOL)
    temporary.replace(path)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception is, or was caused by, torch's out-of-memory error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False

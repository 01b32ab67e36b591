"""The memory window of a session: the ledger, tensors that earlier steps left alive, and CUDA's own counters."""

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepscope.recorder import files
from stepscope.recorder.ledger.leaks import TIME_LIMIT_S, find_holders, find_left_alive, live_tensors
from stepscope.recorder.ledger.ledger import Ledger, optimized
from stepscope.recorder.ledger.nodes import SHOWS_SAVED_TENSORS, next_sequence_number
from stepscope.recorder.ledger.op_log import Unchanged
from stepscope.recorder.ledger.storages import MAX_ALLOCATIONS, storage_key, storage_of
from stepscope.recorder.precision.attention_calls import AttentionCalls
from stepscope.recorder.values import named_buffers_in, parameters_in, tensors_in

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


MAX_BEFORE = MAX_ALLOCATIONS // 4  # tensors listed that exist before the window: a data set can have a million
MAX_NAMED = 50  # the largest of them, whose variables are looked up


class MemoryProbe:
    """Records one step from `start()` to `stop()` into `memory.json.gz`; `in_full` adds callers and a snapshot."""

    def __init__(
        self,
        folder: Path,
        in_full: bool,
        note: Callable[[str, str], None],
        guard: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self._folder, self._in_full, self._report, self._guard = folder, in_full, note, guard
        self._notes: list[tuple[str, str]] = []  # reported when the window ends, dropped with it
        self.ledger: Ledger | None = None
        self.attention = AttentionCalls()
        self._history = AllocatorHistory()
        self._counters: AllocatorCounters | None = None
        self._left_alive: list[dict[str, Any]] = []
        self._unchanged: Unchanged | None = None
        self._unchanged_indices: list[int] = []
        self._step_began = self._next_began = next_sequence_number()
        self.num_steps = 0  # how many steps have ended

    def await_cuda(self) -> None:
        """If `in_full`, record the allocator history from CUDA's initialization to the end of the warm-up."""
        if self._in_full:
            self._history.start_with_cuda()

    def warmup_ended(self, has_window: bool) -> None:
        """Stop the history: steps are timed without it. If the window comes, remember the tensors that exist."""
        self._history.stop()
        if has_window:
            self._guard("looking for existing tensors", self._remember)

    def _remember(self) -> None:
        self._unchanged = Unchanged(live_tensors())

    def step_ended(self) -> None:
        """Remember which graph nodes belong to the step that just ended."""
        self.num_steps += 1
        self._step_began, self._next_began = self._next_began, next_sequence_number()

    def start(
        self, roots: list[nn.Module], optimizers: list[Any], device: int | None, phase: Callable[[], str | None]
    ) -> None:
        if not SHOWS_SAVED_TENSORS:
            text = f"torch {torch.__version__} does not show what a graph has saved"
            self._note("memory", f"{text}, so the tensors saved for backward are not reported")
        if device is not None:
            self._guard("reading the allocator's counters", lambda: self._start_cuda(device))
        ledger = Ledger(roots, optimizers, phase, callers=self._in_full, logs_ops=True)
        known = list(_belonging(roots, optimizers))
        self._guard("looking for graphs of earlier steps", lambda: self._find_left_alive(known, ledger))
        self._guard("looking for existing tensors", lambda: self._find_others(known, ledger))
        self.ledger = ledger
        self.attention = AttentionCalls(ledger.module)
        self._guard("watching attention", self.attention.start)
        ledger.start()
        self._guard("looking for existing tensors", lambda: self._find_unchanged(ledger))

    def _find_unchanged(self, ledger: Ledger) -> None:
        if self._unchanged is not None:
            self._unchanged_indices = ledger.indices(self._unchanged.keys(live_tensors()))

    def _find_others(self, known: list[torch.Tensor], ledger: Ledger) -> None:
        keys = {storage_key(tensor) for tensor in known} | {None}
        there = {storage_key(tensor): tensor for tensor in _with_gradients(live_tensors())}
        others = [tensor for key, tensor in there.items() if key not in keys]
        largest = sorted(others, key=lambda tensor: -storage_of(tensor).nbytes())
        if self._in_full:
            ledger.note_before(find_holders(largest[:MAX_NAMED]))
        ledger.note_before([(tensor, None) for tensor in largest[:MAX_BEFORE]])
        if len(others) > MAX_BEFORE:
            text = f"the {len(others) - MAX_BEFORE:,} smallest tensors that existed before the step"
            self._note("memory", f"{text} are not included in any figure")

    def _find_left_alive(self, known: list[torch.Tensor], ledger: Ledger) -> None:
        self._left_alive, held, is_complete = find_left_alive(self._step_began, known)
        ledger.note_before([(tensor, place if self._in_full else None) for tensor, place in held], left_alive=True)
        if self._left_alive:
            num_bytes, holder = sum(each["bytes"] for each in self._left_alive), self._left_alive[0]["frame"]
            text = f"{num_bytes:,} bytes of earlier steps' graphs are still alive"
            self._note("memory", f"{text}, most of them held at {holder}" if holder else text)
        if not is_complete:
            text = f"the search for graphs of earlier steps stopped after {TIME_LIMIT_S:.0f} s"
            self._note("memory", f"{text}: there may be more of them")

    def _start_cuda(self, device: int) -> None:
        self._counters = AllocatorCounters(device)
        if self._in_full and not self._history.start():
            self._note(
                "memory", "the script records the allocator history itself: the snapshot contains that history"
            )

    def stop(self) -> Ledger | None:
        """End the window, write its results, and return its ledger, or None if there was none."""
        ledger, attention = self.ledger, self.attention
        if ledger is not None:
            attention.stop()
            if attention.error:
                self._note("attention", f"an attention call could not be inspected: {attention.error}")
            if attention.num_dropped:
                self._note("attention", f"{attention.num_dropped:,} further attention calls were not recorded")
            ledger.stop()
            memory = {**ledger.memory(), "left_alive": self._left_alive}
            if ledger.log is not None:
                memory["ops"] = ledger.log.table(self._unchanged_indices)
            self._guard("reading the allocator's counters", lambda: self._read_cuda(memory))
            files.write_json_gz(self._folder / files.MEMORY_FILE, memory)
            if ledger.saved_error:
                self._note("memory", f"tensors saved for backward could not be read: {ledger.saved_error}")
            for note in self._notes:
                self._report(*note)
        self.drop()
        return ledger

    def take_attention(self) -> list[dict[str, Any]]:
        """Return the table of attention calls, and let go of the model they were made in."""
        attention, self.attention = self.attention, AttentionCalls()
        return attention.table()

    def _note(self, about: str, text: str) -> None:
        self._notes.append((about, text))

    def _read_cuda(self, memory: dict[str, Any]) -> None:
        if self._counters is None:
            return
        memory["allocator"] = self._counters.read()
        if self._counters.lowered:
            self._note("memory", self._counters.lowered)
        if self._in_full:
            write_snapshot(self._folder / files.SNAPSHOT_FILE)

    def drop(self) -> None:
        self.attention.stop()
        ledger, self.ledger, self._counters = self.ledger, None, None
        self._notes.clear()
        self._unchanged = None
        if ledger is not None:
            ledger.stop()
        self._history.stop()

    def script_failed(self, error: BaseException | None) -> None:
        """If the script ran out of CUDA memory, write a snapshot of what filled it."""
        if is_out_of_memory(error) and torch.cuda.is_initialized():
            write_snapshot(self._folder / files.OOM_SNAPSHOT_FILE)
            text = f"see what filled it in {files.OOM_SNAPSHOT_FILE}; pytorch.org/memory_viz opens the file"
            self._report("memory", f"CUDA ran out of memory: {text}")


def _with_gradients(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that have memory, and their gradients, which Python may not have seen yet."""
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if tensor.device.type != "meta":
                yield tensor
                if tensor.is_leaf and tensor.grad is not None:
                    yield tensor.grad


def _belonging(roots: list[nn.Module], optimizers: list[Any]) -> Iterator[torch.Tensor]:
    """Yield what the ledger finds by itself: parameters, buffers, gradients and optimizer state."""
    parameters = [*(p for root in roots for p in parameters_in(root)), *optimized(optimizers)]
    yield from parameters
    yield from (parameter.grad for parameter in parameters if parameter.grad is not None)
    yield from (buffer for root in roots for _, buffer in named_buffers_in(root))
    yield from tensors_in([optimizer.state for optimizer in optimizers])

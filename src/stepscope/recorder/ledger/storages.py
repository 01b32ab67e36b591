"""The storages of one step: when each was allocated and freed, and what it belongs to."""

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import torch

from stepscope.recorder.clock import OTHER
from stepscope.recorder.values import stored
from stepscope.recorder.wall import failed

MAX_ALLOCATIONS = 200_000

PARAMETER = "parameter"
BUFFER = "buffer"
GRADIENT = "gradient"
OPTIMIZER_STATE = "optimizer_state"
INPUT = "input"
WEIGHT_CAST = "autocast_weight_cast"
ACTIVATION = "activation"
TEMPORARY = "temporary"
WORKSPACE = "workspace"  # kept by a library between calls; only plans have it
LEFT_ALIVE = "left_alive"  # by a graph of an earlier step
OTHERS = "other"  # existed before the window, and is none of these

BEFORE = "before the window"
OUTSIDE = "outside an op"


class _Stream(TypedDict, total=False):
    stream: int


class Allocation(_Stream):
    """An entry of `memory.json.gz`. `born` and `died` are event numbers, None outside the window."""

    bytes: int
    device: str
    dtype: str
    shape: list[int]
    owner: str
    op: str
    phase: str | None
    module: str | None
    caller: str | None
    born: int | None
    died: int | None
    born_ns: int | None
    died_ns: int | None


class Stage(TypedDict):
    name: str
    event: int


def _sizes(tensor: torch.Tensor) -> list[int]:
    return [] if tensor.is_nested else list(tensor.shape)  # texts of different lengths have no shape


def storage_of(tensor: Any) -> Any:
    """Return a tensor's storage, or that of the tensor it wraps (`_stepscope_inner`, a DTensor's local tensor)."""
    inner = getattr(tensor, "_stepscope_inner", None)
    if inner is None:
        local = getattr(tensor, "_local_tensor", tensor)
        inner = getattr(local, "_stepscope_inner", local)
    return inner.untyped_storage()


def storage_key(tensor: Any) -> int | None:
    """Return an id of a tensor's storage while it lives, or None for tensors without their own storage."""
    try:
        storage = storage_of(tensor)
        return storage._cdata if storage.nbytes() else None
    except (NotImplementedError, RuntimeError, AttributeError):
        return None


class Storages:
    """Follows storages from `open()` to `close()`. `stage()` returns the current part of the step.

    If `is_capped`, storages after the first MAX_ALLOCATIONS are only counted.
    """

    def __init__(self, stage: Callable[[], str], is_capped: bool = True) -> None:
        self.stage, self._is_capped = stage, is_capped
        self.allocations: list[Allocation] = []
        self.live: dict[int, int] = {}  # storage key -> index into the allocations
        self.stages: list[Stage] = []
        self.num_events = 0
        self.num_dropped = 0
        self.on_death: Callable[[int], object] = lambda _key: None
        self._references: dict[int, weakref.ref[Any]] = {}
        self._began_ns: int | None = None
        self._is_open = False
        self._names: dict[Any, str] = {}

    def open(self) -> None:
        if self._began_ns is None:
            self._began_ns = time.perf_counter_ns()
        self._is_open = True

    def close(self) -> None:
        """End the window: storages freed later count as alive."""
        self._is_open = False

    def born(
        self,
        key: int,
        tensor: torch.Tensor,
        op: str,
        owner: str,
        phase: str | None = None,
        module: str | None = None,
        caller: str | None = None,
        before: bool = False,
    ) -> None:
        """Add a new storage. `before` means that it existed when the window opened."""
        if self._is_capped and len(self.allocations) >= MAX_ALLOCATIONS:
            self.num_dropped += 1
            return
        storage = storage_of(tensor)
        before = before or not self._is_open
        self.allocations.append(Allocation(
            bytes=storage.nbytes(), device=self._name(tensor.device), dtype=self._name(tensor.dtype),
            shape=_sizes(tensor), owner=owner, op=BEFORE if before else op, phase=None if before else phase,
            module=module, caller=caller, born=None if before else self._next_event(), died=None,
            born_ns=None if before else self._now(), died_ns=None,
        ))  # fmt: skip
        self.live[key] = len(self.allocations) - 1
        self._references[key] = weakref.ref(storage, lambda _reference: self._died(key))

    def _died(self, key: int) -> None:
        try:
            index = self.live.pop(key, None)
            self._references.pop(key, None)
            self.on_death(key)
            if index is not None and self._is_open:
                self.gave_back(index)
        except Exception as error:
            failed(error)

    def emptied(self, tensor: torch.Tensor) -> None:
        """Mark a storage that is about to be resized to 0 as freed. It may be filled and added again."""
        key = storage_key(tensor)
        if key is not None:
            self._died(key)

    def took(
        self, num_bytes: int, op: str, owner: str, phase: str | None, device: str, module: str | None = None
    ) -> int:
        """Add memory without a tensor, and return its index for `gave_back`."""
        self.allocations.append(Allocation(
            bytes=num_bytes, device=device, dtype="uint8", shape=[num_bytes], owner=owner, op=op, phase=phase,
            module=module, caller=None, born=self._next_event(), died=None, born_ns=self._now(), died_ns=None,
        ))  # fmt: skip
        return len(self.allocations) - 1

    def gave_back(self, index: int) -> None:
        """Free the memory that `took` added."""
        entry = self.allocations[index]
        entry["died"] = self._next_event()
        entry["died_ns"] = self._now()

    def own(self, tensors: Iterable[torch.Tensor], owner: str, op: str, module: str | None = None) -> None:
        """Set the owner of tensors, known or not."""
        for tensor in (part for each in tensors for part in stored(each)):
            key = storage_key(tensor)
            if key is None:
                continue
            index = self.live.get(key)
            if index is None:
                self.born(key, tensor, op, owner, module=module, before=op == BEFORE)
            else:
                entry = self.allocations[index]
                entry["owner"] = owner
                if owner == INPUT:  # a batch may be part of a data set
                    entry["shape"] = _sizes(tensor)
                entry["module"] = entry["module"] or module

    def keep_for_backward(self, phase: str) -> None:
        """Mark what `phase` made and is still alive as kept for backward."""
        for index in list(self.live.values()):  # a storage may be freed meanwhile
            entry = self.allocations[index]
            if entry["owner"] == TEMPORARY and entry["phase"] == phase:
                entry["owner"] = ACTIVATION

    def owner_of(self, key: int) -> str | None:
        """Return the owner of a living storage, or None if it is not known."""
        index = self.live.get(key)
        return None if index is None else self.allocations[index]["owner"]

    def note_stage(self) -> None:
        """Note that the next event belongs to the current stage."""
        stage = self.stage()
        if self.stages and self.stages[-1] == {"name": OTHER, "event": self.num_events} and stage != OTHER:
            self.stages.pop()  # between two phases, without any event
        if not self.stages or self.stages[-1]["name"] != stage:
            self.stages.append({"name": stage, "event": self.num_events})

    def _next_event(self) -> int:
        self.note_stage()
        self.num_events += 1
        return self.num_events - 1

    def _now(self) -> int:
        return time.perf_counter_ns() - (self._began_ns or 0)

    def _name(self, thing: Any) -> str:
        name = self._names.get(thing)
        if name is None:
            name = self._names[thing] = str(thing).removeprefix("torch.")
        return name

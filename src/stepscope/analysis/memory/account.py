"""Memory of one device over a step: the peak, what was alive at it, and when.

Works on the structure of `memory.json.gz` (docs/memory.md), from a recording, plan, trace or snapshot. Uses only the
standard library, so it runs without torch and Polars.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from operator import itemgetter
from typing import Any

from stepscope.analysis.memory.module_tree import ModuleBytes, activations_of, rolled_up, starred
from stepscope.analysis.memory.size_formulas import find_symbols, formula
from stepscope.analysis.memory.timeline import BEFORE, Levels, Point
from stepscope.border import limit

REMAINDER = "allocator rounding, workspaces and in-kernel temporaries"
BEFORE_THE_WINDOW = "before the window"
OTHER = "other"
MAX_POINTS = 2000
MAX_LARGEST = 200
PARTS = ("owner", "module", "phase", "dtype", "op", "caller")


@dataclass(frozen=True)
class Part:
    """A part of the memory alive at the peak."""

    name: str | None  # none if unknown or, for modules, outside every module
    bytes: int
    share: float  # of the peak
    num_allocations: int


@dataclass(frozen=True)
class LiveAtPeak:
    """Memory alive at the peak, split six ways, the largest first; each split adds up to the peak."""

    by_owner: tuple[Part, ...]
    by_module: tuple[Part, ...]
    by_phase: tuple[Part, ...]
    by_dtype: tuple[Part, ...]
    by_op: tuple[Part, ...]
    by_caller: tuple[Part, ...]


@dataclass(frozen=True)
class Stage:
    """A stage of the step."""

    name: str  # `start` is before the first stage
    first_event: int
    after_bytes: int  # allocated when it ended
    peak_bytes: int  # the most allocated during it


@dataclass(frozen=True)
class Large:
    """Allocations of one size from one place."""

    bytes: int  # of each
    num_allocations: int
    num_at_peak: int  # how many are alive at the peak
    op: str | None
    module: str | None  # `*` replaces every number
    first_module: str | None  # fully qualified name of the first
    phase: str | None
    owner: str | None
    dtype: str | None
    shape: tuple[int, ...] | None
    caller: str | None
    formula: str | None  # A formula for the exact bytes in the account's symbols; None if there is none


@dataclass(frozen=True)
class LeftAlive:
    """A graph of an earlier step that is still alive when the step starts."""

    bytes: int
    num_tensors: int
    op: str | None
    module: str | None
    frame: str | None  # the variable that holds it, with the lines that fill it: `train.py:9 losses`


@dataclass(frozen=True)
class Account:
    """The memory of one device over a step."""

    device: str
    peak_bytes: int  # the allocator's peak if known, else `peak_tracked_bytes`; the parts add up to it
    peak_tracked_bytes: int  # the largest sum of the listed allocations alive at once
    remainder_bytes: int | None  # the allocator's peak minus `peak_tracked_bytes`; None if unknown
    remainder_at_start_bytes: int | None
    """Memory held by the allocator when the window began, minus what was listed then."""
    peak_event: int
    """The allocation that made the peak, in the order of allocations and frees; -1 is before the first."""
    peak_stage: str | None
    live_at_peak: LiveAtPeak  # split by owner, module, phase, dtype, op and place in Python
    stages: tuple[Stage, ...]  # in order, with the memory allocated after each
    activations: tuple[ModuleBytes, ...]  # forward results kept for the backward, by module, at their maximum
    saved: tuple[ModuleBytes, ...]  # saved for backward by autograd, without parameters, by module
    largest: tuple[Large, ...]  # by the place that allocates, largest first
    largest_by_owner: tuple[Large, ...]  # the largest allocation of each owner
    symbols: Mapping[str, int]  # values of the letters in formulas
    peak_reserved_bytes: int | None  # peak reserved memory of the allocator; None if unknown
    fragmentation_bytes: int | None
    """Reserved but not allocated: at the peak if both are known over time, else the difference of their peaks."""
    num_retries: int | None  # how often the allocator had to release its cache to find memory
    timeline: tuple[Point, ...]  # memory allocated after each allocation and free
    left_alive: tuple[LeftAlive, ...]  # leaks: graphs of earlier steps, the largest first
    held: tuple[Part, ...]
    """Other memory from before the step by the variable that holds it, if known; the largest first."""
    num_allocations: int  # on this device
    num_dropped: int  # allocations beyond the recorder's limit, which are not tracked
    other_devices: Mapping[str, int]  # the most allocated on each other device, beyond 64 on the rest together

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """Return every field as plain values, with at most `most` rows in lists."""
        plain = asdict(self)
        for name in ("activations", "saved", "largest", "left_alive", "held"):
            plain[name] = plain[name][:most]
        for name in ("by_module", "by_op", "by_caller"):
            plain["live_at_peak"][name] = plain["live_at_peak"][name][:most]
        return plain


def account(memory: Mapping[str, Any], sizes: Sequence[int] | None = None) -> Account:
    """Return the account of `memory["device"]`; `sizes` override the allocations' bytes, as an allocator rounds them.

    >>> tensor = {"device": "cpu", "owner": "activation", "born": 0, "died": 1, "bytes": 12}
    >>> account({"device": "cpu", "allocations": [tensor]}, sizes=[512]).peak_bytes
    512
    """
    device, allocations = memory["device"], memory["allocations"]
    sizes = [each["bytes"] for each in allocations] if sizes is None else sizes
    by_device: dict[str, list[tuple[Mapping[str, Any], int]]] = {device: []}
    for each, size in zip(allocations, sizes):
        by_device.setdefault(each["device"], []).append((each, size))
    mine = by_device.pop(device)
    levels = Levels.of(mine)
    every = [each for each, _ in mine]
    alive = [*compress(mine, levels.alive_at_peak(every))]
    allocator = memory.get("allocator") or {}
    known_peak = allocator.get("peak_allocated_bytes")
    peak = levels.peak_bytes if known_peak is None else known_peak
    remainder = None if known_peak is None else known_peak - levels.peak_bytes
    rest = [(REMAINDER, remainder)] if remainder else []
    start = allocator.get("start_allocated_bytes")
    stages = _stages(levels, memory.get("stages") or [])
    symbols = find_symbols(memory)
    reserved = memory.get("reserved") or []
    peak_reserved = allocator.get("peak_reserved_bytes")
    fragmentation = None
    if held := [num_bytes for event, num_bytes in reserved if event <= levels.peak_event]:
        fragmentation = max(0, held[-1] - levels.peak_bytes)
    elif peak_reserved is not None and known_peak is not None:
        fragmentation = max(0, peak_reserved - known_peak)
    largest, by_owner = _largest(every, levels, symbols)
    return Account(
        device=device,
        peak_bytes=peak,
        peak_tracked_bytes=levels.peak_bytes,
        remainder_bytes=remainder,
        remainder_at_start_bytes=None if start is None else start - levels.bytes[0],
        peak_event=levels.peak_event,
        peak_stage=next((stage.name for stage in reversed(stages) if stage.first_event <= levels.peak_event), None),
        live_at_peak=LiveAtPeak(
            *(parts([(value_of(each, name), size) for each, size in alive], peak, rest) for name in PARTS)
        ),
        stages=stages,
        activations=activations_of(mine),
        saved=rolled_up(
            (each.get("module"), each["bytes"], each["num_tensors"]) for each in memory.get("saved") or []
        ),
        largest=largest,
        largest_by_owner=by_owner,
        symbols=symbols,
        peak_reserved_bytes=peak_reserved,
        fragmentation_bytes=fragmentation,
        num_retries=allocator.get("num_retries"),
        timeline=levels.points(reserved, MAX_POINTS),
        left_alive=tuple(
            LeftAlive(*(each.get(name) for name in LeftAlive.__dataclass_fields__))
            for each in sorted(memory.get("left_alive") or [], key=lambda each: -each["bytes"])
        ),
        held=parts(((each["caller"], each["bytes"]) for each in every if _is_held(each)), peak),
        num_allocations=len(mine),
        num_dropped=memory.get("num_dropped") or 0,
        other_devices=_peaks(by_device),
    )


def _peaks(by_device: Mapping[str, Sequence[tuple[Mapping[str, Any], int]]]) -> dict[str, int]:
    """Return the peak of each device; beyond the limit, of those with fewest allocations together."""
    ranked, most = sorted(by_device, key=lambda name: -len(by_device[name])), limit("DEVICES")
    listed = {name: by_device[name] for name in ranked[:most]}
    if rest := ranked[most:]:
        listed[f"{len(rest):,} more devices"] = [each for name in rest for each in by_device[name]]
    return {name: Levels.of(allocations).peak_bytes for name, allocations in listed.items()}


def value_of(each: Mapping[str, Any], name: str) -> str | None:
    """Return an allocation's owner, phase and so on; earlier memory has a phase of its own."""
    value: str | None = each.get(name)
    return BEFORE_THE_WINDOW if name == "phase" and value is None and each.get("born") is None else value


def parts(
    sizes: Iterable[tuple[str | None, int]], whole: int, rest: Iterable[tuple[str, int]] = ()
) -> tuple[Part, ...]:
    """Return bytes and number of allocations by name, the largest first; `rest` are no allocations."""
    sums: Counter[str | None] = Counter()
    counts: Counter[str | None] = Counter()
    for name, size in sizes:
        sums[name] += size
        counts[name] += 1
    sums.update(dict(rest))
    return tuple(Part(name, size, size / whole if whole else 0.0, counts[name]) for name, size in sums.most_common())


def _stages(levels: Levels, named: Sequence[Mapping[str, Any]]) -> tuple[Stage, ...]:
    """Return each stage with the memory when it ended, including the time before the first."""
    ordered = sorted(named, key=lambda stage: stage["event"])
    firsts = [("start", BEFORE), *((stage["name"], stage["event"]) for stage in ordered)]
    ends: list[int | None] = [*(event for _, event in firsts[1:]), None]
    return tuple(Stage(name, first, *levels.between(first, end)) for (name, first), end in zip(firsts, ends))


def _is_held(each: Mapping[str, Any]) -> bool:
    """Return whether a variable held it before the step and the step's own code does not need it."""
    return each["born"] is None and each.get("owner") == OTHER and each.get("caller") is not None


_PLACE = ("op", "phase", "owner", "dtype", "caller")


def _largest(
    allocations: Sequence[Mapping[str, Any]], levels: Levels, symbols: Mapping[str, int]
) -> tuple[tuple[Large, ...], tuple[Large, ...]]:
    """Return the places with the largest allocations, and the largest allocation of each owner."""
    places: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    by_owner: dict[str | None, list[Mapping[str, Any]]] = {}
    smallest = 0
    for each in sorted(allocations, key=itemgetter("bytes"), reverse=True):
        by_owner.setdefault(each.get("owner"), [each])
        if len(places) >= MAX_LARGEST and each["bytes"] < smallest:
            continue
        smallest = each["bytes"]
        shape = None if each.get("shape") is None else tuple(each["shape"])
        names = tuple(map(each.get, _PLACE))
        # Memory held by one variable counts as one, see `held`.
        key = (names,) if _is_held(each) else (smallest, starred(each.get("module")), shape, names)
        places[key].append(each)
    ordered = sorted(places.values(), key=lambda alike: (-alike[0]["bytes"], -len(alike)))
    return (
        tuple(_large(alike, levels, symbols) for alike in ordered[:MAX_LARGEST]),
        tuple(_large(alike, levels, symbols) for alike in by_owner.values()),
    )


def _large(alike: Sequence[Mapping[str, Any]], levels: Levels, symbols: Mapping[str, int]) -> Large:
    first = alike[0]
    module = first.get("module")
    named: dict[str, Any] = {name: first.get(name) for name in ("bytes", "op", "phase", "owner", "dtype", "caller")}
    return Large(
        **named,
        num_allocations=len(alike),
        num_at_peak=sum(levels.alive_at_peak(alike)),
        module=starred(module) if len(alike) > 1 else module,
        first_module=module,
        shape=None if first.get("shape") is None else tuple(first["shape"]),
        formula=formula(first, symbols),
    )

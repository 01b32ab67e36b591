"""The lines of history.jsonl and recent.jsonl as typed data; the counterpart of `recorder/history/`."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.border import COUNT_END, PLAIN, Values, check, is_count, is_number, is_text, limit, open_file
from stepscope.trace.recording import StepSample, step_of_line

HISTORY_FILE = "history.jsonl"
RECENT_FILE = "recent.jsonl"
LEAST_STEP_NS = 1000  # a Python call alone takes longer
OLDER_RECENT_FILE = "recent.old.jsonl"


@dataclass(frozen=True, slots=True)
class Process:
    """A process that wrote the history. Another one follows if the job was restarted into the same folder."""

    began: float  # Unix time in seconds
    start_ns: int  # the same moment on the process's monotonic clock
    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class GpuBlock:
    """NVML counters over a block; unsupported ones are None."""

    power_watts: float | None = None  # mean
    sm_clock_mhz: float | None = None  # mean
    min_sm_clock_mhz: float | None = None
    busy_share: float | None = None  # mean
    memory_bytes: int | None = None  # the largest amount in use on the GPU, by all processes
    energy_joules: float | None = None  # consumed in the block
    throttle: tuple[str, ...] = ()  # every reason that was seen
    num_processes: int | None = None  # other processes that compute on the GPU


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive steps of the same window: 0.25 s of them at first, later 1/200 of the run so far, at most 60 s.

    A step that takes longer is a block of its own. Blocks do not overlap. In the time that no block covers, no step
    was running: before the first step, Stepscope's own work at the ends of windows, and between two processes.
    """

    step: int  # the first
    num_steps: int
    window: str  # as in samples.jsonl
    start_ns: int  # of the first step, on the process's monotonic clock
    t: float  # Unix time in seconds at the end of the last step
    wall_ns: int  # sum over the steps
    median_ns: int  # of a step
    max_ns: int  # of the longest step
    max_step: int  # which one that was
    host_ns: Mapping[str, int]  # sums by phase and by what lies between steps; they add up to `wall_ns`
    num_times: Mapping[str, int] = field(default_factory=dict)  # how often each thing between steps was done
    num_tokens: int | None = None
    num_samples: int | None = None
    num_compiles: int = 0
    num_collections: int = 0  # of garbage, all generations
    loss: float | None = None  # the last one sampled in the block; it may be NaN or infinite
    loss_step: int | None = None
    max_loss: float | None = None  # the largest one sampled in the block; NaN if there was one
    max_loss_step: int | None = None
    allocated_bytes: int | None = None  # on the GPU, at the end of the block
    reserved_bytes: int | None = None  # by the allocator, at the end of the block
    peak_bytes: int | None = None  # the allocator's peak so far, which the script may reset
    total_bytes: int | None = None  # of the GPU
    resident_bytes: int | None = None  # of the process, at the end of the block
    available_bytes: int | None = None  # that the machine or the container has left for it
    core_share: float | None = None  # the share of time in which the thread that trains ran on a core (Linux)
    core_wait_share: float | None = None
    """The share of time in which the thread that trains could run, but other threads had the CPU's cores (Linux)."""
    others_share: float | None = None  # of all cores of the machine, which other processes used (Linux)
    gpu: GpuBlock | None = None
    process: int = 0  # which of `History.processes`

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.wall_ns


@dataclass(frozen=True, slots=True)
class Event:
    """Something long enough to matter: at least 1 s, or 3 typical steps."""

    event: str
    """What the loop did: `evaluation`, `rollout`, `checkpoint`, `logging`, `loader_start`, `garbage_collection`,
    `compile`; `stall`: a step that was long for no known reason; `silent`: no step ended for a minute;
    `window`: a window that was triggered; `suspended`: the machine slept; `stopped`: the
    process was stopped by a signal or a debugger; `clock_jump`: the time of day was set;
    `dropped`: lines that could not be written in time; `end`: the recording ended."""
    step: int  # the step in or before which it happened
    start_ns: int  # on the process's monotonic clock, which does not count the time the machine slept
    t: float  # Unix time in seconds at its end
    ns: int = 0  # how long it took
    place: str | None = None  # the line of the script, `train.py:31 evaluate`
    details: Mapping[str, Any] = field(default_factory=dict)  # its other fields
    process: int = 0  # which of `History.processes`


class Tail:
    """The whole lines that were added to a file since the last call, also after it was replaced by a new one."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self.was_replaced = False
        self.num_left_out = 0

    def first_line(self) -> list[bytes]:
        """Return the first line, if it is there."""
        with open_file(self._path) as stream:
            return [stream.readline(1 << 16)]

    def lines(self, to_the_end: bool = False) -> list[bytes]:
        """Return new lines; the first time, those of the last `most_bytes`.

        A last line without an end is left for the next call, or with `to_the_end` returned as it is.
        """
        self.was_replaced = False
        if not os.path.lexists(self._path):
            return []
        with open_file(self._path) as stream:
            status = os.fstat(stream.fileno())
            file = status.st_dev, status.st_ino
            if self._file is None:
                self._offset = max(0, status.st_size - (self._most_bytes or status.st_size))
            elif file != self._file or status.st_size < self._offset:
                self._offset, self.was_replaced = 0, True
            is_cut = self._file is None and self._offset > 0
            self._file = file
            stream.seek(self._offset)
            data = stream.read(limit("FILE_MIB") << 20)
        end = len(data) if to_the_end else data.rfind(b"\n") + 1
        self._offset += end
        lines = self._last_lines(data[:end] if end < len(data) else data)
        return lines[1:] if is_cut else lines

    def _last_lines(self, data: bytes) -> list[bytes]:
        """Return all lines; of more than the limit the first, in which the process begins, and the last ones."""
        most = most_lines()
        self.num_left_out = max(0, data.count(b"\n") - most)
        if not self.num_left_out:
            return data.splitlines()
        cut = len(data)
        for _ in range(most):
            cut = data.rfind(b"\n", 0, cut)
        return [data[: data.find(b"\n")], *data[cut + 1 :].splitlines()]


def most_lines() -> int:
    """Return how many lines of a history are read: the last ones."""
    return limit("HISTORY_LINES")


class Lines:
    """The lines of a history, sorted."""

    def __init__(self, num_processes: int = 0, restarts: bool = False) -> None:
        self.processes: list[Process] = []
        self.blocks: list[Block] = []
        self.events: list[Event] = []
        self.num_unread = 0
        self.num_processes = num_processes
        self.restarts = restarts
        self._values = Values("ROWS_VALUES")

    def add(self, lines: Iterable[bytes]) -> "Lines":
        for line in filter(None, lines):
            try:
                self._add(self._values.parsed(line))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
                self.num_unread += 1
        return self

    def _add(self, line: dict[str, Any]) -> None:
        process = max(0, self.num_processes - 1)
        if "event" in line:
            self.events.append(_event(line, process))
        elif "num_steps" in line:
            self.blocks.append(_block(line, process))
        elif "restart" in line:  # a better source of step boundaries was found
            self.restarts |= not any(block.process == process for block in self.blocks)
            self.blocks = [block for block in self.blocks if block.process != process]
            self.events = [event for event in self.events if event.process != process]
        else:
            began, host = _number(line["began"]), _text(line["host"])
            self.processes.append(Process(began, _count(line["start_ns"]), _count(line["pid"]), host))
            self.num_processes += 1


_COUNTS = frozenset(
    name
    for name, of in Block.__dataclass_fields__.items()
    if str(of.type) in ("<class 'int'>", "int | None") and name != "process"
)


def _block(line: dict[str, Any], process: int) -> Block:
    # This runs 10,000 times for a week.
    if None in line.values() or not line.keys() <= _BLOCK_FIELDS:
        line = {name: value for name, value in line.items() if value is not None and name in _BLOCK_FIELDS}
    for name in _COUNTS & line.keys():
        value = line[name]
        if type(value) is not int or not 0 <= value < COUNT_END:
            raise TypeError(f"{name} is not a count")
    host_ns, gpu = line["host_ns"], line.get("gpu")
    for times in (host_ns, line.get("num_times", {})):
        if not all(is_text(name) and is_count(value) for name, value in times.items()):
            raise TypeError("not a count")
    if sum(host_ns.values()) != line["wall_ns"] or not line["num_steps"] or not line["wall_ns"]:
        raise ValueError("steps take time, and the phases are all of it")
    if (line["step"] + line["num_steps"]) * LEAST_STEP_NS > line["start_ns"] + line["wall_ns"]:
        raise ValueError("there was no time for so many steps")
    if not is_number(line["t"]) or not is_text(line["window"]):
        raise TypeError("not a time or a window")
    if not all(is_number(line.get(name, 0)) for name in ("core_share", "core_wait_share", "others_share")):
        raise TypeError("not a share")
    for name in ("loss", "max_loss"):
        if name in line:
            line[name] = float(line[name])
    if gpu is not None:
        line["gpu"] = _gpu(gpu)
    line["process"] = process
    return Block(**line)


_BLOCK_FIELDS = frozenset(Block.__dataclass_fields__)
_GPU_NUMBERS = tuple(name for name in GpuBlock.__dataclass_fields__ if name != "throttle")


def _gpu(values: dict[str, Any]) -> GpuBlock:
    known = {name: _number(values[name]) for name in _GPU_NUMBERS if values.get(name) is not None}
    return GpuBlock(**known, throttle=tuple(map(_text, values.get("throttle", ()))))


_EVENT_FIELDS = frozenset(Event.__dataclass_fields__)


def _event(line: dict[str, Any], process: int) -> Event:
    place = line.get("place")
    details = {name: value for name, value in line.items() if name not in _EVENT_FIELDS}
    check(details, PLAIN)
    return Event(
        event=_text(line["event"]),
        step=_count(line["step"]),
        start_ns=_count(line["start_ns"]),
        t=_number(line["t"]),
        ns=_count(line.get("ns", 0)),
        place=None if place is None else _text(place),
        details=details,
        process=process,
    )


def steps_of(lines: Iterable[bytes]) -> list[StepSample]:
    """Return the steps of lines of samples.jsonl or recent.jsonl that have all but their device times."""
    found: list[StepSample] = []
    values = Values("ROWS_VALUES")
    for line in lines:
        try:
            written = values.parsed(line)
            if "restart" in written:
                found.clear()
            elif "window" in written:
                found.append(step_of_line(written))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            continue
    return found


def _of_kind(fits: Callable[[Any], bool], what: str) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        if not fits(value):
            raise TypeError(f"not {what}")
        return value

    return checked


_count = _of_kind(is_count, "a count")
_text = _of_kind(is_text, "a text")
_number = _of_kind(is_number, "a number")

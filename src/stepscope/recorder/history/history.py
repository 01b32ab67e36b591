"""Writes history.jsonl: blocks of steps, and what happened in them. Works in the writer's thread."""

from __future__ import annotations

import json
import os
import platform
from array import array
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.recorder import files, windows
from stepscope.recorder.clock import BETWEEN_STEPS, UNATTRIBUTED
from stepscope.recorder.history.clocks import Clocks
from stepscope.recorder.history.writer import Writer

SHORTEST_NS, LONGEST_NS, BLOCKS_PER_RUN = 250_000_000, 60_000_000_000, 200
LONGEST_WAIT_NS = 500_000_000  # that a block waits for core times; without steps of free running none come
GAP_NS = 500_000_000  # between two steps; a longer one ends a block
MOST_TIMES = 1024  # of a block that its median comes from
LONG_NS, LEAST_LONG_NS, LONG_STEPS = 1_000_000_000, 50_000_000, 3
MOST_EVENTS = 10_000  # of one kind
_BETWEEN = frozenset(BETWEEN_STEPS)
_UNDISTURBED = (windows.CLEAN, windows.FREE)


class _Block:
    def __init__(self, step: int, window: str, start_ns: int) -> None:
        self.step, self.window, self.start_ns = step, window, start_ns
        self.end_ns = start_ns
        self.num_steps = self.wall_ns = self.max_ns = self.max_step = 0
        self.times = array("q")
        self.stride = 1
        self.host_ns: dict[str, int] = {}
        self.num_times: dict[str, int] = {}
        self.num_tokens = self.num_samples = self.num_compiles = 0
        self.losses: list[tuple[int, float]] = []

    def median_ns(self) -> int:
        return sorted(self.times)[len(self.times) // 2]


class History:
    """Adds up steps to blocks. `read` returns the machine's state at the end of a block, in fields of its line."""

    def __init__(
        self,
        folder: Path,
        writer: Writer,
        began: float | None = None,
        read: Callable[[], dict[str, Any]] = dict,
        clocks: Clocks | None = None,
    ) -> None:
        self._writer, self._read, self._clocks = writer, read, clocks or Clocks()
        self._path = folder / files.HISTORY_FILE
        self._file: files.LineFile | None = None  # until the first step
        self._lines: list[str] = []
        self._num_told = 0  # lines that were dropped, and said to be
        self._block: _Block | None = None
        self._typical_ns: int | None = None
        self._num_events: Counter[str] = Counter()
        self.losses: deque[tuple[int, float]] = deque(maxlen=1000)
        """When a loss was sampled, and its value; added by the thread that trains."""
        self.last_step = -1
        self.is_free = False  # whether the last step was in no window
        self._recent: deque[tuple[int, int]] = deque(maxlen=256)  # end and own time of undisturbed steps
        self._ends, self._medians = array("q"), array("q")  # of blocks, and of their steps; thinned out
        self._core_times: tuple[int, int, int] | None = None  # when, on a core, waiting for one
        self.last_block: dict[str, Any] = {}
        now_ns, unix = self._clocks.now_ns(), self._clocks.unix
        self._began_ns = now_ns if began is None else now_ns - round((unix(now_ns) - began) * 1e9)
        self._line(
            {
                "began": unix(self._began_ns),
                "start_ns": max(0, self._began_ns),
                "pid": os.getpid(),
                "host": platform.node(),
            }
        )

    def add(
        self,
        step: int,
        window: str,
        start_ns: int,
        wall_ns: int,
        host_ns: dict[str, int],
        batch: tuple[int, int, int],
        num_times: dict[str, int] | None = None,
        num_compiles: int = 0,
        places: dict[str, str] | None = None,
    ) -> None:
        """Add a step that has ended."""
        end_ns, block = start_ns + wall_ns, self._block
        length_ns = self._length_ns(end_ns)
        if block is not None and (
            window != block.window
            or start_ns - block.end_ns > GAP_NS
            or end_ns - block.start_ns > 2 * length_ns
            or step != block.step + block.num_steps
        ):
            self._end_block(block)
            block = None
        if block is None:
            block = self._block = _Block(step, window, start_ns)
        self.last_step, self.is_free = step, window == windows.FREE
        block.end_ns = end_ns
        if block.num_steps % block.stride == 0:
            block.times.append(wall_ns)
            if len(block.times) > MOST_TIMES:
                block.times, block.stride = block.times[::2], block.stride * 2
        block.num_steps += 1
        block.wall_ns += wall_ns
        if wall_ns > block.max_ns:
            block.max_ns, block.max_step = wall_ns, step
        sums = block.host_ns
        for name, ns in host_ns.items():
            sums[name] = sums.get(name, 0) + ns
        block.num_tokens += batch[0]
        block.num_samples += batch[1]
        while self.losses and self.losses[0][0] <= end_ns:
            block.losses.append((step, self.losses.popleft()[1]))
        if not num_times and not num_compiles and window in _UNDISTURBED:
            self._recent.append((end_ns, wall_ns))
        if num_times or num_compiles or wall_ns > LONG_NS:
            block.num_compiles += num_compiles
            for name, num in (num_times or {}).items():
                block.num_times[name] = block.num_times.get(name, 0) + num
            self._look(block, step, start_ns, wall_ns, host_ns, num_times or {}, num_compiles, places or {})
        # Where a block can end with the times of that moment, it does; of a long step, they come right after it.
        if self._core_times is not None:
            length_ns = max(length_ns + LONGEST_WAIT_NS, wall_ns + 1)
        if end_ns - block.start_ns >= length_ns:
            self._end_block(block)

    def core_times(self, now_ns: int, on_ns: int, waited_ns: int, at_border: bool = False) -> None:
        """Note how long the thread that trains has run and waited, after its last step; a block may end with it, and
        does `at_border`, where a window ends."""
        block, earlier = self._block, self._core_times
        is_quiet = block is not None and block.window in _UNDISTURBED
        if earlier is None or (at_border and not is_quiet):
            self._core_times = now_ns, on_ns, waited_ns
        elif block is not None and (at_border or block.end_ns - block.start_ns >= self._length_ns(block.end_ns)):
            passed_ns = max(1, now_ns - earlier[0])
            ns = {"core_share": on_ns - earlier[1], "core_wait_share": waited_ns - earlier[2]}
            self._core_times = now_ns, on_ns, waited_ns
            self._end_block(block, {name: round(min(1.0, max(0.0, of / passed_ns)), 5) for name, of in ns.items()})

    def _length_ns(self, end_ns: int) -> int:
        """Return how long a block should be that ends now."""
        return min(max((end_ns - self._began_ns) // BLOCKS_PER_RUN, SHORTEST_NS), LONGEST_NS)

    def recent_ns(self, within_ns: int, least: int) -> list[int]:
        """Return the times of the last undisturbed steps: those that ended `within_ns`, or the last few."""
        recent = list(self._recent)
        found = [ns for end_ns, ns in recent if end_ns >= recent[-1][0] - within_ns]
        return found if len(found) >= least else [ns for _, ns in recent[-least:]]

    def pace_ns(self, within_ns: int) -> int | None:
        """Return the time per step now: the mean of the steps that ended `within_ns`, or the last one if it is long.

        Not the median of several: where steps have just become slower, most of them are those from before.
        """
        recent = list(self._recent)
        found = [ns for end_ns, ns in recent if end_ns > recent[-1][0] - within_ns]
        return round(sum(found) / len(found)) if found else None

    def usual_ns(self, without_ns: int, least: int) -> int | None:
        """Return the median step of the run, without its end; None if there are too few blocks."""
        last_ns = self._recent[-1][0] if self._recent else 0
        found = sorted(ns for end_ns, ns in zip(self._ends, self._medians) if end_ns < last_ns - without_ns)
        return found[len(found) // 2] if len(found) >= least else None

    def join(self, num_joined: int) -> None:
        """Count the last steps as one."""
        if self._block is not None:
            self._block.num_steps = max(1, self._block.num_steps - num_joined + 1)
        self.last_step -= num_joined - 1

    def restart(self, reason: str) -> None:
        """Void the steps so far."""
        self._block = self._typical_ns = None
        self.losses.clear()
        self._recent.clear()
        self._ends, self._medians = array("q"), array("q")
        self._line({"restart": reason})

    def event(self, kind: str, step: int, start_ns: int, ns: int = 0, **details: Any) -> None:
        """Write an event, unless there were very many of its kind."""
        self._num_events[kind] += 1
        if self._num_events[kind] <= MOST_EVENTS:
            unix = self._clocks.unix(start_ns if kind == "suspended" else start_ns + ns)
            known = {name: value for name, value in details.items() if value is not None}
            self._line({"event": kind, "step": step, "start_ns": start_ns, "t": unix, "ns": ns, **known})

    def after_last_step(self, start_ns: int, host_ns: dict[str, int], num_times: dict[str, int]) -> None:
        """Write what the loop did after its last step, however short: no block has it."""
        for kind, ns in host_ns.items():
            self.event(kind, self.last_step + 1, start_ns, ns, num_times=num_times.get(kind, 1))
            start_ns += ns

    def tick(self) -> None:
        """Write a block that is due although no step ends, look at the clocks, and pass the lines on."""
        now_ns = self._clocks.now_ns()
        for kind, ns, seconds in self._clocks.changes():
            self.event(kind, self.last_step, now_ns, ns, seconds=seconds)
        block = self._block
        if block is not None and now_ns - block.start_ns > LONGEST_NS:
            self._end_block(block)
        self._pass_on()

    def close(self, status: str) -> None:
        if self._block is not None:
            self._end_block(self._block)
        left_out = {kind: num - MOST_EVENTS for kind, num in self._num_events.items() if num > MOST_EVENTS}
        self.event("end", self.last_step, self._clocks.now_ns(), status=status, num_left_out=left_out or None)
        self._pass_on()
        if self._file is not None:
            self._writer.put(self._file.close)

    def _look(
        self,
        block: _Block,
        step: int,
        start_ns: int,
        wall_ns: int,
        host_ns: dict[str, int],
        num_times: dict[str, int],
        num_compiles: int,
        places: dict[str, str],
    ) -> None:
        """Write what was long in a step."""
        typical_ns = self._typical_ns or (block.median_ns() if len(block.times) > 3 else None)
        long_ns = min(LONG_NS, max(LONG_STEPS * typical_ns, LEAST_LONG_NS)) if typical_ns else LONG_NS
        rest_ns = wall_ns
        for name in num_times:
            ns = host_ns.get(name, 0)
            rest_ns -= ns
            if ns >= long_ns:
                self.event(name, step, start_ns, ns, place=places.get(name))
        excess_ns = rest_ns - (typical_ns or 0)
        if num_compiles and excess_ns >= long_ns:
            self.event("compile", step, start_ns, excess_ns, num_compiles=num_compiles)
        is_stall = typical_ns and excess_ns >= LONG_NS and rest_ns >= LONG_STEPS * typical_ns
        if is_stall and not num_compiles and block.window in _UNDISTURBED:
            longest = max((name for name in host_ns if name not in _BETWEEN), key=host_ns.__getitem__)
            self.event("stall", step, start_ns, excess_ns, phase=longest)

    def _end_block(self, block: _Block, shares: dict[str, float] | None = None) -> None:
        self._block = None
        host_ns = block.host_ns
        if (rest_ns := block.wall_ns - sum(host_ns.values())) > 0:
            host_ns[UNATTRIBUTED] = host_ns.get(UNATTRIBUTED, 0) + rest_ns
        median_ns = block.median_ns()
        if block.window in _UNDISTURBED:
            self._typical_ns = median_ns
            self._ends.append(block.end_ns)
            self._medians.append(median_ns)
            if len(self._medians) > MOST_TIMES:
                self._ends, self._medians = self._ends[::2], self._medians[::2]
        line: dict[str, Any] = {
            **{"step": block.step, "num_steps": block.num_steps, "window": block.window, "start_ns": block.start_ns},
            **{"t": self._clocks.unix(block.end_ns), "wall_ns": sum(host_ns.values()), "median_ns": median_ns},
            **{"max_ns": block.max_ns, "max_step": block.max_step, "host_ns": host_ns},
        }
        for name in ("num_times", "num_tokens", "num_samples", "num_compiles"):
            if value := getattr(block, name):
                line[name] = value
        if block.losses:
            line["loss_step"], loss = block.losses[-1]
            step, largest = max(block.losses, key=lambda each: (each[1] != each[1], each[1]))
            line["loss"] = _number(loss)
            if step != line["loss_step"]:
                line |= {"max_loss": _number(largest), "max_loss_step": step}
        line |= self._read() | (shares or {})
        self.last_block = line
        self._line(line)

    def _line(self, line: dict[str, Any]) -> None:
        self._lines.append(json.dumps(line, separators=(",", ":")))

    def _pass_on(self) -> None:
        if self.last_step < 0:
            return
        if is_new := self._file is None:
            self._file = files.LineFile(self._path)
        num_dropped = self._file.num_dropped
        if num_dropped > self._num_told:
            self.event("dropped", self.last_step, self._clocks.now_ns(), num_lines=num_dropped - self._num_told)
            self._num_told = num_dropped + 1  # this line too, if it cannot be written either
        lines, self._lines = self._lines, []
        if is_new and _is_cut_off(self._path):
            lines.insert(0, "")
        self._writer.append(self._file, lines)


def _is_cut_off(path: Path) -> bool:
    """Return whether the history of an earlier process ends inside a line, because it was killed."""
    with path.open("rb") as stream:
        return bool(stream.seek(0, 2)) and stream.seek(-1, 2) >= 0 and stream.read(1) != b"\n"


def _number(loss: float) -> float | str:
    return float(f"{loss:.6g}") if abs(loss) < float("inf") else str(loss)

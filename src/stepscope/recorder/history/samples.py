"""Writes samples.jsonl: a line when a step ends, and a second one when its device times and its loss are known."""

from __future__ import annotations

import _thread
import json
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

from stepscope.recorder import files, windows
from stepscope.recorder.clock import Clock, TimedStep, read_device_ns
from stepscope.recorder.history.history import History
from stepscope.recorder.history.writer import Writer
from stepscope.recorder.live.tally import Tally
from stepscope.recorder.probes import Probes
from stepscope.recorder.step_facts import StepFacts
from stepscope.recorder.usual.events import UsualStep

MOST_QUEUED = 2_000  # steps, in case the thread that digests them waits for a disk
MOST_SECONDS = 2.0


class Samples:
    """The steps of one recording. They are queued, digested into lines and sums later, and then written.

    In free running (`waits`), the writer's thread digests them. Before, it is done at once, between two steps.
    """

    def __init__(self, folder: Path, writer: Writer, history: History | None = None) -> None:
        self.waits = False
        self.tally = Tally()
        self._writer, self._history = writer, history
        self._file = files.SampleFile(folder / files.SAMPLES_FILE)
        self._pending: list[TimedStep] = []  # steps whose device times have not been read yet
        self._queue: deque[tuple[Callable[..., str | list[str] | None], tuple[Any, ...]]] = deque()
        self._num_queued = 0  # steps
        self._digests = _thread.allocate_lock()
        if history is not None:
            writer.ticks.append(self.digest)

    @property
    def num_dropped(self) -> int:
        return self._file.num_dropped

    def add(
        self,
        step: TimedStep,
        window: str,
        facts: StepFacts,
        num_tokens: int | None,
        num_compiles: int,
        places: dict[str, str] | None = None,
    ) -> None:
        """Write a step. `num_tokens` are those that the user gave, `places` lines of the script for what it did."""
        self._put(self._step, step, window, facts.batch, facts.num_skipped, num_tokens, num_compiles, places)
        if window == windows.TRIGGERED:
            return  # the recording of that window has the rest
        step.loss, step.losses = facts.loss, facts.losses
        if step.first_event is not None or step.loss is not None:
            self._pending.append(step)

    def add_usual(self, first: int, num_steps: int, steps: Iterator[UsualStep], num_tokens: int | None) -> None:
        """Write steps of free running in which nothing but training happened. Digesting them goes through `steps`."""
        self._num_queued += num_steps
        self._queue.append((self._usual, (first, steps, num_tokens)))

    def add_aside(self, which: str, step: TimedStep) -> None:
        """Write what the loop did before its first step or after its last one."""
        times = {"start_ns": step.start_ns, "wall_ns": step.wall_ns, "host_ns": step.host_ns}
        self._put(self._aside, which, step.host_ns, {**times, "num_times": step.num_times})

    def add_event(self, kind: str, step: int, start_ns: int, ns: int, details: dict[str, Any]) -> None:
        """Write an event of the history."""
        self._put(self._event, kind, step, start_ns, ns, details)

    def add_core_times(self, now_ns: int, on_ns: int, waited_ns: int, at_border: bool) -> None:
        """Note how long the thread that trains has run on a core and waited for one, after the steps so far."""
        if self._history is not None:
            self._queue.append((self._history.core_times, (now_ns, on_ns, waited_ns, at_border)))

    def restart(self, reason: str) -> None:
        """Void all steps so far."""
        self._pending.clear()
        self._put(self._restart, reason)

    def join(self, first: int, num_joined: int) -> None:
        """Join the last steps, from `first` on, into one."""
        self._pending = [step for step in self._pending if step.index < first]
        self._put(self._join, num_joined)

    def read_pending(self, probes: Probes, clock: Clock) -> None:
        """Write the device times and losses of the pending steps. Waits for the GPU."""
        probes.synchronize()
        for step in self._pending:
            line: dict[str, Any] = {"step": step.index}
            device_ns = read_device_ns(step)
            if device_ns is not None:
                line["device_ns"] = device_ns
                if probes.pace is not None:
                    probes.pace.add_device(step.index, device_ns)
                clock.recycle(step)
            if step.loss is not None:
                probes.guard("reading a loss", partial(_read_loss, step, line))
            self._queue.append((json.dumps, (line,)))
        self._pending.clear()
        self.flush()

    def flush(self) -> None:
        """Digest all steps, and let them be written."""
        self.digest()
        self._writer.settle()

    def close(self) -> None:
        self.digest(waits=True)
        self._writer.put(self._file.close)

    def keep_up(self) -> None:
        """Digest the steps here if the thread that should has not for long."""
        if self._num_queued > MOST_QUEUED or not self._writer.has_thread:
            self.digest()

    def digest(self, waits: bool = False) -> None:
        """Turn the queued steps into lines and sums, unless another thread does; `waits` until it has."""
        queue: Any = self._queue
        lines: list[str] = []
        # A garbage collection in here can end a step, and come here again.
        if not self._digests.acquire(blocking=waits, timeout=MOST_SECONDS if waits else -1):
            return
        try:
            self._num_queued = 0
            while queue:
                digested, values = queue.popleft()
                found = digested(*values)
                lines += [found] if isinstance(found, str) else found or ()
            self._writer.append(self._file, lines)
        finally:
            self._digests.release()

    def _put(self, digested: Callable[..., str | None], *values: Any) -> None:
        self._num_queued += 1
        self._queue.append((digested, values))
        if not self.waits:
            self.digest()

    # --- the lines of each ----------------------------------------------------------------------

    def _usual(self, first: int, steps: Iterator[UsualStep], num_tokens: int | None) -> list[str]:
        lines = []
        for index, (start_ns, wall_ns, host_ns, seen) in enumerate(steps, first):
            batch = (num_tokens, *seen[1:]) if num_tokens else seen
            self.tally.add(windows.FREE, wall_ns, host_ns, batch)
            if self._history is not None:
                self._history.add(index, windows.FREE, start_ns, wall_ns, host_ns, batch)
            lines.append(_line(index, windows.FREE, start_ns, wall_ns, host_ns, batch))
            if self.waits:
                sleep(0)  # the thread that trains may wait for Python's lock
        return lines

    def _step(
        self,
        step: TimedStep,
        window: str,
        seen: tuple[int, int, int],
        num_skipped: int,
        num_tokens: int | None,
        num_compiles: int,
        places: dict[str, str] | None,
    ) -> str:
        batch = num_tokens or seen[0], *seen[1:]
        times = step.index, window, step.start_ns, step.wall_ns, step.host_ns, batch
        self.tally.add(window, step.wall_ns, step.host_ns, batch, num_compiles)
        if self._history is not None:
            self._history.add(*times, step.num_times, num_compiles, places)
        num_times = f'"num_times": {json.dumps(step.num_times)}, ' if step.num_times else ""
        return _line(*times, num_times, num_skipped, num_compiles)

    def _aside(self, which: str, host_ns: dict[str, int], line: dict[str, Any]) -> str:
        self.tally.add_aside(which, host_ns)
        if self._history is not None and which == "tail":
            self._history.after_last_step(line["start_ns"], host_ns, line["num_times"])
        return json.dumps({which: line})

    def _event(self, kind: str, step: int, start_ns: int, ns: int, details: dict[str, Any]) -> None:
        if self._history is not None:
            self._history.event(kind, step, start_ns, ns, **details)

    def _restart(self, reason: str) -> str:
        self.tally.restart()
        if self._history is not None:
            self._history.restart(reason)
        return json.dumps({"restart": reason})

    def _join(self, num_joined: int) -> str:
        self.tally.join(num_joined)
        if self._history is not None:
            self._history.join(num_joined)
        return json.dumps({"joined": num_joined})


def _line(
    index: int,
    window: str,
    start_ns: int,
    wall_ns: int,
    host_ns: dict[str, int],
    batch: tuple[int, int, int],
    times: str = "",
    num_skipped: int = 0,
    num_compiles: int = 0,
) -> str:
    # Formatted by hand: json.dumps takes four times as long.
    phases = ", ".join([f'"{name}": {ns}' for name, ns in host_ns.items()])
    num_tokens, num_samples, num_micro_batches = batch
    return (
        f'{{"step": {index}, "window": "{window}", "start_ns": {start_ns}, '
        f'"wall_ns": {wall_ns}, "host_ns": {{{phases}}}, {times}'
        f'"num_tokens": {num_tokens or "null"}, "num_samples": {num_samples or "null"}, '
        f'"num_micro_batches": {num_micro_batches}, "num_skipped": {num_skipped}, '
        f'"num_compiles": {num_compiles}}}'
    )


def _read_loss(step: TimedStep, line: dict[str, Any]) -> None:
    line["loss"] = _number(float(step.loss))
    if len(step.losses) > 1 and None not in step.losses:
        line["loss_sum"] = _number(sum(map(float, step.losses)))


def _number(loss: float) -> float | str:
    return loss if abs(loss) < float("inf") else str(loss)

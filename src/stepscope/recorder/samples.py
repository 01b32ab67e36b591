"""Writes samples.jsonl: a line when a step ends, and a second one when its device times and its loss are known."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.recorder import files, windows
from stepscope.recorder.clock import Clock, TimedStep, read_device_ns
from stepscope.recorder.live.tally import Tally
from stepscope.recorder.probes import Probes
from stepscope.recorder.step_facts import StepFacts

FLUSH_NS = 250_000_000

_Step = tuple[TimedStep, str, StepFacts, int | None, int]  # a line that is formatted when it is written


class Samples:
    """The steps of one recording as they are written. `waits` gathers the lines of a quarter of a second."""

    def __init__(self, folder: Path) -> None:
        self.waits = False
        self.tally = Tally()
        self._file = files.LineFile(folder / files.SAMPLES_FILE)
        self._pending: list[TimedStep] = []  # steps whose device times have not been read yet
        self._lines: list[str | _Step] = []
        self._flushed_ns = 0

    @property
    def num_dropped(self) -> int:
        return self._file.num_dropped

    def add(self, step: TimedStep, window: str, facts: StepFacts, num_tokens: int | None, num_compiles: int) -> None:
        """Write a step. `num_tokens` are those that the user gave."""
        self._append((step, window, facts, num_tokens, num_compiles))
        batch = facts.batch
        self.tally.add(window, step.wall_ns, step.host_ns, (num_tokens or batch[0], *batch[1:]), num_compiles)
        step.loss = facts.loss
        if step.first_event is not None or step.loss is not None:
            self._pending.append(step)

    def add_usual(
        self, index: int, start_ns: int, end_ns: int, host_ns: dict[str, int], batch: tuple[int, int, int]
    ) -> None:
        """Write a step of free running in which nothing but training happened."""
        self._lines.append(_line(index, windows.FREE, start_ns, end_ns - start_ns, host_ns, batch))
        self.tally.add(windows.FREE, end_ns - start_ns, host_ns, batch)

    def add_aside(self, which: str, step: TimedStep) -> None:
        """Write what the loop did before its first step or after its last one."""
        times = {"start_ns": step.start_ns, "wall_ns": step.wall_ns, "host_ns": step.host_ns}
        self._append(json.dumps({which: {**times, "num_times": step.num_times}}))
        self.tally.add_aside(which, step.host_ns)

    def restart(self, reason: str) -> None:
        """Void all steps so far."""
        self._pending.clear()
        self.tally.restart()
        self._append(json.dumps({"restart": reason}))

    def join(self, first: int, num_joined: int) -> None:
        """Join the last steps, from `first` on, into one."""
        self._pending = [step for step in self._pending if step.index < first]
        self.tally.join(num_joined)
        self._append(json.dumps({"joined": num_joined}))

    def read_pending(self, probes: Probes, clock: Clock) -> None:
        """Write the device times and losses of the pending steps. Waits for the GPU."""
        probes.synchronize()
        for step in self._pending:
            line: dict[str, Any] = {"step": step.index}
            device_ns = read_device_ns(step)
            if device_ns is not None:
                line["device_ns"] = device_ns
                clock.recycle(step)
            if step.loss is not None:
                probes.guard("reading a loss", partial(_read_loss, step, line))
            self._append(json.dumps(line))
        self._pending.clear()
        self._flush()

    def close(self) -> None:
        self._flush()
        self._file.close()

    def _append(self, line: str | _Step) -> None:
        self._lines.append(line)
        if not self.waits:
            self._flush()

    def flush_if_due(self) -> None:
        """Write the lines of free running if the last were written a while ago."""
        now = time.perf_counter_ns()
        if now - self._flushed_ns > FLUSH_NS:
            self._flushed_ns = now
            self._flush()

    def _flush(self) -> None:
        if self._lines:
            lines = [line if isinstance(line, str) else _step_line(*line) for line in self._lines]
            self._file.append("\n".join(lines), len(lines))
            self._lines.clear()


def _step_line(step: TimedStep, window: str, facts: StepFacts, num_tokens: int | None, num_compiles: int) -> str:
    seen_tokens, num_samples, num_micro_batches = facts.batch
    times = f'"num_times": {json.dumps(step.num_times)}, ' if step.num_times else ""
    batch = num_tokens or seen_tokens, num_samples, num_micro_batches
    others = facts.num_skipped, num_compiles
    return _line(step.index, window, step.start_ns, step.wall_ns, step.host_ns, batch, times, *others)


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
    # Formatted by hand: this is a cost to the script, and json.dumps takes four times as long.
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
    loss = float(step.loss)
    line["loss"] = loss if abs(loss) < float("inf") else str(loss)

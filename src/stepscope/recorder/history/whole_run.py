"""The whole run of one process: its history, its writer, and windows that are triggered while it goes on."""

from __future__ import annotations

import gc
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stepscope.recorder import files, wall
from stepscope.recorder.clock import TimedStep
from stepscope.recorder.history import requests
from stepscope.recorder.history.clocks import process_began
from stepscope.recorder.history.control import Control
from stepscope.recorder.history.core_wait import CoreTimes, OtherProcesses, available_bytes
from stepscope.recorder.history.history import History
from stepscope.recorder.history.losses import LossSampler
from stepscope.recorder.history.requests import Request
from stepscope.recorder.history.samples import Samples
from stepscope.recorder.history.silence import Silence
from stepscope.recorder.history.triggered import TriggeredWindow
from stepscope.recorder.history.writer import Writer
from stepscope.recorder.probes import Probes
from stepscope.recorder.processes.rank import rank_and_world_size
from stepscope.recorder.run_facts import now
from stepscope.recorder.windows import CLEAN, MOST_FREE_STEPS, TRIGGERED, Windows


class WholeRun:
    """Everything of a session that goes on after its windows."""

    def __init__(
        self, folder: Path, probes: Probes, is_script: bool, when: tuple[str, ...] = (), limit: int = 3
    ) -> None:
        self._folder, self._probes, self._when, self._limit = folder, probes, when, limit
        self._control: Control | None = None  # from the first step on
        self.triggered: TriggeredWindow | None = None  # the one that is open
        self._num_collections: int | None = None
        self._total_bytes: int | None = None
        self._core_times, self._others = CoreTimes(), OtherProcesses()
        self.writer = Writer()
        self.history = History(folder, self.writer, process_began() if is_script else None, self._read)
        self.samples = Samples(folder, self.writer, self.history)
        self.losses = LossSampler(self.history.losses)
        self.writer.ticks.append(self.history.tick)
        self.writer.stopped = lambda start_ns, ns: self.history.event("stopped", self.history.last_step, start_ns, ns)

    @property
    def timed(self) -> Samples:
        """The steps of the open window."""
        return self.samples if self.triggered is None else self.triggered.samples

    @property
    def first_step(self) -> int:
        """The first step of the recording that the probes work for."""
        return 0 if self.triggered is None else self.triggered.first_step

    def windows(self, of_run: Windows) -> Windows | TriggeredWindow:
        """Return the windows that are being taken: the run's own, or the triggered one."""
        return of_run if self.triggered is None else self.triggered

    def add(self, step: TimedStep, window: str, *facts: Any) -> None:
        """Write a step that has ended."""
        if self.triggered is not None:
            self.triggered.samples.add(step, window, *facts)
            window = TRIGGERED
        self.samples.add(step, window, *facts)
        if window == CLEAN and self._probes.pace is not None:
            self._probes.pace.add(step.index, step.host_ns)
        if self._control is None:
            self._begin()

    def settle(self, is_free: bool) -> None:
        """Wait until the steps so far are written, so that a kill loses none: not in free running."""
        if not is_free:
            self.writer.settle()

    def write_recording(self, text: str) -> None:
        """Write the recording.json of the run, or of the triggered window."""
        folder = self._folder if self.triggered is None else self.triggered.folder
        self.writer.put(partial(files.write_text, folder / files.RECORDING_FILE, text))
        self.writer.wake()

    def window_begins(self, step: int, is_free: bool, num_first_steps: int) -> bool:
        """Answer requests, and return whether a window begins with this step."""
        control = self._control
        if control is None or (control.armed_step is None and not control.has_news):
            return False
        control.look(step, step if is_free or self.triggered is not None else num_first_steps)
        if is_free and (request := control.take(step)) is not None:
            self.triggered = self._window(request, step)
            return self.triggered is not None
        return False

    def most_steps(self, step: int) -> int:
        """Return how many steps may pass before the next look at requests."""
        armed = None if self._control is None else self._control.armed_step
        return MOST_FREE_STEPS if armed is None else max(1, min(MOST_FREE_STEPS, armed - step))

    def _begin(self) -> None:
        """Start the thread and listen to requests."""
        if self._control is None:
            self._run, self._rank = files.run_and_rank(self._folder)
            num_ranks = rank_and_world_size()[1]
            self._control = Control(self._run, self._rank, self.history, num_ranks, self._when, self._limit)
            self.writer.ticks += [self._tick_control, Silence(self._folder, self._run, self.history).tick]
            self.writer.start()

    def _tick_control(self) -> None:
        try:
            if self._control is not None:
                self._control.tick()
        except OSError as error:
            wall.tell_once(f"requests for windows cannot be read or answered: {error}")

    def _window(self, request: Request, step: int) -> TriggeredWindow | None:
        folder = self._run / request.folder
        folder = folder if self._rank == files.FIRST_RANK else folder / self._rank
        try:
            return TriggeredWindow(request, folder, step, self._probes, self.writer)
        except OSError as error:
            self._answer(request, requests.REFUSED, step, reason=f"cannot write {folder}: {error.strerror or error}")
            return None

    def end_window(self, step: int, facts: dict[str, Any]) -> None:
        """Write the end of the triggered window, and let the probes work for the run again."""
        window, self.triggered = self.triggered, None
        if window is None:
            return
        window.release()
        if self._probes.counters is not None:
            self._probes.counters.copy_to(None)
        window.samples.close()
        text = files.json_text({**facts, "finished_at": now()})
        self.writer.put(partial(files.write_text, window.folder / files.RECORDING_FILE, text))
        num_steps, ns = step - window.first_step, time.perf_counter_ns() - window.start_ns
        details = {"folder": window.request.folder, "reason": window.request.reason, "num_steps": num_steps}
        self.samples.add_event("window", window.first_step, window.start_ns, ns, details)
        is_whole = facts["status"] == files.STATUS_FINISHED
        # Written after the files of the window, so that its reader finds them.
        state, why = (requests.DONE, {}) if is_whole else (requests.REFUSED, {"reason": "the run ended inside it"})
        self.writer.put(partial(self._answer, window.request, state, step, **why))
        self.writer.wake()

    def _answer(self, request: Request, state: str, step: int, **details: Any) -> None:
        if self._control is not None:
            self._control.answer(request.number, state, step, **details)

    def look(self, now_ns: int) -> None:
        """Read what only the thread that trains can, at the end of a step of free running."""
        self.losses.look(now_ns)
        self._read_core_times(now_ns)

    def border(self) -> None:
        """Note where a window ends, for what is counted from reading to reading."""
        self._read_core_times(time.perf_counter_ns(), at_border=True)

    def _read_core_times(self, now_ns: int, at_border: bool = False) -> None:
        if (times := self._core_times.read(now_ns, at_border)) is not None:
            self.samples.add_core_times(now_ns, *times, at_border)

    def free_running_begins(self) -> None:
        """Look up what the writer's thread must not ask CUDA for."""
        if (device := self._probes.device) is not None:
            self._total_bytes = torch.cuda.get_device_properties(device).total_memory

    def close(self, status: str) -> None:
        """Write the end of the history."""
        self._read_core_times(time.perf_counter_ns(), at_border=True)
        self.losses.read()
        self.samples.close()
        self.history.close(status)
        if self._control is not None:
            self.writer.put(partial(self._control.close, status))
        self.writer.close()

    def _read(self) -> dict[str, Any]:
        """Return memory, garbage collections and the GPU's counters, for a block. Calls nothing of CUDA."""
        found: dict[str, Any] = {}
        num_collections = sum(generation["collections"] for generation in gc.get_stats())
        if self._num_collections is not None and num_collections > self._num_collections:
            found["num_collections"] = num_collections - self._num_collections
        self._num_collections = num_collections
        if (device := self._probes.device) is not None:
            stats = torch._C._cuda_memoryStats(device)  # the counters of the allocator
            found["allocated_bytes"] = stats["allocated_bytes"]["all"]["current"]
            found["reserved_bytes"] = stats["reserved_bytes"]["all"]["current"]
            found["peak_bytes"] = stats["allocated_bytes"]["all"]["peak"]
            if self._total_bytes is not None:
                found["total_bytes"] = self._total_bytes
        machine = {"resident_bytes": resident_bytes(), "available_bytes": available_bytes()}
        found |= {name: value for name, value in machine.items() if value is not None}
        if (share := self._others.share()) is not None:
            found["others_share"] = share
        if self._probes.counters is not None and (gpu := self._probes.counters.take_sums()):
            found["gpu"] = gpu
        return found


def resident_bytes() -> int | None:
    """Return the memory of this process in bytes; None where that is not known."""
    try:
        with Path("/proc/self/statm").open("rb") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None

"""One active recording: runs the windows over a loop's steps and writes each step as it ends."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from stepscope.recorder import current, files, hooks, windows
from stepscope.recorder.clock import Clock, TimedStep, read_device_ns
from stepscope.recorder.loop import Loop, StepFacts
from stepscope.recorder.patches import Handle, remove_all
from stepscope.recorder.probes import Probes
from stepscope.recorder.steps import EXPLICIT, FORWARD, OPTIMIZER, Boundary
from stepscope.recorder.windows import Windows

PROGRESS_INTERVAL_NS = 10_000_000_000


def _leave_in_child() -> None:
    # A forked worker is not the training process. Its copies of the hooks stay installed and do nothing.
    if current.session is not None:
        current.session.stop_listening()
        current.session = None


os.register_at_fork(after_in_child=_leave_in_child)


class WindowsDone(SystemExit):
    """Ends the script after the last window, for `--exit-after`. The exit code is 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Session:
    """Records one process: call `start()`, let the hooks work, then call `close()`."""

    def __init__(
        self,
        folder: Path,
        *,
        windows: Windows,
        facts: dict[str, Any],
        model: nn.Module | None = None,
        optimizer: Any = None,
        tokens_per_step: int | None = None,
        exit_after: bool = False,
        memory_in_full: bool = False,
        is_script: bool = False,
        on_roots: Callable[[list[nn.Module]], None] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if model is None and windows.warmup < 2:
            raise ValueError("warmup must be at least 2: the first two steps are used to find the model")
        self.folder = folder
        self.is_script = is_script
        self._windows = windows
        self._model = model
        self._tokens_per_step = tokens_per_step
        self._exit_after = exit_after
        self._on_roots = on_roots
        self._progress_line = progress or (lambda _line: None)

        self._pid = os.getpid()
        self._handles: list[Handle] = []
        self._phase_handles: list[Handle] = []
        self._trace_handles: list[Handle] = []
        self._clock = Clock()
        self._probes = Probes(folder, self._clock, facts, memory_in_full)
        self._loop = Loop(self._clock, self._step_ended)
        self.explicit_step = self._loop.explicit_step
        self.phase = self._loop.phase
        self.stop_listening = self._loop.stop_listening
        self._roots = self._loop.roots
        self._samples = files.LineFile(folder / files.SAMPLES_FILE)
        self._pending: list[TimedStep] = []  # steps whose device times have not been read yet
        self._step = 0
        self._window = self._windows.at(0)
        self._free_ns = 0
        self._free_source: str | None = None
        self._last: tuple[TimedStep, StepFacts] | None = None
        self._num_compiles = 0
        self._last_progress_ns = time.perf_counter_ns()
        if optimizer is not None:
            self._loop.optimizers[id(optimizer)] = optimizer

    def start(self) -> None:
        """Install the hooks and write the first, still empty, recording."""
        self._probes.compiler.start()
        self._probes.guard("starting the allocator history", self._probes.memory.await_cuda)
        self.resume()
        if self._model is not None:
            self._roots.add(self._model)
            self._model = None
        else:
            self._roots.await_first_call()
            self._probes.compiler.on_start = self._roots.stop_awaiting  # keep it out of compiled functions
        self._write_recording(files.STATUS_INTERRUPTED)

    def resume(self) -> None:
        """Install the hooks."""
        if current.session is self:
            return
        self._loop.listen()
        current.session = self
        self._handles = self._install_boundaries()
        if not self._loop.is_free:
            self._phase_handles = hooks.install_phases(self._loop, self._probes)
        self._roots.attach()

    def _install_boundaries(self) -> list[Handle]:
        loop, finder = self._loop, self._loop.finder
        if loop.is_free and finder.source == EXPLICIT:
            return []
        if loop.is_free and finder.source == OPTIMIZER and finder.num_sources == 1 and loop.is_plain:
            return [hooks.install_free_step(loop, self._free_step)]
        return hooks.install_boundaries(loop)

    def suspend(self) -> None:
        """Remove every hook. The open step is not counted."""
        self._loop.stop_listening()
        current.session = None
        self._roots.detach()
        remove_all(self._trace_handles)
        remove_all(self._phase_handles)
        remove_all(self._handles)

    def close(self, status: str, error: BaseException | None = None, **facts: Any) -> None:
        """Remove every hook and write the recording. `error` is the exception that ended the script."""
        if os.getpid() != self._pid:
            return
        probes = self._probes
        probes.guard("writing the out-of-memory snapshot", lambda: probes.memory.script_failed(error))
        probes.guard("ending the window", probes.stop_windows)
        self.suspend()
        probes.guard("stopping the probes", probes.stop_all)
        probes.guard("reading device times", self._read_pending)
        probes.guard(
            "reading the memory counters",
            lambda: probes.read_facts(self._roots.modules, self._loop.optimizers.values()),
        )
        self._roots.forget()
        self._samples.close()
        probes.facts.update(facts)
        probes.guard("writing the recording", lambda: self._write_recording(status))

    def _step_ended(self, boundary: Boundary) -> None:
        if boundary is Boundary.NONE:
            return
        if self._loop.is_free:
            if boundary is Boundary.RESTART and self._loop.finder.source != self._free_source:
                self._leave_free_running()
            else:
                self._free_step()
            return
        step = self._clock.end_step(self._step)
        if boundary is Boundary.RESTART:
            step = self._restart(step)
        finished = self._window
        self._write_step(step)
        self._last = (step, self._loop.facts) if self._step == 0 else None  # keeping more would keep losses alive
        self._probes.memory.step_ended()
        self._step += 1
        self._window = self._windows.at(self._step)
        if self._window != finished or self._step <= 2:
            title = windows.TITLES[self._window]
            self._probes.guard(f"entering the {title} window", lambda: self._enter(finished))
        elif self._window == windows.TRACE and self._probes.trace is not None:
            self._probes.guard("tracing", self._probes.trace.next_step)
        self._progress(step.wall_ns, entered=self._window != finished)
        self._loop.facts = StepFacts()
        self._num_compiles = self._probes.compiler.num_compiles
        if self._window == windows.FREE:
            self._free_ns = time.perf_counter_ns()
            if self._exit_after:
                raise WindowsDone
        else:
            self._clock.begin_step()  # the recorder's own work since the step ended belongs to no step

    def _restart(self, step: TimedStep) -> TimedStep:
        """Discard all steps so far and return the step that ends now as the first one."""
        self._probes.guard("restarting", self._probes.stop_windows)
        remove_all(self._trace_handles)
        self._loop.observer = None
        self._pending.clear()
        if self._step == 1 and self._loop.finder.source == EXPLICIT and self._last is not None:
            # The optimizer ended the first step before stepscope.step() was called: both halves are one step.
            before, facts = self._last
            facts.given_tokens = self._loop.facts.given_tokens
            if self._loop.facts.loss is not None:
                facts.loss = self._loop.facts.loss
            self._loop.facts = facts
            step = before.joined(step)
        self._forget_steps()
        step.index = 0
        return step

    def _leave_free_running(self) -> None:
        """Start over: training began after a long evaluation whose steps had been counted."""
        self.suspend()
        self._loop.is_free = False
        self._forget_steps()
        self.resume()

    def _forget_steps(self) -> None:
        self._samples.append(json.dumps({"restart": f"steps are now ended by {self._loop.finder.source}"}))
        self._probes.forget_windows()
        self._step = 0
        self._window = self._windows.at(0)

    def _free_step(self) -> None:
        """Record a step outside every window: one clock reading and one line."""
        now = time.perf_counter_ns()
        if self._loop.is_open:
            wall_ns = now - self._free_ns
            self._samples.append(
                f'{{"step": {self._step}, "window": "free", "start_ns": {self._free_ns}, "wall_ns": {wall_ns}}}'
            )
            self._step += 1
            if now - self._last_progress_ns > PROGRESS_INTERVAL_NS:
                self._progress(wall_ns, entered=False)
        self._loop.is_open = True
        self._free_ns = now

    def _write_step(self, step: TimedStep) -> None:
        facts = self._loop.facts
        num_tokens, num_samples, num_micro_batches = facts.batch
        num_tokens = facts.given_tokens or self._tokens_per_step or num_tokens
        host_ns = ", ".join([f'"{name}": {ns}' for name, ns in step.host_ns.items()])
        line = (  # formatted by hand: this runs between two timed steps, and json.dumps takes four times as long
            f'{{"step": {step.index}, "window": "{self._window}", "start_ns": {step.start_ns}, '
            f'"wall_ns": {step.wall_ns}, "host_ns": {{{host_ns}}}, '
            f'"num_tokens": {num_tokens or "null"}, "num_samples": {num_samples or "null"}, '
            f'"num_micro_batches": {num_micro_batches}, "num_skipped": {facts.num_skipped}, '
            f'"num_compiles": {self._probes.compiler.num_compiles - self._num_compiles}}}'
        )
        self._samples.append(line)
        step.loss = facts.loss
        if step.first_event is not None or step.loss is not None:
            self._pending.append(step)

    def _read_pending(self) -> None:
        """Write the device times and losses of the pending steps. Waits for the GPU."""
        self._probes.synchronize()
        for step in self._pending:
            line: dict[str, Any] = {"step": step.index}
            device_ns = read_device_ns(step)
            if device_ns is not None:
                line["device_ns"] = device_ns
                self._clock.recycle(step)
            if step.loss is not None:
                self._probes.guard("reading a loss", partial(_read_loss, step, line))
            self._samples.append(json.dumps(line))
        self._pending.clear()

    def _enter(self, finished: str) -> None:
        """Switch from the `finished` window to the current one. No step is timed while this runs."""
        probes, loop, roots = self._probes, self._loop, self._roots
        if self._step == 1:
            roots.search()
        elif self._step == 2:
            roots.keep_called()
            probes.use_gpu(roots.modules)
            if self._on_roots is not None:
                self._on_roots(roots.modules)
        if self._window == finished:
            return
        if finished == windows.MEMORY:  # before the recorder runs any op itself
            loop.observer = None
            probes.stop_memory()
        if finished == windows.WARMUP:
            probes.memory.warmup_ended()
        else:
            self._read_pending()
            probes.read_facts(roots.modules, loop.optimizers.values())
        if windows.CLEAN in (finished, self._window):
            probes.sample_energy()
        if finished == windows.TRACE:
            remove_all(self._trace_handles)
            probes.stop_trace(step_finished=True)
            probes.compare_precision("traced")
        if self._window == windows.TRACE_WARMUP:
            probes.prepare_trace(roots.modules)
        elif self._window == windows.TRACE and probes.trace is not None:
            self._trace_handles = hooks.surround_optimizers(loop, loop.optimizers.values())
            probes.trace.start(self._clock)
        elif self._window == windows.MEMORY:
            probes.start_memory(roots.modules, loop.optimizers.values())
            loop.observer = probes.memory.ledger
        elif self._window == windows.FREE:
            self._start_free_running()
        self._write_recording(files.STATUS_INTERRUPTED)

    def _start_free_running(self) -> None:
        """Keep only the hooks that detect the end of a step."""
        self._loop.is_free = True
        self._free_source = self._loop.finder.source
        self._loop.optimizers.clear()
        remove_all(self._phase_handles)
        if self._free_source != FORWARD:
            self._roots.forget()
        remove_all(self._handles)
        self._handles = self._install_boundaries()

    def _progress(self, wall_ns: int, entered: bool) -> None:
        is_new = entered and self._window not in (windows.WARMUP, windows.TRACE)
        now = time.perf_counter_ns()
        if not is_new and now - self._last_progress_ns < PROGRESS_INTERVAL_NS:
            return
        self._last_progress_ns = now
        title, seconds = windows.TITLES[self._window], wall_ns / 1e9
        if self._window != windows.FREE:
            num_left = self._windows.num_left(self._step)
            # A first step compiles, allocates and tunes: no later step takes as long.
            left = f"the first took {seconds:.1f} s" if self._step == 1 else f"about {num_left * seconds:.1f} s"
            self._progress_line(f"{title}: {num_left} step(s), {left}")
        elif is_new:
            after = "stopping the script" if self._exit_after else "the script continues (--exit-after would stop it)"
            self._progress_line(f"all windows done; {after}")
        else:
            self._progress_line(f"{title}: {self._step} steps so far, the last took {seconds:.3f} s")

    def _write_recording(self, status: str) -> None:
        probes, finder = self._probes, self._loop.finder
        facts = {
            **probes.facts,
            "schema_version": files.SCHEMA_VERSION,
            "status": status,
            "pid": self._pid,
            "steps": {
                "source": finder.source,
                "num_sources": finder.num_sources,
                "num_steps": self._step,
                "num_lines_dropped": self._samples.num_dropped,
            },
            "windows": self._windows.counts(),
            "environment": probes.environment_facts(),
        }
        files.write_json(self.folder / files.RECORDING_FILE, facts)


def _read_loss(step: TimedStep, line: dict[str, Any]) -> None:
    loss = float(step.loss)
    line["loss"] = loss if abs(loss) < float("inf") else str(loss)

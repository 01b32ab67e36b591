"""One active recording: runs the windows over a loop's steps and writes each step as it ends."""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from stepscope.recorder import current, files, hooks, wall, windows
from stepscope.recorder.clock import BETWEEN_STEPS, Clock, TimedStep
from stepscope.recorder.history.whole_run import WholeRun
from stepscope.recorder.loop import Loop
from stepscope.recorder.modes import unseen
from stepscope.recorder.patches import Handle, remove_all
from stepscope.recorder.probes import Probes
from stepscope.recorder.processes.rank import rank_and_world_size
from stepscope.recorder.run_facts import loop_facts
from stepscope.recorder.step_ends import FORWARD, MAX_STEPS_OF_ONE, Boundary
from stepscope.recorder.step_facts import NotedStep, StepFacts, joined_steps
from stepscope.recorder.usual.events import UsualStep
from stepscope.recorder.windows import Progress, Windows, WindowsDone


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
        inference: bool = False,
        memory_in_full: bool = False,
        is_script: bool = False,
        when: tuple[str, ...] = (),
        limit: int = 3,
        on_roots: Callable[[list[nn.Module]], None] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if model is None and windows.warmup < 2:
            raise ValueError("warmup must be at least 2: the first two steps are used to find the model")
        self.folder, self.is_script = folder, is_script
        self._windows, self._model, self._on_roots = windows, model, on_roots
        self._tokens_per_step, self._exit_after, self._inference = tokens_per_step, exit_after, inference
        self._progress = Progress(windows, exit_after, progress or (lambda _line: None))
        self._pid = os.getpid()
        self._handles: list[Handle] = []
        self._trace_handles: list[Handle] = []
        self._clock = Clock()
        self._probes = Probes(folder, self._clock, facts, memory_in_full, windows.trace_slowest, windows.memory > 0)
        self._loop = Loop(self._clock, self._step_ended)
        self._loop.usual.steps_ended, self._loop.usual.interpreted = self._usual_steps_ended, self._interpreted
        self.phase, self.stop_listening = self._loop.phase, self._loop.stop_listening
        self.aside_begins, self.aside_ended = self._loop.aside_begins, self._loop.aside_ended
        self._roots = self._loop.roots
        self._run = WholeRun(folder, self._probes, is_script, when, limit)
        self._samples, self._loop.usual.losses = self._run.samples, self._run.losses
        self._step = self._free_ns = self._last_ns = 0
        self._window = self._windows.at(0)
        # Forwards that ended a step: the steps of inference, or an evaluation. All, and the last ones.
        self._all_forwards_ns, self._forwards_ns = 0, deque[int](maxlen=MAX_STEPS_OF_ONE + 1)
        self._source: str | None = None  # what ended the first step
        self._is_closed = self._is_abandoned = False
        self._begun: list[NotedStep] = []  # the first steps, and how much they compiled
        self._restarts = self._has_roots = False  # restarts when the open step ends
        self._num_compiles = 0
        if optimizer is not None:
            self._loop.optimizers[id(optimizer)] = optimizer

    def start(self) -> None:
        """Install the hooks and write the first, still empty, recording."""
        wall.raise_up()
        try:
            unseen(self._start)
        except Exception as error:
            wall.failed(error)

    def _start(self) -> None:
        self._probes.compiler.on_start = wall.guarded(self._compile_begins)
        self._probes.compiler.start()
        self._probes.guard("starting the allocator history", self._probes.memory.await_cuda)
        self.resume()
        if self._model is not None:
            self._roots.add(self._model)
            self._model = None
        else:
            self._roots.await_first_call()
        self._write_recording(files.STATUS_INTERRUPTED)

    def _compile_begins(self) -> None:
        self._roots.stop_awaiting()  # keep it out of compiled functions
        self.catch_up()

    def catch_up(self) -> None:
        """Interpret all that was noted of usual steps."""
        if self._loop.usual.is_on:
            self._loop.usual.stop()

    def resume(self) -> None:
        """Install the hooks."""
        if current.session is not self:
            self._loop.listen()
            current.session = self
            self._handles = hooks.install(self._loop, self._probes)
            self._roots.attach()

    def suspend(self) -> None:
        """Remove every hook. The open step is not counted."""
        self._probes.guard("interpreting the last steps", self.catch_up)
        self._loop.stop_listening()
        current.session = None
        self._roots.detach()
        remove_all(self._trace_handles)
        remove_all(self._handles)

    def abandon(self, reason: str) -> None:
        """Measure nothing from here on, because of an error of ours.

        What PyTorch or Python may be iterating over keeps our hooks, which do nothing any more, until `close()`.
        """
        if not self._is_abandoned:
            self._is_abandoned = True
            self._loop.stop_listening()
            self._probes.note("recorder", f"the measurement ended after {self._step} steps: {reason}")
            self._probes.guard("ending the window", self._probes.stop_windows)
            remove_all(self._trace_handles)
            self._roots.detach()

    def close(self, status: str, error: BaseException | None = None, **facts: Any) -> None:
        """Remove every hook and write the recording. `error` is the exception that ended the script."""
        if os.getpid() == self._pid and not self._is_closed:
            self._is_closed = True
            try:
                unseen(self._close, status, error, facts)
            except Exception as our_error:
                wall.failed(our_error)
            if not self.is_script:
                wall.take_down()

    def _close(self, status: str, error: BaseException | None, facts: dict[str, Any]) -> None:
        probes = self._probes
        if not self._is_abandoned:
            probes.guard("ending the last step", self._end_loop)
        if self._inference and self._loop.finder.trains:
            probes.note("steps", "--inference was given, but the script trains: steps are training steps")
        for doing, action in (
            ("writing the out-of-memory snapshot", lambda: probes.memory.script_failed(error)),
            ("ending the window", probes.stop_windows),
            ("removing the hooks", self.suspend),
            ("stopping the probes", probes.stop_all),
            ("reading device times", lambda: self._run.timed.read_pending(probes, self._clock)),
            ("ending the triggered window", lambda: self._end_triggered(files.STATUS_INTERRUPTED)),
            ("reading the counters", lambda: probes.read_facts(self._roots.modules, self._loop.optimizers.values())),
            ("releasing the models", self._roots.forget),
            ("writing the last steps", lambda: self._run.close(status)),
        ):
            probes.guard(doing, action)
        probes.facts.update(facts)
        if self._run.writer.error is None or self.folder.exists():  # else that was said
            files.write_json(self.folder / files.RECORDING_FILE, self._facts(status))

    def _end_loop(self) -> None:
        """Count an update by hand that no later event has shown, and write what the loop did after its last step."""
        self.catch_up()
        self._loop.end_last_step()
        if not self._loop.is_open or not self._step:
            return
        tail = self._clock.end_step(self._step)
        if tail.num_times:
            # What comes after the last evaluation or checkpoint is the rest of the script, not of the loop.
            tail.host_ns = {name: ns for name, ns in tail.host_ns.items() if name in BETWEEN_STEPS}
            tail.wall_ns = sum(tail.host_ns.values())
            self._samples.add_aside("tail", tail)

    def _step_ended(self, boundary: Boundary) -> None:
        if boundary is Boundary.JOIN:
            with self._clock.stopped():
                self._probes.guard("joining steps", self._join)
        if boundary is Boundary.NONE or boundary is Boundary.JOIN:
            return
        step = self._clock.end_step(self._step)
        if self._loop.is_free and boundary is Boundary.END and not self._restarts:
            self._free_step_ended(step)
            if not self._loop.usual.is_interpreting:
                self._go_on()
            return
        if boundary is Boundary.RESTART or self._restarts:
            step = self._restart(step)
        finished = self._window
        num_compiles = self._probes.compiler.num_compiles - self._num_compiles
        self._write_step(step, self._loop.facts, num_compiles)
        self._begun.append((step, self._loop.facts, num_compiles))
        self._step += 1
        self._roots.stop_awaiting()
        self._loop.between.step_begins(self._step)
        if finished != windows.FREE:
            self._probes.memory.step_ended()
            self._window = self._run.windows(self._windows).at(self._step)
        if self._window not in (windows.WARMUP, windows.CLEAN) or self._step > MAX_STEPS_OF_ONE:
            self._begun.clear()  # keeping more would keep losses alive
        if self._window != finished or self._step == 1 or not self._has_roots:
            doing = f"entering the {windows.TITLES[self._window]} window"
            self._probes.guard(doing, lambda: self._enter(finished))
        elif self._window == windows.TRACE and self._probes.trace is not None:
            self._probes.guard("tracing", self._probes.trace.next_step)
        if self._run.triggered is None:
            self._progress.step_ended(self._step, step.wall_ns, self._window, entered=self._window != finished)
        self._loop.facts = self._loop.facts.following()
        self._num_compiles = self._probes.compiler.num_compiles
        if not self._loop.usual.is_interpreting:
            self._run.settle(self._loop.is_free)
        self._clock.begin_step()  # the recorder's own work since the step ended belongs to no step
        if not self._loop.usual.is_interpreting:
            self._go_on()

    def _interpreted(self) -> None:
        """Go on after usual steps: the next one has begun already."""
        with self._clock.stopped():
            self._run.settle(self._loop.is_free)
        self._go_on()

    def _go_on(self) -> None:
        """Begin another step, the cheap way if possible, unless the recording can end here."""
        if self._run.window_begins(self._step, self._loop.is_free, self._windows.num_steps):
            self._loop.is_free = self._samples.waits = False
            self._clock.use_device(self._probes.device)
            self._window = self._run.windows(self._windows).at(self._step)
            self._probes.guard("entering a triggered window", lambda: self._enter(windows.FREE))
            self._clock.begin_step()
        if self._loop.is_free:
            if self._run.writer.error is not None:
                self.abandon(self._run.writer.error)
                return
            with self._clock.stopped():
                self._samples.keep_up()
                self._run.look(time.perf_counter_ns())
                self._progress.step_ended(self._step, self._last_ns, self._window, entered=False)
            if self._exit_after and self._has_settled():
                raise WindowsDone
            most_steps = self._run.most_steps(self._step)
            if self._exit_after:
                most_steps = min(most_steps, self._windows.num_steps + windows.MOST_FREE_STEPS - self._step)
            if not self._exit_after or rank_and_world_size()[1] == 1:  # ranks must stop at the same step
                self._loop.start_usual(in_full=False, most_steps=most_steps)
        elif self._window == windows.CLEAN and self._probes.device is None:
            num_left = self._run.windows(self._windows).num_left(self._step)
            # The last one is interpreted alone: the next window looks at what it left in memory.
            self._loop.start_usual(in_full=True, most_steps=max(1, num_left - 1))

    def explicit_step(self, tokens: int | None = None, loss: Any = None) -> None:
        try:
            if tokens is not None or loss is not None or not self._loop.usual.explicit_step():
                unseen(self._loop.explicit_step, tokens, loss)
        except Exception as error:
            wall.failed(error)

    def _usual_steps_ended(self, num_steps: int, last_ns: int, steps: Iterator[UsualStep]) -> None:
        self._samples.add_usual(self._step, num_steps, steps, self._tokens_per_step)
        self._step, self._last_ns = self._step + num_steps, last_ns
        self._loop.between.step_begins(self._step)

    def _free_step_ended(self, step: TimedStep) -> None:
        num_compiles, self._num_compiles = self._num_compiles, self._probes.compiler.num_compiles
        self._write_step(step, self._loop.facts, self._num_compiles - num_compiles)
        self._step += 1
        self._roots.stop_awaiting()
        self._loop.between.step_begins(self._step)
        self._last_ns = step.wall_ns
        self._loop.facts = self._loop.facts.following()
        self._clock.begin_step()

    def _has_settled(self) -> bool:
        infers = self._inference or not self._roots.can_train()
        if self._loop.finder.source == FORWARD and not infers:
            return False  # this may be an evaluation before the training
        num_free, free_ns = self._step - self._windows.num_steps, time.perf_counter_ns() - self._free_ns
        return windows.has_settled(num_free, free_ns, rank_and_world_size()[1], self._windows.free)

    def _join(self) -> None:
        """Take the last steps as one: several optimizers make up a step, as the second round shows."""
        finder = self._loop.finder
        if finder.num_sources <= finder.most_sources:  # after the like: the second of two GANs
            self._samples.join(self._step - finder.num_joined, finder.num_joined)
            return
        if not self._step == finder.num_joined == len(self._begun):
            finder.num_earlier -= finder.num_joined - 1
            self._restarts = True  # probes have begun, or one was trained alone before
            return
        joined = joined_steps(self._begun)
        self._samples.restart(f"a step has {finder.num_sources} optimizers")
        self._probes.forget_windows()
        self._all_forwards_ns -= sum(self._forwards_ns.pop() for _ in range(min(self._step, len(self._forwards_ns))))
        self._step, self._window = 0, self._windows.at(0)
        self._write_step(*joined)
        self._step, self._begun = 1, [joined]
        self._loop.between.step_begins(1)
        self._probes.memory.num_steps = 1
        self._has_roots = False
        self._roots.search()

    def _restart(self, step: TimedStep) -> TimedStep:
        """Discard all steps so far and return the step that ends now as the first one."""
        self._restarts = False
        if self._source == self._loop.finder.source:
            self._loop.finder.num_earlier += self._step
        self._probes.guard("restarting", self._probes.stop_windows)
        self._end_triggered(files.STATUS_INTERRUPTED)
        remove_all(self._trace_handles)
        self._loop.observer = None
        self._loop.is_free = self._samples.waits = False
        self._clock.use_device(self._probes.device)
        self._samples.restart(f"steps are now ended by {self._loop.finder.source}")
        if self._step == len(self._begun) == self._loop.finder.num_joined:
            # A teacher's forward before the first update, or the optimizers before the first stepscope.step().
            step, self._loop.facts, num_compiles = joined_steps([*self._begun, (step, self._loop.facts, 0)])
            self._num_compiles -= num_compiles
        elif self._source == FORWARD:
            # Forwards before the first backward are no steps but an evaluation, which the loop began with.
            wall_ns = self._all_forwards_ns
            name = self._loop.between.before_training
            lead = TimedStep(0, step.start_ns - wall_ns, wall_ns, {name: wall_ns}, {name: 1})
            self._samples.add_aside("lead", lead)
        self._probes.forget_windows()
        self._begun.clear()
        self._step, self._window = 0, self._windows.at(0)
        step.index = 0
        return step

    def _write_step(self, step: TimedStep, facts: StepFacts, num_compiles: int) -> None:
        if not step.index:
            self._source = self._loop.finder.source
        if self._source == FORWARD:
            # Probed forwards take longer: the ones before them stand for them.
            is_timed = self._window in (windows.WARMUP, windows.CLEAN, windows.FREE)
            self._forwards_ns.append(step.wall_ns if is_timed else self._forwards_ns[-1])
            self._all_forwards_ns += self._forwards_ns[-1]
        num_tokens = facts.given_tokens or self._tokens_per_step
        places = self._loop.between.last_places() if step.num_times else None
        self._run.add(step, self._window, facts, num_tokens, num_compiles, places)

    def _enter(self, finished: str) -> None:
        """Switch from the `finished` window to the current one. No step is timed while this runs."""
        probes, loop, roots = self._probes, self._loop, self._roots
        if self._step == 1:
            self._has_roots = False
            roots.search()
        elif not self._has_roots and (loop.finder.repeats or self._window != windows.WARMUP):
            self._has_roots = roots.keep_called()
            probes.use_gpu(roots.modules)
            if self._has_roots and self._on_roots is not None:
                self._on_roots(roots.replaceable)
        if self._window == finished:
            return
        self._run.border()
        optimizers = loop.optimizers.values()
        remove_all(self._trace_handles)
        loop.observer = None
        probes.leave(finished, roots.modules, optimizers, lambda: self._run.timed.read_pending(probes, self._clock))
        if windows.CLEAN in (finished, self._window):
            probes.sample_energy()
        if self._window == windows.TRACE and probes.trace is not None:
            self._trace_handles = hooks.surround_optimizers(loop, optimizers)
        probes.enter(self._window, roots.modules, optimizers)
        loop.observer = probes.memory.ledger
        if self._window == windows.FREE:
            loop.is_free = self._samples.waits = True  # keep to the host's clock and to what is cheap
            self._clock.use_device(None)
            self._free_ns = time.perf_counter_ns()
            self._run.free_running_begins()
            self._end_triggered(files.STATUS_FINISHED)
        self._write_recording(files.STATUS_INTERRUPTED)

    def _write_recording(self, status: str) -> None:
        self._run.write_recording(files.json_text(self._facts(status)))  # a later step may change the facts

    def _facts(self, status: str) -> dict[str, Any]:
        return {
            **self._probes.facts,
            "schema_version": files.SCHEMA_VERSION,
            "status": status,
            **{"pid": self._pid, "host": platform.node(), "bypassed": self._roots.bypassed},
            **loop_facts(self._loop, self._step - self._run.first_step, self._run.timed.num_dropped),
            "windows": self._run.windows(self._windows).counts(),
            "environment": self._probes.environment_facts(),
        }

    def _end_triggered(self, status: str) -> None:
        if self._run.triggered is not None:
            self._run.end_window(self._step, self._facts(status))

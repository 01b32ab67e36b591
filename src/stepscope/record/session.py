"""One recording in progress: hears what the loop does, cuts it into steps, runs the windows, writes it down."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepscope.record import clock as phases
from stepscope.record import current, files, hooks, windows
from stepscope.record.clock import Clock, TimedStep, read_device_ns
from stepscope.record.compiler import CompilerProbe
from stepscope.record.counters import CounterSampler
from stepscope.record.environment import Environment, gpu_uuid
from stepscope.record.ledger import Ledger
from stepscope.record.model import CalledRoots, CallHooks, batch_size, live_modules, parameter_facts
from stepscope.record.nvml import NvmlUnavailable
from stepscope.record.patches import Handle
from stepscope.record.steps import EXPLICIT, FORWARD, OPTIMIZER, Boundary, StepFinder
from stepscope.record.trace import TraceProbe
from stepscope.record.windows import Windows

# A window that takes longer than this says so again.
PROGRESS_INTERVAL_NS = 10_000_000_000


class WindowsDone(SystemExit):
    """Ends the script after the last window when `--exit-after` asks for it; exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class Session:
    """Records one process. `start()`, then the hooks do the rest, then `close()`."""

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
        tell: Callable[[str], None] | None = None,
    ) -> None:
        if model is None and windows.warmup < 2:
            raise ValueError("--warmup must be at least 2: in the first two steps the model is found")
        self.folder = folder
        self._windows = windows
        self._facts = facts
        self._tokens_per_step = tokens_per_step
        self._exit_after = exit_after
        self._tell = tell or (lambda _line: None)

        self._thread = threading.get_ident()
        self._listens_on: int | None = None  # the thread whose loop is recorded; None while suspended
        self._pid = os.getpid()
        self._handles: list[Handle] = []
        self._phase_handles: list[Handle] = []
        self._clock = Clock()
        self._pending: list[TimedStep] = []  # steps whose device side has not been read yet
        self._finder = StepFinder()
        self._samples = files.LineFile(folder / files.SAMPLES_FILE)
        self._environment = Environment()
        self._compiler = CompilerProbe()
        self._counters: CounterSampler | None = None
        self._trace: TraceProbe | None = None
        self._ledger: Ledger | None = None
        self._first_call: hooks.FirstModuleCall | None = None
        self._search: CalledRoots | None = None
        self._roots: dict[int, tuple[nn.Module, CallHooks]] = {}
        self._optimizers: dict[int, Any] = {}
        self._device: int | None = None

        self._step = 0
        self._step_open = False
        self._free_ns = 0
        self._window = self._windows.at(0)
        self._last_progress_ns = time.perf_counter_ns()
        self._optimizer_depth = 0
        self._manual_depth = 0
        self._root_depth = 0
        self._data_depth = 0
        self._label_around_data: str | None = None
        self._backward_seen = False
        self._awaits_backward = False
        self._gradients_unused = False
        # Of the step that is open:
        self._batch: dict[int, tuple[int, int, int]] = {}  # root -> tokens, samples, calls
        self._given_tokens: int | None = None
        self._loss: Any = None
        self._num_skipped = 0
        self._num_compiles = 0
        self._given_model = model
        if optimizer is not None:
            self._optimizers[id(optimizer)] = optimizer

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Hook into PyTorch and write the first, still empty, recording."""
        os.register_at_fork(after_in_child=self._leave_in_child)
        self._compiler.start()
        self.resume()
        if self._given_model is not None:
            self._add_root(self._given_model)
        else:
            self._first_call = hooks.FirstModuleCall(self._add_root)
            self._compiler.on_start = self._first_call.remove  # no trace of it in a compiled function
        self._write_recording(files.STATUS_INTERRUPTED)

    def resume(self) -> None:
        """Put the hooks on."""
        if self._handles:
            return
        self._listens_on = self._thread
        current.session = self
        self._handles = hooks.install_boundaries(self)
        if self._window != windows.FREE:
            self._resume_phases()
        elif self._finder.source == FORWARD:
            self._resume_roots()

    def _resume_phases(self) -> None:
        self._phase_handles = hooks.install_phases(self)
        self._resume_roots()

    def _resume_roots(self) -> None:
        for module, root_hooks in list(self._roots.values()):
            root_hooks.remove()
            del self._roots[id(module)]
            self._add_root(module)

    def suspend(self) -> None:
        """Take every hook off; the step that is open is not counted."""
        self._listens_on = None
        self._step_open = False
        current.session = None
        self._stop_search()
        self._take_phase_hooks_off(roots_too=True)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _take_phase_hooks_off(self, roots_too: bool) -> None:
        for handle in self._phase_handles:
            handle.remove()
        self._phase_handles.clear()
        if roots_too:
            for _, root_hooks in self._roots.values():
                root_hooks.remove()

    def close(self, status: str, **facts: Any) -> None:
        """Take every hook off and write what there is."""
        if self._listens_on is None or os.getpid() != self._pid:
            return
        self._guard("closing", self._stop_probes)
        self.suspend()
        if self._counters is not None:
            self._facts["counters"]["other_processes"] = self._counters.other_processes()
            self._counters.stop()
        self._compiler.stop()
        self._guard("reading the device's clock", self._drain)
        if not self._facts.get("memory"):
            self._guard("reading the memory counters", self._read_memory)
        if not self._facts.get("parameters"):
            self._read_parameters()
        self._samples.close()
        self._facts.update(facts)
        if self._compiler.used:
            files.write_json(self.folder / files.COMPILE_FILE, self._compiler.report())
        self._write_recording(status)

    def _leave_in_child(self) -> None:
        # A forked worker is not the training process: it keeps the patched functions, all asleep.
        self._listens_on = None
        current.session = None

    def listens(self) -> bool:
        return threading.get_ident() == self._listens_on

    # --- what the hooks report --------------------------------------------------------------------

    def data_begins(self) -> None:
        self._open_step()
        self._data_depth += 1
        if self._data_depth == 1 and not self._manual_depth:
            self._label_around_data = self._clock.label
            self._clock.switch(phases.DATA)

    def data_ended(self) -> None:
        self._data_depth -= 1
        if self._data_depth == 0 and not self._manual_depth:
            self._clock.switch(self._label_around_data)

    def _forward_begins(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.listens() or self._clock.label == phases.BACKWARD:
            return  # another thread, or a checkpointed forward that backward runs again
        self._root_depth += 1
        if self._root_depth > 1 or self._window == windows.FREE:
            return
        self._open_step()
        self._gradients_unused |= self._awaits_backward
        if not self._manual_depth:
            self._clock.switch(phases.FORWARD)
        size = batch_size(args, kwargs)
        tokens, samples, calls = self._batch.get(id(root), (0, 0, 0))
        self._batch[id(root)] = (
            tokens + (size.num_tokens or 0),
            samples + (size.num_samples or 0),
            calls + 1,
        )
        if self._ledger is not None:
            self._ledger.note_inputs(args, kwargs)

    def _forward_ended(self, root: nn.Module) -> None:
        if not self.listens() or self._root_depth == 0:
            return
        self._root_depth -= 1
        if self._root_depth:
            return
        # A forward that a backward will follow lasts until that begins: the loss is part of it.
        loss_follows = self._backward_seen and torch.is_grad_enabled()
        if not loss_follows and not self._manual_depth and self._window != windows.FREE:
            self._clock.switch(self._outer_label())
        # With gradients on, a forward only ends a step once one was seen that no backward followed.
        self._awaits_backward = torch.is_grad_enabled() and not self._gradients_unused
        if not self._awaits_backward:
            self._boundary(self._finder.saw(FORWARD, id(root)))

    def backward_begins(self, tensors: Any) -> None:
        self._open_step()
        self._backward_seen = True
        self._awaits_backward = False
        if not self._manual_depth:
            self._clock.switch(phases.BACKWARD)
        if self._window != windows.FREE and isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            self._loss = tensors.detach()
        if self._ledger is not None:
            self._ledger.backward_begins()

    def backward_ended(self) -> None:
        if not self._manual_depth:
            self._clock.switch(self._outer_label())

    def optimizer_begins(self, optimizer: Any) -> None:
        self._optimizer_depth += 1
        if self._window == windows.FREE:
            return
        self._open_step()
        self._optimizers[id(optimizer)] = optimizer
        if self._optimizer_depth == 1 and not self._manual_depth:
            self._clock.switch(phases.OPTIMIZER)
        if self._ledger is not None:
            self._ledger.note_gradients(optimizer)

    def optimizer_ended(self, optimizer: Any, skipped: bool) -> None:
        if skipped:
            self._num_skipped += 1
        else:
            self._optimizer_depth = max(0, self._optimizer_depth - 1)
        if self._optimizer_depth:
            return  # an optimizer inside an optimizer: the outer one ends the step
        if not self._manual_depth and self._window != windows.FREE:
            self._clock.switch(None)
        self._boundary(self._finder.saw(OPTIMIZER, id(optimizer)))

    def profiler_begins(self) -> None:
        if self._trace is not None and not self._trace.is_preparing:
            self._trace.abandon()
            self._trace = None
            self._note("trace", "the script started a profiler of its own: the trace window gave way to it")

    def explicit_step(self, tokens: int | None = None, loss: Any = None) -> None:
        """`stepscope.step()`: the step ends here."""
        if not self.listens():
            return
        if self._window != windows.FREE:
            self._open_step()
        if tokens is not None:
            self._given_tokens = (self._given_tokens or 0) + int(tokens)
        if loss is not None:
            self._loss = loss.detach() if isinstance(loss, torch.Tensor) else float(loss)
        self._boundary(self._finder.saw(EXPLICIT, EXPLICIT))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """`stepscope.phase(name)`: the time inside belongs to `name`, whatever the hooks say."""
        if name not in phases.PHASES:
            raise ValueError(f"there is no phase {name!r}: the phases are {', '.join(phases.PHASES)}")
        if not self.listens() or self._window == windows.FREE:
            yield
            return
        self._open_step()
        outer = self._clock.label
        self._manual_depth += 1
        self._clock.switch(name)
        try:
            yield
        finally:
            self._manual_depth -= 1
            self._clock.switch(outer)

    # --- steps --------------------------------------------------------------------------------------

    def _open_step(self) -> None:
        if not self._step_open:
            self._step_open = True
            self._clock.begin_step()

    def _outer_label(self) -> str | None:
        return phases.OPTIMIZER if self._optimizer_depth else None

    def _reset_step_facts(self) -> None:
        self._batch = {}
        self._given_tokens = None
        self._loss = None
        self._num_skipped = 0
        self._num_compiles = self._compiler.num_compiles

    def _boundary(self, boundary: Boundary) -> None:
        if boundary is Boundary.NONE:
            return
        if self._window == windows.FREE and boundary is Boundary.END:
            self._free_step()
            return
        finished = self._window
        if boundary is Boundary.RESTART:
            self._restart()
        step = self._clock.end_step(self._step)
        self._write_step(step)
        self._step += 1
        self._window = self._windows.at(self._step)
        if self._window != finished or self._step <= 2:
            self._guard(f"entering the {windows.TITLES[self._window]} window", lambda: self._enter(finished))
        elif self._window == windows.TRACE and self._trace is not None:
            self._trace.next_step()
        self._progress(step.wall_ns, entered=self._window != finished)
        self._reset_step_facts()
        if self._exit_after and self._window == windows.FREE:
            raise WindowsDone
        self._clock.begin_step()  # what we did since the step ended is in no step

    def _restart(self) -> None:
        """What was counted so far is void; the step that ends now is the first."""
        self._samples.append(json.dumps({"restart": f"steps are now ended by {self._finder.source}"}))
        self._guard("restarting", self._stop_probes)
        self._pending.clear()
        self._step = 0
        if self._window == windows.FREE:
            self._guard("restarting", self._resume_phases)
        self._window = self._windows.at(0)

    def _free_step(self) -> None:
        """Outside every window a step costs one reading of the clock and one line."""
        now = time.perf_counter_ns()
        if self._step_open:
            wall_ns = now - self._free_ns
            self._samples.append(
                f'{{"step": {self._step}, "window": "free", "start_ns": {self._free_ns}, "wall_ns": {wall_ns}}}'
            )
            self._step += 1
            self._progress(wall_ns, entered=False)
        self._step_open = True
        self._free_ns = now

    def _write_step(self, step: TimedStep) -> None:
        num_tokens, num_samples, num_micro_batches = max(self._batch.values(), default=(0, 0, 0))
        num_tokens = self._given_tokens or self._tokens_per_step or num_tokens
        host_ns = ", ".join([f'"{name}": {ns}' for name, ns in step.host_ns.items()])
        line = (  # by hand: this runs at every step, and json.dumps takes four times as long
            f'{{"step": {step.index}, "window": "{self._window}", "start_ns": {step.start_ns}, '
            f'"wall_ns": {step.wall_ns}, "host_ns": {{{host_ns}}}, '
            f'"num_tokens": {num_tokens or "null"}, "num_samples": {num_samples or "null"}, '
            f'"num_micro_batches": {num_micro_batches}, "num_skipped": {self._num_skipped}, '
            f'"num_compiles": {self._compiler.num_compiles - self._num_compiles}}}'
        )
        self._samples.append(line)
        step.loss = self._loss
        if step.first_event is not None or step.loss is not None:
            self._pending.append(step)

    def _write_device_side(self, step: TimedStep) -> None:
        line: dict[str, Any] = {"step": step.index}
        device_ns = read_device_ns(step)
        if device_ns is not None:
            line["device_ns"] = device_ns
            self._clock.recycle(step)
        if step.loss is not None:
            loss = float(step.loss)
            line["loss"] = loss if abs(loss) < float("inf") else str(loss)
        self._samples.append(json.dumps(line))

    # --- windows --------------------------------------------------------------------------------------

    def _enter(self, finished: str) -> None:
        """Do what the change of window asks for. Nothing is being timed while this runs."""
        if self._step == 1:
            self._search_roots()
        elif self._step == 2:
            self._keep_called_roots()
            self._use_gpu()
        if self._window == finished:
            return
        if finished == windows.CLEAN:
            self._drain()
            self._read_memory()
            self._read_parameters()
        if finished == windows.TRACE:
            self._stop_trace(step_finished=True)
        if finished == windows.MEMORY:
            self._stop_ledger()
        if self._window == windows.TRACE_WARMUP:
            self._start_trace()
        elif self._window == windows.TRACE and self._trace is not None:
            self._trace.start(self._clock)
        elif self._window == windows.MEMORY:
            self._start_ledger()
        elif self._window == windows.FREE:
            self._take_phase_hooks_off(roots_too=self._finder.source != FORWARD)
            self._free_ns = time.perf_counter_ns()
        self._write_recording(files.STATUS_INTERRUPTED)

    def _add_root(self, module: nn.Module) -> None:
        self._first_call = None
        if id(module) not in self._roots:
            root_hooks = CallHooks(module, self._forward_begins, self._forward_ended)
            self._roots[id(module)] = (module, root_hooks)

    def _search_roots(self) -> None:
        if self._first_call is not None:
            self._first_call.remove()
            self._first_call = None
        if self._search is None:
            self._search = CalledRoots(live_modules())

    def _keep_called_roots(self) -> None:
        if self._search is None:
            return
        found = self._search.found
        self._stop_search()
        for key, (_, root_hooks) in list(self._roots.items()):
            if found and key not in found:
                root_hooks.remove()
                del self._roots[key]
        for module in found.values():
            self._add_root(module)

    def _stop_search(self) -> None:
        if self._search is not None:
            self._search.remove()
            self._search = None
        if self._first_call is not None:
            self._first_call.remove()
            self._first_call = None

    def _use_gpu(self) -> None:
        if self._device is not None or not torch.cuda.is_initialized():
            return
        parameters = (p for module, _ in self._roots.values() for p in module.parameters())
        device = next((p.device for p in parameters if p.is_cuda), None)
        self._device = torch.cuda.current_device() if device is None else device.index or 0
        self._clock.use_device(self._device)
        self._facts["counters"] = {}
        try:
            path = self.folder / files.COUNTERS_FILE
            self._counters = CounterSampler.start(path, gpu_uuid(self._device))
        except NvmlUnavailable as error:
            self._note("counters", f"no NVML counters: {error}")

    def _drain(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        for step in self._pending:
            self._write_device_side(step)
        self._pending.clear()

    def _read_memory(self) -> None:
        self._facts["memory"] = self._environment.memory(self._device)

    def _read_parameters(self) -> None:
        modules = [module for module, _ in self._roots.values()]
        parameters = [p for module in modules for p in module.parameters()]
        if not parameters:  # a compiled function hides its modules; the optimizers know the parameters
            groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
            parameters = [p for group in groups for p in group["params"]]
        self._facts["parameters"] = parameter_facts(parameters)
        self._facts["roots"] = [type(module).__name__ for module in modules]

    def _start_trace(self) -> None:
        path = self.folder / files.TRACE_FOLDER / f"rank{self._environment.rank}.json.gz"
        self._trace = TraceProbe(path, [module for module, _ in self._roots.values()], self._device)
        reason = self._trace.prepare()
        if reason:
            self._trace = None
            self._note("trace", reason)

    def _stop_trace(self, step_finished: bool) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            self._facts["trace"] = trace.stop(self._clock, step_finished)

    def _start_ledger(self) -> None:
        modules = [module for module, _ in self._roots.values()]
        self._ledger = Ledger(modules, list(self._optimizers.values()), lambda: self._clock.label)
        self._ledger.start()

    def _stop_ledger(self) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.stop()
            self._facts["flops"] = ledger.flops(self._compiler.used)
            files.write_json_gz(self.folder / files.MEMORY_FILE, ledger.memory())

    def _stop_probes(self) -> None:
        self._clock.on_range = None
        if self._trace is not None:
            self._stop_trace(step_finished=False)
        if self._ledger is not None:
            # A part of a step has no FLOPs worth telling.
            self._ledger.stop()
            self._ledger = None

    # --- words ----------------------------------------------------------------------------------------

    def _guard(self, doing: str, action: Callable[[], None]) -> None:
        """Run something of ours inside somebody's training: a fault of ours becomes a note, not their crash."""
        try:
            action()
        except Exception as error:
            self._note("recorder", f"while {doing}: {type(error).__name__}: {error}")

    def _note(self, about: str, text: str) -> None:
        self._facts.setdefault("notes", []).append({"about": about, "text": text})

    def _progress(self, wall_ns: int, entered: bool) -> None:
        is_new = entered and self._window not in (windows.WARMUP, windows.TRACE)
        now = time.perf_counter_ns()
        if not is_new and now - self._last_progress_ns < PROGRESS_INTERVAL_NS:
            return
        self._last_progress_ns = now
        position = self._step - self._windows.first_step(self._window)
        title, seconds = windows.TITLES[self._window], wall_ns / 1e9
        if self._window != windows.FREE:
            num_left = self._windows.num_steps_of(self._window) - position
            self._tell(f"{title}: {num_left} step(s), about {num_left * seconds:.1f} s")
        elif is_new:
            self._tell("all windows done; the script runs on untouched (--exit-after stops here)")
        else:
            self._tell(f"{title}: {self._step} steps so far, the last took {seconds:.3f} s")

    def _write_recording(self, status: str) -> None:
        facts = dict(self._facts)
        facts.update(
            schema_version=files.SCHEMA_VERSION,
            status=status,
            pid=self._pid,
            steps={
                "source": self._finder.source,
                "num_sources": self._finder.num_sources,
                "num_steps": self._step,
                "num_lines_dropped": self._samples.num_dropped,
            },
            windows={name: num_steps for name, num_steps in self._windows.sequence()},
            environment=self._environment.facts(self._device),
        )
        files.write_json(self.folder / files.RECORDING_FILE, facts)

"""The probes of a session, and the facts they collect for `recording.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepscope.recorder import files, windows
from stepscope.recorder.clock import Clock
from stepscope.recorder.compiler.compile_watch import CompilerProbe
from stepscope.recorder.history.pace import Pace
from stepscope.recorder.ledger.ledger import Ledger
from stepscope.recorder.ledger.memory_window import MemoryProbe
from stepscope.recorder.machine.counters import CounterSampler
from stepscope.recorder.machine.environment import (
    environment_facts,
    float32_matmul,
    gpu_uuid,
    memory_facts,
    speed_flags,
)
from stepscope.recorder.machine.nvml import NvmlUnavailable
from stepscope.recorder.model import is_compiled, parameter_facts, without_optimizer
from stepscope.recorder.precision.settings import precision_settings
from stepscope.recorder.processes.rank import rank_and_world_size
from stepscope.recorder.trace_window import TraceProbe
from stepscope.recorder.values import modules_in, parameters_in
from stepscope.recorder.wall import pass_on

WINDOW_FACTS = ("memory", "parameters", "roots", "trace", "flops", "attention", "precision", "padding", "flags",
                "python")  # fmt: skip
"""Facts that the windows find; notes about them belong to the same windows."""


class Probes:
    """Starts and stops each probe, keeps the facts, and turns the recorder's own errors into notes."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        facts: dict[str, Any],
        memory_in_full: bool = False,
        trace_slowest: bool = False,
        has_memory_window: bool = True,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self.facts = facts
        self.device: int | None = None
        self.compiler = CompilerProbe()
        self.trace: TraceProbe | None = None
        self.pace = Pace(folder) if trace_slowest else None
        self.memory = MemoryProbe(folder, memory_in_full, self.note, self.guard)
        self._has_memory_window = has_memory_window
        self.counters: CounterSampler | None = None
        self._profiler_is_on = self._stacks = False
        self._float32_matmul: str | None = None

    def guard(self, doing: str, action: Callable[[], None]) -> None:
        """Run a part of the recorder inside the user's training. An exception becomes a note."""
        try:
            action()
        except Exception as error:
            pass_on(error)
            self.note("recorder", f"while {doing}: {type(error).__name__}: {error}")

    def note(self, about: str, text: str) -> None:
        """Add a note for the reader of the recording."""
        note, notes = {"about": about, "text": text}, self.facts.setdefault("notes", [])
        if note not in notes:
            notes.append(note)

    def use_folder(
        self, folder: Path, facts: dict[str, Any], memory_in_full: bool, stacks: bool, num_steps: int
    ) -> Callable[[], None]:
        """Work for another recording until the returned function is called."""
        kept = self._folder, self.facts, self.memory, self.pace
        self._folder, self.facts, self._stacks, self.pace = folder, facts, stacks, None
        self.memory = MemoryProbe(folder, memory_in_full, self.note, self.guard)
        self.memory.num_steps = num_steps

        def release() -> None:
            (self._folder, self.facts, self.memory, self.pace), self._stacks = kept, False

        return release

    def use_gpu(self, roots: Iterable[nn.Module]) -> None:
        """Time on the GPU and sample its counters if the script uses one."""
        if self.device is not None or not torch.cuda.is_initialized():
            return
        device = next((p.device for module in roots for p in parameters_in(module) if p.is_cuda), None)
        self.device = torch.cuda.current_device() if device is None else device.index or 0
        self._clock.use_device(self.device)
        try:
            self.counters = CounterSampler.start(self._folder / files.COUNTERS_FILE, gpu_uuid(self.device))
        except NvmlUnavailable as error:
            self.note("counters", f"no NVML counters: {error}")

    def leave(
        self, window: str, roots: list[nn.Module], optimizers: Iterable[Any], read_steps: Callable[[], None]
    ) -> None:
        """End a window. `read_steps` reads device times and waits for the GPU."""
        if window == windows.MEMORY:  # before the recorder runs any op itself
            self.stop_memory()
        if window == windows.WARMUP:
            self.memory.warmup_ended(self._has_memory_window)
        elif window != windows.FREE:
            read_steps()
            self.read_facts(roots, optimizers)
        if window == windows.TRACE:
            self.stop_trace(step_finished=True)
            self.compare_precision("traced")

    def enter(self, window: str, roots: list[nn.Module], optimizers: Iterable[Any]) -> None:
        """Begin a window."""
        if window == windows.TRACE_WARMUP:
            self.prepare_trace(roots)
            if self.pace is not None:
                self.pace.publish()
        elif window == windows.TRACE and self.trace is not None:
            if (lines := self.trace.lines_seen()) is not None:
                self.facts["python"] = lines
            if self.pace is None or self._is_slowest(self.pace):
                self.trace.start(self._clock)
        elif window == windows.MEMORY:
            self.start_memory(roots, optimizers)

    def _is_slowest(self, pace: Pace) -> bool:
        """Return whether to trace; if not, the profiler that has been prepared is dropped."""
        is_slowest, why = pace.slowest()
        self.note("trace", why)
        if not is_slowest and self.trace is not None:
            trace, self.trace = self.trace, None
            trace.abandon()
        return is_slowest

    def sample_energy(self) -> None:
        """Sample the energy counter now, at the start or end of a window."""
        if self.counters is not None:
            self.counters.sample_energy()

    def synchronize(self) -> None:
        """Wait for the GPU. Never called while a step is timed."""
        if self.device is not None:
            torch.cuda.synchronize(self.device)

    def read_facts(self, roots: list[nn.Module], optimizers: Iterable[Any]) -> None:
        """Read memory peaks, precision settings and parameters once, before a probe can add to them."""
        if "memory" in self.facts:
            return
        self.facts["memory"] = memory_facts(self.device)
        self.facts["precision"] = precision_settings()
        self.facts["flags"] = speed_flags()
        self._float32_matmul = float32_matmul(self.device)
        parameters = [p for module in roots for p in parameters_in(module)]
        optimized = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        # A compiled function hides its modules, but the optimizers have the parameters.
        self.facts["parameters"] = parameter_facts(parameters or optimized)
        self.facts["parameters"]["without_optimizer"] = without_optimizer(roots, set(map(id, optimized)))
        self.facts["roots"] = [type(module).__name__ for module in roots]

    def compare_precision(self, window: str) -> None:
        """Note the precision settings that differ between the timed steps and another window."""
        timed = self.facts.get("precision", {})
        for name, value in precision_settings().items():
            if timed.get(name, value) != value:
                self.note("precision", f"{name} was {timed[name]} in the timed steps, {value} in the {window} window")

    def environment_facts(self) -> dict[str, Any]:
        """Return the environment of the timed steps."""
        facts = environment_facts(self.device)
        if "precision" in self.facts:
            facts["float32_matmul"] = self._float32_matmul
        return facts

    def prepare_trace(self, roots: list[nn.Module]) -> None:
        if self._profiler_is_on or torch.autograd._profiler_enabled():
            self.note(
                "trace", "no trace was taken: the script's own profiler was running when the trace window began"
            )
            return
        traced = self.facts.get("trace")
        # Readers of a recording open the first trace. Repeated traces are in subfolders.
        number = 1 if not traced else 2 + len(traced.get("repeated", ()))
        folder = files.TRACE_FOLDER if number == 1 else f"{files.TRACE_FOLDER}/repeat{number}"
        name = f"{folder}/rank{rank_and_world_size()[0] or 0}.json.gz"
        first_step = self.memory.num_steps + 1  # the step before it warms the profiler up
        self.trace = TraceProbe(self._folder, name, roots, self.device, first_step, self._stacks)
        self.trace.prepare(self._clock)

    def stop_trace(self, step_finished: bool) -> None:
        trace, self.trace = self.trace, None
        if trace is not None:
            found = trace.stop(self._clock, step_finished)
            if self.facts.get("trace"):
                self.facts["trace"].setdefault("repeated", []).extend([found] if found else [])
            else:
                self.facts["trace"] = found

    # --- the script's own profiler: PyTorch allows only one at a time ---

    def script_profiler_begins(self) -> None:
        if self.trace is not None and self.trace.is_ours:
            return
        if self.trace is not None:
            trace, self.trace = self.trace, None
            self._clock.on_range = None
            self.guard("stopping the trace for the script's own profiler", trace.abandon)
            self.note("trace", "the trace window was stopped because the script started its own profiler")
        if self.memory.ledger is not None:
            self.memory.drop()
            self.note("memory", "the memory window was stopped because the script started its own profiler")
        self._profiler_is_on = True

    def script_profiler_ended(self) -> None:
        if self.trace is None or not self.trace.is_ours:
            self._profiler_is_on = False

    def start_memory(self, roots: list[nn.Module], optimizers: Iterable[Any]) -> None:
        if self._profiler_is_on or torch.autograd._profiler_enabled():
            # The profiler would see every op twice.
            self.note("memory", "no memory and FLOPs window: the script's own profiler was running")
            return
        compiles = self.compiler.used or any(is_compiled(module) for root in roots for module in modules_in(root))
        if compiles and not Ledger.passes_compiled_code:
            text = (
                f"no memory and FLOPs window: torch {torch.__version__} recompiles under a probe that sees every op"
            )
            self.note("memory", f"{text}, and this run uses torch.compile")
            return
        self.memory.start(roots, list(optimizers), self.device, lambda: self._clock.label)

    def stop_memory(self) -> None:
        ledger = self.memory.stop()
        if ledger is not None:
            self.facts["flops"] = ledger.flops(self.compiler.used)
            self.facts["attention"] = self.memory.take_attention()
            self.facts["padding"] = ledger.padding.table()
            if ledger.padding.error:
                self.note("padding", f"the padding of the inputs could not be counted: {ledger.padding.error}")

    def forget_windows(self) -> None:
        """Drop what the windows found, with its notes and files: it belongs to discarded steps."""
        traced = self.facts.get("trace") or {}
        traces = [each["file"] for each in (traced, *traced.get("repeated", ())) if "file" in each]
        for name in (files.MEMORY_FILE, files.SNAPSHOT_FILE, *traces):
            self.guard(f"removing {name}", partial((self._folder / name).unlink, missing_ok=True))
        for name in WINDOW_FACTS:
            self.facts.pop(name, None)
        self.memory.num_steps = 0
        notes = self.facts.get("notes", [])
        notes[:] = [note for note in notes if note["about"] not in WINDOW_FACTS]

    def stop_windows(self) -> None:
        """Stop the open window in the middle of a step."""
        self._clock.on_range = None
        if self.trace is not None:
            self.stop_trace(step_finished=False)
        self.memory.drop()  # FLOPs of a partial step are meaningless

    def stop_all(self) -> None:
        """Stop the probes that run until the end, and write their results."""
        if self.counters is not None:
            self.facts["counters"] = {"other_processes": self.counters.other_processes(), **self.counters.limits}
            self.counters.stop()
            if self.counters.error:
                self.note("counters", f"NVML sampling ended early: {self.counters.error}")
        self.compiler.stop()
        if self.compiler.error:
            self.note("compiler", f"what torch.compile did is incomplete: {self.compiler.error}")
        if self.compiler.used:
            files.write_json(self._folder / files.COMPILE_FILE, self.compiler.report())

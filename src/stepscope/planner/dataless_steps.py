"""Runs a few steps of a workload without data: every storage's lifetime, kernel scratch memory, and FLOPs."""

import gc
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stepscope.devices.limits import Device, known_devices
from stepscope.planner.compiled.graphs import Compiler
from stepscope.planner.compiled.inductor import Padding
from stepscope.planner.emulation.cuda_dispatch import CudaDispatch
from stepscope.planner.emulation.dataless import DatalessMode, PlannedTensor
from stepscope.planner.hardware import (
    TRANSFORMS,
    Hardware,
    hardware_of,
    hidden,
    kept_workspaces,
    temporary_bytes,
    unknown_bytes,
)
from stepscope.planner.host_kernels import HostKernels
from stepscope.planner.parallel import Parallel
from stepscope.planner.step_of_rank import ranks_of, step_of
from stepscope.recorder.clock import BACKWARD, FORWARD, OPTIMIZER
from stepscope.recorder.ledger.ledger import Ledger
from stepscope.recorder.ledger.nodes import backward_runs
from stepscope.recorder.ledger.storages import TEMPORARY, WORKSPACE, Allocation, Storages, storage_key
from stepscope.sweep import prepare
from stepscope.workloads.workload import Built, Value, Workload

FEWEST_CALLS = 3  # the first creates the optimizer's state, and the third shows whether the second repeats
MOST_CALLS = 16  # in which every optimizer must step, and in which a repetition is looked for


class Call(NamedTuple):
    """One call of a step, as far as it is compared with others."""

    sizes: Counter[int]  # of its allocations
    stepped: frozenset[int]  # the ids of the parameter groups that an optimizer stepped


def are_enough(calls: Sequence[Call], optimizers: Collection[Collection[int]]) -> bool:
    """Return whether the calls suffice to predict what follows. Each optimizer is given as its parameter groups.

    Without a repetition within `MOST_CALLS`, they suffice when all optimizers have stepped twice.
    """
    if len(calls) < FEWEST_CALLS:
        return False
    if _repeating(calls, optimizers) is not None:
        return True
    first, *_ = (*_rounds(calls, optimizers), 0)
    return len(calls) >= max(MOST_CALLS, 2 * first)


def cycle(calls: Sequence[Call], optimizers: Collection[Collection[int]]) -> tuple[int, int]:
    """Return how many calls to use, and how many at their end are one cycle. Idle optimizers are ignored.

    >>> one, four = Call(Counter(), frozenset()), Call(Counter(), frozenset({1}))
    >>> cycle([one, one, one, four, one, one, one, four], [{1}])
    (8, 4)
    """
    active = [groups for groups in optimizers if not is_idle(groups, calls)]
    length = _repeating(calls, active)
    if length is not None:
        return len(calls), length
    before, end = (0, 0, *_rounds(calls, active))[-2:]
    return (end, end - before) if before else (len(calls), 1)


def is_idle(groups: Collection[int], calls: Sequence[Call]) -> bool:
    """Return whether none of an optimizer's groups was stepped in these calls."""
    return not any(call.stepped.intersection(groups) for call in calls)


def _repeating(calls: Sequence[Call], optimizers: Collection[Collection[int]]) -> int | None:
    """Return the smallest number of final calls that equal those before them and step every optimizer."""
    for length in range(1, len(calls) // 2 + 1):
        last = calls[-length:]
        if last == calls[-2 * length : -length] and not any(is_idle(groups, last) for groups in optimizers):
            return length
    return None


def _rounds(calls: Sequence[Call], optimizers: Collection[Collection[int]]) -> list[int]:
    """Return the numbers of calls after which every optimizer has stepped once, twice, …"""
    ends: list[int] = []
    begin = 0
    for end in range(1, len(calls) + 1):
        if not any(is_idle(groups, calls[begin:end]) for groups in optimizers):
            ends.append(end)
            begin = end
    return ends


NUM_STEPS = 2
"""The first step creates the optimizer's state, and the second repeats. For a user's own loop, see `cycle`."""
BUILD = "build"


@dataclass(frozen=True)
class Traced:
    """What a plan knows about a workload before the allocator is simulated."""

    memory: Mapping[str, Any]  # in the format of `memory.json.gz`, but starting with the build
    step_begins: Sequence[int]
    """The position of the first event of each step, and of the first event after the last step."""
    period: int  # the number of steps at the end that repeat from then on
    flops: Mapping[str, Any]  # of one step, in the format of a recording
    num_parameters: int
    num_tokens: int | None
    assumed: Sequence[str]  # assumptions where only data could decide
    unseen: Mapping[str, str]  # ops whose scratch memory is unknown, and why
    is_whole_step: bool = False  # whether it is a step of the user's own loop, with unknown contents
    error_bar: float | None = None
    """Relative error of the peak in either direction, if a part of the plan is an approximation."""
    num_idle_optimizers: int = 0  # optimizers that never stepped
    parallel: Parallel | None = None  # how ranks train together: all of this is one rank's
    unknown_bytes: int = 0  # bytes that a verdict should allow for libraries that choose their workspace at run time


def trace(
    workload: Workload[Any],
    config: Any,
    run: Mapping[str, Value],
    hardware: Hardware | None,
    num_steps: int | None = None,
    parallel: Parallel | None = None,
    planned: Device | None = None,
) -> Traced:
    """Return the build and first steps of a workload; without hardware, on a CPU; for one rank with `parallel`.

    `planned` is the device whose name the program sees; by default, a known device with this hardware.
    """
    device = "cpu" if hardware is None else "cuda"
    run = {**run, "device": device}
    recorder = _Recorder(hardware)
    known_device = next((known for known in known_devices() if hardware_of(known) == hardware), None)
    capability = (9, 0) if hardware is None else hardware.compute_capability
    dispatch = CudaDispatch(device, capability, planned or known_device)
    sharding = ranks_of(parallel, run, dispatch.device, recorder.storages, recorder.after_op)
    offloads = parallel is not None and parallel.offload
    if sharding is None:
        mode = DatalessMode(dispatch.device, dispatch.kernels, recorder.after_op)
    else:
        mode = sharding.dataless_mode(dispatch.kernels)
    if hardware is None:
        mode.shapes.ask = recorder.host_kernels.outputs
    padding = None if known_device is None else Padding(known_device, run["dtype"] == "tf32")
    compiler = Compiler(hardware, mode, recorder.after_op, padding)
    with dispatch, compiler, sharding or nullcontext(), ExitStack() as hooks:
        hooks.callback(recorder.close)
        prepare.check_machine(run)
        recorder.begin([], [])
        with mode:
            built = prepare.build(workload, config, int(run["seed"]), device)
            step, known = step_of(built, run, device, sharding, offloads)
        recorder.end()
        for hook in recorder.optimizer_hooks():
            hooks.callback(hook.remove)
        num_steps = num_steps or (NUM_STEPS if isinstance(built, Built) else None)
        begins = [recorder.storages.num_events]
        calls: list[Call] = []
        groups: list[list[int]] = []  # per optimizer
        while len(calls) < num_steps if num_steps else not are_enough(calls, groups):
            num_before = len(recorder.storages.allocations)
            if len(calls) < FEWEST_CALLS:  # models are made early, and searching for them takes time
                roots, optimizers = known or _found(recorder.storages.live)
            recorder.begin(roots, optimizers)
            with mode:
                step()
            dispatch.check_threads()
            ledger = recorder.end()
            begins.append(recorder.storages.num_events)
            new = _on(dispatch.device, recorder.storages.allocations[num_before:])
            calls.append(Call(Counter(entry["bytes"] for entry in new), frozenset(recorder.stepped)))
            groups = [[id(group) for group in optimizer.param_groups] for optimizer in optimizers]
    parameters = {id(parameter): parameter.numel() for root in roots for parameter in root.parameters()}
    memory = ledger.memory()
    num_calls, period = (num_steps, 1) if num_steps else cycle(calls, groups)
    begins = begins[: num_calls + 1]
    allocations = _until(begins[-1], _on(dispatch.device, memory["allocations"]))
    if sharding is not None:  # parameters were never on the device before they were sharded
        allocations = [entry for entry in allocations if entry["died"] is None or entry["died"] >= begins[0]]
    memory["allocations"] = allocations
    return Traced(
        memory=memory,
        step_begins=begins,
        period=period,
        flops=ledger.flops(compiled=False),
        num_parameters=sum(parameters.values()),
        num_tokens=built.num_tokens,
        assumed=sorted(mode.assumptions),
        unseen=recorder.unseen | dispatch.unseen | mode.unseen | compiler.notes | getattr(sharding, "notes", {}),
        error_bar=compiler.error_bar if sharding is None else sharding.error_bar,
        parallel=parallel,
        unknown_bytes=recorder.unknown_bytes,
        is_whole_step=not isinstance(built, Built),
        num_idle_optimizers=sum(is_idle(ours, calls) for ours in groups),
    )


class _Recorder:
    """The storages of a plan, and its phases as far as they are visible from outside."""

    def __init__(self, hardware: Hardware | None) -> None:
        self._hardware = hardware
        self._phase = BUILD
        self._in_backward = False
        self._workspaces: set[tuple[str, bool]] = set()
        self._ledger: Ledger | None = None
        self._hooks: list[Any] = []
        self.stepped: set[int] = set()
        """The ids of the parameter groups stepped in this step: a wrapper shares those of its inner optimizer."""
        self.host_kernels = HostKernels()
        self.unseen = self.host_kernels.unknown
        self.unknown_bytes = 0
        self._met: set[Any] = set()
        self.storages = Storages(self._current_phase, is_capped=False)
        self.storages.open()

    def begin(self, roots: list[Any], optimizers: list[Any]) -> None:
        """Begin a step of these modules and optimizers; without any, the build."""
        self._phase = FORWARD if roots else BUILD
        self._in_backward = False
        self.stepped = set()
        ledger = self._ledger = Ledger(
            roots, optimizers, self._current_phase, storages=self.storages, is_passive=True
        )

        def enter(_module: Any, args: Any, kwargs: Any) -> None:
            ledger.note_inputs(args, kwargs)

        self._hooks = [root.register_forward_pre_hook(enter, with_kwargs=True) for root in roots]
        ledger.start()

    def end(self) -> Ledger:
        assert self._ledger is not None
        self._ledger.note_parameter_gradients()
        return self._leave(self._ledger)

    def close(self) -> None:
        """Stop following storages, whatever happened."""
        self.storages.close()
        if self._ledger is not None:
            self._leave(self._ledger)

    def _leave(self, ledger: Ledger) -> Ledger:
        while self._hooks:
            self._hooks.pop().remove()
        ledger.stop()
        self._ledger = None
        return ledger

    def optimizer_hooks(self) -> list[Any]:
        """Return hooks that note every optimizer step."""

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._phase = OPTIMIZER
            self.stepped.update(map(id, optimizer.param_groups))
            if self._ledger is not None:
                self._ledger.note_gradients(optimizer)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._phase = FORWARD

        return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def after_op(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the outputs of an op, and the memory that the device uses for it besides."""
        assert self._ledger is not None
        in_backward = backward_runs()
        if in_backward and not self._in_backward:
            self._ledger.backward_begins()
        self._in_backward = in_backward
        self._ledger.saw(func, args, kwargs, out)
        name = func.name().replace("::", ".").partition(".")[2]
        if self._hardware is None:
            if size := self.host_kernels.scratch_bytes(func, args, kwargs):
                self.storages.gave_back(self.storages.took(size, name, TEMPORARY, self._current_phase(), "cpu"))
            return
        if func not in self._met or func in TRANSFORMS:
            self._met.add(func)
            if (why := hidden(func, args)) is not None:
                self.unseen[name] = why
        self.unknown_bytes = max(self.unknown_bytes, unknown_bytes(func, args, out))
        # One workspace per handle, and one handle per thread: autograd's backward runs in another thread.
        for library, size in kept_workspaces(func, args, self._hardware).items():
            if (library, in_backward) not in self._workspaces:
                self._workspaces.add((library, in_backward))
                self.storages.took(size, name, WORKSPACE, self._current_phase(), "cuda:0")
        for sizes in temporary_bytes(func, args, kwargs, self._hardware):
            taken = [self.storages.took(size, name, TEMPORARY, self._current_phase(), "cuda:0") for size in sizes]
            for index in taken:
                self.storages.gave_back(index)

    def _current_phase(self) -> str:
        return BACKWARD if backward_runs() else self._phase


def _on(device: torch.device, allocations: Iterable[Allocation]) -> list[Allocation]:
    """Return the allocations on the planned device, where ops run on meta tensors."""
    found = [entry for entry in allocations if entry["device"] in ("meta", str(device))]
    for entry in found:
        entry["device"] = str(device)
    return found


def _until(end: int, allocations: list[Allocation]) -> list[Allocation]:
    """Return the allocations made before an event, as they were at that time."""
    found = [entry for entry in allocations if entry["born"] is None or entry["born"] < end]
    for entry in found:
        if entry["died"] is not None and entry["died"] >= end:
            entry["died"] = None
    return found


def _found(live: Mapping[int, int]) -> tuple[list[nn.Module], list[Any]]:
    """Return the plan's outermost modules and its optimizers, wherever the program keeps them.

    `live` are the storages of this plan: modules of an earlier plan may still await garbage collection.
    """

    def is_ours(parameters: Any) -> bool:
        return any(type(parameter) is PlannedTensor and storage_key(parameter) in live for parameter in parameters)

    # Compares types, because asking an object for its class can run its own code. Creates no objects on the way,
    # because that would trigger garbage collection.
    objects = gc.get_objects()
    modules = [thing for thing in objects if issubclass(type(thing), nn.Module)]
    optimizers = [thing for thing in objects if issubclass(type(thing), torch.optim.Optimizer)]
    modules = [module for module in modules if is_ours(module.parameters())]
    inside = {id(child) for module in modules for child in module.children()}
    optimizers = [one for one in optimizers if is_ours(p for group in one.param_groups for p in group["params"])]
    return [module for module in modules if id(module) not in inside], optimizers

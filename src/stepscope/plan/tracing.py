"""Some steps of a workload without data: every storage's birth and death, what kernels take inside, the FLOPs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stepscope.plan import ghosts
from stepscope.plan.ghosts import Ghost, Ghosts
from stepscope.plan.hardware import Hardware
from stepscope.plan.manners import Manners
from stepscope.plan.temporaries import GEMMS, temporary_bytes
from stepscope.record.clock import BACKWARD, FORWARD, OPTIMIZER
from stepscope.record.ledger import Ledger
from stepscope.record.storages import TEMPORARY, WORKSPACE, Storages, storage_key
from stepscope.sweep import prepare
from stepscope.workloads.workload import Built, Value, Workload

NUM_STEPS = 2
"""The first makes the optimizer's state; the second is like all that follow."""
BUILD = "build"


@dataclass(frozen=True)
class Traced:
    """What a plan knows of a workload before any allocator."""

    memory: Mapping[str, Any]
    """As `memory.json.gz` has it, but from the build on."""
    step_begins: Sequence[int]
    """The position of the first event of each step, and of the first after the last."""
    flops: Mapping[str, Any]
    """Of one step, as a recording has them."""
    num_parameters: int
    num_tokens: int | None
    assumed: Sequence[str]
    """What was taken for granted where only data would tell."""
    unseen: Mapping[str, str]
    """Ops whose inner memory could not be told, and why."""


def trace(
    workload: Workload[Any],
    config: Any,
    run: Mapping[str, Value],
    hardware: Hardware | None,
    num_steps: int = NUM_STEPS,
) -> Traced:
    """The build and the first steps of a workload; without hardware, on a CPU."""
    device = "cpu" if hardware is None else "cuda"
    run = {**run, "device": device}
    recorder = _Recorder(hardware)
    manners = Manners(device, (9, 0) if hardware is None else hardware.compute_capability)
    mode = Ghosts(manners.device, manners.kernels, recorder.after_op)
    ghosts.ASSUMPTIONS.clear()
    with manners, ExitStack() as hooks:
        recorder.begin([], [])
        with mode:
            built = prepare.build(workload, config, int(run["seed"]), device)
            step, known = _step_of(built, run, device)
        recorder.end()
        for hook in recorder.optimizer_hooks():
            hooks.callback(hook.remove)
        begins = []
        for _ in range(num_steps):
            begins.append(recorder.storages.num_events)
            roots, optimizers = known or _found(recorder.storages.live)
            recorder.begin(roots, optimizers)
            with mode:
                step()
            ledger = recorder.end()
        begins.append(recorder.storages.num_events)
        recorder.storages.close()
    parameters = {id(parameter): parameter.numel() for root in roots for parameter in root.parameters()}
    return Traced(
        memory=ledger.memory(),
        step_begins=begins,
        flops=ledger.flops(compiled=False),
        num_parameters=sum(parameters.values()),
        num_tokens=built.num_tokens,
        assumed=sorted(ghosts.ASSUMPTIONS),
        unseen=dict(mode.unseen),
    )


class _Recorder:
    """The one list of storages of a plan, and the phases as they can be told from outside."""

    def __init__(self, hardware: Hardware | None) -> None:
        self._hardware = hardware
        self._phase = BUILD
        self._in_backward = False
        self._workspaces: set[bool] = set()
        self._ledger: Ledger | None = None
        self._hooks: list[Any] = []
        self.storages = Storages(self._told)
        self.storages.open()

    def begin(self, roots: list[Any], optimizers: list[Any]) -> None:
        """A step begins, of these modules and optimizers; without any, the build."""
        self._phase = FORWARD if roots else BUILD
        self._in_backward = False
        ledger = Ledger(roots, optimizers, self._told, storages=self.storages, is_told=True)

        def enter(_module: Any, args: Any, kwargs: Any) -> None:
            ledger.note_inputs(args, kwargs)

        self._hooks = [root.register_forward_pre_hook(enter, with_kwargs=True) for root in roots]
        self._ledger = ledger
        ledger.start()

    def end(self) -> Ledger:
        """The ledger of the step that is over."""
        assert self._ledger is not None
        for hook in self._hooks:
            hook.remove()
        self._ledger.note_parameter_gradients()
        self._ledger.stop()
        return self._ledger

    def optimizer_hooks(self) -> list[Any]:
        """Told when an optimizer steps, whichever it is."""

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._phase = OPTIMIZER
            if self._ledger is not None:
                self._ledger.note_gradients(optimizer)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._phase = FORWARD

        return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def after_op(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An op has run: its outputs, and what a CUDA device takes for it besides."""
        assert self._ledger is not None
        in_backward = _is_in_backward()
        if in_backward and not self._in_backward:
            self._ledger.backward_begins()
        self._in_backward = in_backward
        self._ledger.saw(func, args, kwargs, out)
        if self._hardware is None:
            return
        name = func.name().replace("::", ".").partition(".")[2]
        # One workspace for each handle, and each thread has a handle: autograd's backward runs in another.
        if func in GEMMS and in_backward not in self._workspaces:
            self._workspaces.add(in_backward)
            self.storages.took(self._hardware.workspace_bytes, name, WORKSPACE, self._told(), "cuda:0")
        sizes = temporary_bytes(func, args, kwargs, self._hardware)
        taken = [self.storages.took(size, name, TEMPORARY, self._told(), "cuda:0") for size in sizes]
        for index in taken:
            self.storages.gave_back(index)

    def _told(self) -> str:
        return BACKWARD if _is_in_backward() else self._phase


def _is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() >= 0)


def _step_of(
    built: Any, run: Mapping[str, Value], device: str
) -> tuple[Callable[[], Any], tuple[list[nn.Module], list[Any]] | None]:
    """One step of what was built, as a call; its modules and optimizers where they are known."""
    if not isinstance(built, Built):
        return built.step, None
    dtype = prepare.weights_dtype(run)
    built.module.to(dtype)
    batch = prepare.cast(prepare.make_batch(built, int(run["seed"]), device), dtype)
    one_pass = prepare.Pass(built.module, batch, run)
    return one_pass, ([built.module], [] if one_pass.optimizer is None else [one_pass.optimizer])


def _found(live: Mapping[int, int]) -> tuple[list[nn.Module], list[Any]]:
    """The modules of the plan that are a part of no other, and its optimizers, wherever the program keeps them.

    `live` are the storages of this plan: another's may be waiting for the garbage collector.
    """

    def is_ours(parameters: Any) -> bool:
        return any(type(parameter) is Ghost and storage_key(parameter) in live for parameter in parameters)

    # By type: asking an object for its class runs code of some that are there.
    objects = [(type(thing), thing) for thing in gc.get_objects()]
    modules = [thing for kind, thing in objects if issubclass(kind, nn.Module) and is_ours(thing.parameters())]
    inside = {id(child) for module in modules for child in module.children()}
    optimizers = [
        thing
        for kind, thing in objects
        if issubclass(kind, torch.optim.Optimizer) and is_ours(p for g in thing.param_groups for p in g["params"])
    ]
    return [module for module in modules if id(module) not in inside], optimizers

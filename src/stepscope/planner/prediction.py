"""Predicts what a training step needs on a device, without that device."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from stepscope.devices.limits import Device
from stepscope.errors import UsageError
from stepscope.formatting import size
from stepscope.planner.allocator import Events, Replay, live_at_peak, replay, rounded
from stepscope.planner.dataless_steps import Traced, trace
from stepscope.planner.emulation.dataless import DataNeeded
from stepscope.planner.hardware import CONTEXT_BYTES, Hardware, hardware_of, usable_bytes
from stepscope.planner.parallel import Parallel
from stepscope.recorder.clock import BACKWARD, OPTIMIZER
from stepscope.recorder.machine.environment import allows_tf32, products_in_tf32
from stepscope.sweep.grid import Point
from stepscope.sweep.protocol import CannotRun
from stepscope.workloads.workload import Workload

_NO_SLOWER = {"fp64": "fp32", "bf16": "fp16"}
"""A dtype that every device multiplies at least as fast, used if the first has no peak in the table."""


@dataclass(frozen=True)
class LowerBound:
    """The least time that a step can take on a device, regardless of its kernels."""

    ms: float
    compute_ms: float  # all counted FLOPs at the dense peak rate of their dtype
    bandwidth_ms: float  # `bytes` at the device's bandwidth
    binds: str  # `compute` or `bandwidth`, whichever takes longer
    bytes: int  # the bytes that must be moved: see `moved_bytes`


def lower_bound(traced: Traced, device: Device, run: Mapping[str, Any]) -> tuple[LowerBound, list[str]]:
    """Return the bound, and notes on peaks that are missing from the table."""
    seconds = 0.0
    notes: dict[str, None] = {}
    for entry in traced.flops["by_op"]:
        dtype = entry["dtype"]
        if dtype == "fp32" and "tf32" in device.peak_flops and _may_be_tf32(entry["op"], traced, run):
            dtype = "tf32"
        rate = device.peak_flops.get(dtype)
        if rate is None:
            other = _NO_SLOWER.get(dtype)
            rate = device.peak_flops.get(other or "") or max(device.peak_flops.values())
            instead = f"{other}'s peak" if other in device.peak_flops else "its highest peak"
            notes.setdefault(f"the table has no {dtype} peak for {device.name}: the least time uses {instead}")
        seconds += entry["flops"] / rate
    num_bytes = moved_bytes(traced)
    compute_ms, bandwidth_ms = seconds * 1e3, num_bytes / device.bandwidth_bytes_per_s * 1e3
    binds = "compute" if compute_ms >= bandwidth_ms else "bandwidth"
    return LowerBound(max(compute_ms, bandwidth_ms), compute_ms, bandwidth_ms, binds, num_bytes), list(notes)


def moved_bytes(traced: Traced) -> int:
    """Return the bytes that the last step must read and write, each once per phase.

    The forward reads the weights that it multiplies by or adds (rows of an embedding are not counted). Backward
    writes gradients, and reads activations that the forward wrote. An optimizer reads gradients, and reads and writes
    the weights that have one, and its state.
    """
    begin = traced.step_begins[-2]
    phases = {stage["name"] for stage in traced.memory["stages"] if stage["event"] >= begin}
    held = {"parameter": 0, "gradient": 0, "optimizer_state": 0, "activation": 0}
    for entry in traced.memory["allocations"]:
        # Gradients freed in this step but made before it belong to the previous step. Activations made before it are
        # leaked.
        is_new = entry["born"] is not None and entry["born"] >= begin
        is_ours = is_new or (entry["died"] is None and entry["owner"] != "activation")
        if is_ours and entry["owner"] in held:
            held[entry["owner"]] += entry["bytes"]
    weights = traced.flops["weights"]
    read = sum(w["num_elements"] for w in weights if w["used"] and (w["forward_flops"] or not w["looked_up"]))
    moved = held["parameter"] * read // max(1, sum(weight["num_elements"] for weight in weights))
    if BACKWARD in phases:
        moved += 2 * held["activation"] + held["gradient"]
    if OPTIMIZER in phases:
        moved += 3 * held["gradient"] + 2 * held["optimizer_state"]
    return int(moved)


def _may_be_tf32(op: str, traced: Traced, run: Mapping[str, Any]) -> bool:
    """Return whether a float32 product may run in TF32, according to the point or to the program's settings."""
    if not traced.is_whole_step:
        return bool(run["dtype"] == "tf32")
    if "convolution" in op:
        return allows_tf32(getattr(torch.backends.cudnn, "conv", None), lambda: torch.backends.cudnn.allow_tf32)
    return products_in_tf32()


FITS, TOO_LARGE, TOO_CLOSE, GROWS, NOT_KNOWN = "fits", "does not fit", "too close to call", "grows", "not known"
VERDICTS = (FITS, TOO_CLOSE, NOT_KNOWN, GROWS, TOO_LARGE)  # from the best to the worst
MARGIN = 0.02  # a verdict must hold with this share less, and with this share more memory
LONG_RUN_STEPS = 100_000
"""Growth below the margin over this many steps, as from a list of losses, does not affect a verdict."""
MOST_TRACES = 32  # that a planner keeps
ROUNDING = "allocator_rounding"


@dataclass(frozen=True, repr=False)
class Prediction:
    """One point on one device."""

    device: str  # the device's exact name, or `cpu`
    parameters: int
    flops: int  # Of one step, counted op by op. `unmodelled` lists ops without a formula.
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None  # None on a CPU
    live_at_peak: Mapping[str, int]
    """Bytes by owner, plus the allocator's rounding. They sum to `peak_allocated_bytes`."""
    live_at_peak_by_module: Mapping[str, int]  # The same bytes by module. An empty name stands for no module.
    peak_step: int  # The step of the peaks. If nothing grows, all later steps are like it.
    growth_bytes_per_step: int  # what every step leaves behind; 0 if memory is stable
    settles_at_step: int | None  # the first step after which no step reserves more; None if memory grows
    usable_bytes: int | None  # the least memory that tensors can use on the device; None on a CPU
    fits: str | None
    """`fits`, `does not fit`, `too close to call`, `grows` (with every step), or `not known` (an optimizer never
    stepped); None on a CPU."""
    num_retries: int  # how often the allocator must release unused memory to make it fit
    lower_bound: LowerBound | None
    tokens_per_s: float | None  # the highest throughput that the lower bound allows
    unmodelled: tuple[str, ...]  # ops and effects that the prediction does not include
    is_whole_step: bool = False  # whether it is a step of the user's own loop, which ignores the point's knobs
    fsdp: int | None = None  # the number of ranks with FSDP2: all values are those of one rank
    num_ranks: int = 1  # with FSDP2, DDP or tensor parallelism: all values are those of one rank
    parallel: str | None = None  # how ranks train together, as text
    stage_peak_bytes: tuple[int, ...] = ()
    """A pipeline's peaks of allocated memory, by stage. The other values are those of the highest, except the number
    of parameters, which is that of all stages, and the verdict, which is the worst."""
    error_bar: float | None = None  # relative error of the peak in either direction, if the plan is an approximation

    def __repr__(self) -> str:
        return f"<Prediction: {self.fits or 'no limit'}, {size(self.peak_allocated_bytes)} on {self.device}>"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Planner:
    """Predicts points of one workload and shares their common work. With `parallel`, predicts one of its ranks."""

    def __init__(
        self, workload: Workload[Any], parallel: Parallel | None = None, limit_bytes: int | None = None
    ) -> None:
        """`limit_bytes` replaces the memory of the device."""
        self._workload, self._parallel, self._limit_bytes = workload, parallel, limit_bytes
        self._traced: dict[tuple[Any, ...], Traced] = {}

    def predict(self, point: Point, device: Device | None) -> Prediction:
        """Return the prediction for a point on a device; without a device, on a CPU.

        For a pipeline, it is that of the stage with the highest peak.
        """
        parallel = self._parallel
        if parallel is None or parallel.pp is None:
            return self._predict(point, device, parallel)
        parallel = replace(parallel, pipes={})
        stages = [self._predict(point, device, replace(parallel, stage=stage)) for stage in range(parallel.num_ranks)]
        peaks = tuple(stage.peak_allocated_bytes for stage in stages)
        num_parameters = sum(stage.parameters for stage in stages)
        highest = max(stages, key=lambda stage: stage.peak_allocated_bytes)
        worst = None if device is None else max((stage.fits for stage in stages), key=VERDICTS.index)
        return replace(highest, stage_peak_bytes=peaks, parameters=num_parameters, fits=worst)

    def _predict(self, point: Point, device: Device | None, parallel: Parallel | None) -> Prediction:
        hardware = None if device is None else hardware_of(device)
        if device is not None and hardware is None:
            raise UsageError(f"{device.name}: only NVIDIA devices can be planned")
        traced = self._trace(point, hardware, device, parallel)
        events = Events(traced.memory["allocations"], traced.step_begins, traced.period)
        rounds = hardware is not None
        found = replay(events, rounds=rounds)
        verdict, retries, bound = None, 0, None
        notes: list[str] = []
        if device is not None:
            verdict, retries = _verdict(events, found, traced, self._usable_bytes(device))
            bound, notes = lower_bound(traced, device, point.run)
        owners: Counter[str] = Counter()
        modules: Counter[str] = Counter()
        for index, block_bytes in live_at_peak(events, found, rounds):
            entry = traced.memory["allocations"][index]
            owners[entry["owner"]] += entry["bytes"]
            owners[ROUNDING] += block_bytes - entry["bytes"]
            modules[entry["module"] or ""] += block_bytes
        return Prediction(
            device="cpu" if device is None else device.name,
            parameters=traced.num_parameters,
            flops=sum(entry["flops"] for entry in traced.flops["by_op"]),
            peak_allocated_bytes=found.peak_allocated_bytes,
            peak_reserved_bytes=None if device is None else found.peak_reserved_bytes,
            live_at_peak={name: size for name, size in owners.most_common() if size},
            live_at_peak_by_module=dict(modules.most_common()),
            peak_step=events.step_at(*found.peak_at),
            growth_bytes_per_step=events.growth_bytes(rounded if rounds else int),
            settles_at_step=found.settles_at_step,
            usable_bytes=None if device is None else self._usable_bytes(device)[0],
            fits=verdict,
            num_retries=retries,
            lower_bound=bound,
            tokens_per_s=traced.num_tokens / bound.ms * 1e3 if bound and bound.ms and traced.num_tokens else None,
            unmodelled=(*_unmodelled(traced, events, point), *notes),
            is_whole_step=traced.is_whole_step,
            fsdp=traced.parallel.fsdp if traced.parallel else None,
            num_ranks=traced.parallel.num_ranks if traced.parallel else 1,
            parallel=str(traced.parallel) if traced.parallel else None,
            error_bar=traced.error_bar,
        )

    def _usable_bytes(self, device: Device) -> tuple[int, int]:
        """Return the least and the most memory that tensors can use."""
        if self._limit_bytes is None:
            return usable_bytes(device)
        return self._limit_bytes - CONTEXT_BYTES, self._limit_bytes - CONTEXT_BYTES

    def _trace(
        self, point: Point, hardware: Hardware | None, device: Device | None, parallel: Parallel | None
    ) -> Traced:
        # A user's own program may ask for the device's name or memory.
        asked = device.name if device is not None and ".py:" in point.workload else None
        key = (tuple(sorted(point.config.items())), tuple(sorted(point.run.items())), hardware, asked, parallel)
        if key not in self._traced:
            try:
                config = self._workload.config(**point.config)
                self._traced[key] = trace(
                    self._workload, config, point.run, hardware, parallel=parallel, planned=device
                )
            except CannotRun as error:
                raise UsageError(f"{point.workload}: {error}") from None
            except DataNeeded as error:
                raise UsageError(
                    f"{point.workload}: the program needs {error}, and a plan has no data. Make sizes independent of "
                    "values, or measure with stepscope bench"
                ) from None
            while len(self._traced) > MOST_TRACES:
                self._traced.pop(next(iter(self._traced)))
        traced = self._traced[key]
        if traced.is_whole_step and (point.run["mode"], point.run["dtype"]) != ("step", "fp32"):
            raise UsageError(f"{point.workload} is a whole step of your own: leave --mode and --dtype out")
        return traced


def _verdict(events: Events, free: Replay, traced: Traced, usable: tuple[int, int]) -> tuple[str, int]:
    """Return whether it fits with a margin in both directions, and how often memory must be released for it."""
    margin, surely_usable = max(MARGIN, traced.error_bar or 0.0), usable[0] - traced.unknown_bytes
    least, most = int(surely_usable * (1 - margin)), int(usable[1] * (1 + margin))
    if free.peak_reserved_bytes <= least:
        verdict, retries = FITS, 0
    elif (tight := replay(events, least)).out_of_memory is None:
        verdict, retries = FITS, tight.num_retries
    elif (loose := replay(events, most)).out_of_memory is None:
        verdict, retries = TOO_CLOSE, loose.num_retries
    else:
        return TOO_LARGE, 0
    if events.growth_bytes(rounded) * LONG_RUN_STEPS > margin * surely_usable:
        return GROWS, 0
    return NOT_KNOWN if traced.num_idle_optimizers else verdict, retries


def _unmodelled(traced: Traced, events: Events, point: Point) -> list[str]:
    found = [f"assumed: {text}" for text in traced.assumed]
    found += [f"{op}: {why}" for op, why in traced.unseen.items()]
    if traced.unknown_bytes:
        found.append(
            f"the verdict reserves {traced.unknown_bytes / 2**20:,.1f} MiB for cuDNN's workspace, the size of the "
            "largest convolution's tensors"
        )
    if traced.flops["error"]:
        found.append(f"FLOPs and the least time include only what ran before this error: {traced.flops['error']}")
    found += [f"{op}: its FLOPs have no formula" for op in traced.flops["hidden_products"]]
    if point.run["dtype"] == "autocast_fp16":
        found.append("the gradient scaler's checks for infinities")
    num_steps = events.num_steps
    if traced.period > 1:
        found.append(
            f"the program is assumed to repeat every {traced.period} steps: memory covers all of them, time and "
            "FLOPs only the last"
        )
    if traced.num_idle_optimizers:
        found.append(
            f"{traced.num_idle_optimizers} of the program's optimizers never stepped in {num_steps} steps: the "
            "memory of its step and state is not counted, so whether it fits is unknown. Use a step function "
            "that ends with the optimizer's step"
        )
    if not events.is_repetitive():
        found.append(
            f"the {num_steps} steps that ran do not repeat: the last is assumed to repeat, and the peak is the "
            "highest of all"
        )
    return found

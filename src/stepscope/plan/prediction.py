"""What a training step will need on a device, told without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stepscope.devices.peaks import Device
from stepscope.errors import UsageError
from stepscope.plan.ghosts import DataNeeded
from stepscope.plan.hardware import Hardware, hardware_of, usable_bytes
from stepscope.plan.replay import Events, Replay, replay
from stepscope.plan.tracing import Traced, trace
from stepscope.sweep.grid import Point
from stepscope.workloads.workload import Workload

FITS, TOO_LARGE, TOO_CLOSE = "fits", "does not fit", "too close to call"
MARGIN = 0.02
"""A verdict must hold with this share of the memory less, and more."""
ROUNDING = "allocator_rounding"


@dataclass(frozen=True)
class LowerBound:
    """The least time that a step can take on a device, whatever the program does."""

    ms: float
    compute_ms: float
    """All counted FLOPs at the dense peak of their dtype."""
    bandwidth_ms: float
    """What must move: each weight read forward and backward, gradients written and read, the optimizer's state read
    and written, activations kept for backward written and read."""
    binds: str
    """`compute` or `bandwidth`."""


@dataclass(frozen=True)
class Prediction:
    """One point on one device; JSON with `to_json`."""

    device: str
    """Its exact name, or `cpu`."""
    parameters: int
    flops: int
    """Of one step, counted op by op; see `unmodelled` for what had no formula."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    """None on a CPU."""
    live_at_peak: Mapping[str, int]
    """Bytes by owner, and what the allocator adds by rounding; they add up to `peak_allocated_bytes`."""
    live_at_peak_by_module: Mapping[str, int]
    """The same bytes by module; what belongs to none under an empty name."""
    settles_at_step: int
    """From this step on, no step reserves more than the one before."""
    usable_bytes: int | None
    """What tensors can have on the device; None on a CPU."""
    fits: str | None
    """`fits`, `does not fit` or `too close to call`; None on a CPU."""
    num_retries: int
    """How often the allocator has to give unused memory back for it to fit."""
    lower_bound: LowerBound | None
    tokens_per_s: float | None
    """The most that the lower bound allows."""
    unmodelled: tuple[str, ...]
    """Ops and effects that are not accounted for."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Planner:
    """Predicts points of one workload; what two predictions have in common is done once."""

    def __init__(self, workload: Workload[Any]) -> None:
        self._workload = workload
        self._traced: dict[tuple[Any, ...], Traced] = {}

    def predict(self, point: Point, device: Device | None) -> Prediction:
        """The point on a device; without one, on a CPU."""
        hardware = None if device is None else hardware_of(device)
        if device is not None and hardware is None:
            raise UsageError(f"{device.name}: plans know NVIDIA's devices only")
        traced = self._trace(point, hardware)
        events = Events(traced.memory["allocations"], traced.step_begins)
        found = replay(events, rounds=hardware is not None)
        usable = None if device is None else usable_bytes(device)
        verdict, retries = (None, 0) if usable is None else _verdict(events, found, usable)
        owners, modules = _live(traced.memory["allocations"], found)
        bound = None if device is None else lower_bound(traced, device, str(point.run["dtype"]))
        return Prediction(
            device="cpu" if device is None else device.name,
            parameters=traced.num_parameters,
            flops=sum(entry["flops"] for entry in traced.flops["by_op"]),
            peak_allocated_bytes=found.peak_allocated_bytes,
            peak_reserved_bytes=None if device is None else found.peak_reserved_bytes,
            live_at_peak=owners,
            live_at_peak_by_module=modules,
            settles_at_step=found.settles_at_step,
            usable_bytes=usable,
            fits=verdict,
            num_retries=retries,
            lower_bound=bound,
            tokens_per_s=traced.num_tokens / bound.ms * 1e3 if bound and bound.ms and traced.num_tokens else None,
            unmodelled=_unmodelled(traced, point),
        )

    def _trace(self, point: Point, hardware: Hardware | None) -> Traced:
        key = (tuple(sorted(point.config.items())), tuple(sorted(point.run.items())), hardware)
        if key not in self._traced:
            if point.run["compile"] != "off":
                raise UsageError("compile: a plan is of the eager program; leave --compile out")
            try:
                config = self._workload.config(**point.config)
                self._traced[key] = trace(self._workload, config, point.run, hardware)
            except DataNeeded as error:
                raise UsageError(
                    f"{point.workload}: the program asks for {error}, and a plan has no data: build it so that "
                    "sizes do not depend on values, or measure it with stepscope bench"
                ) from None
        return self._traced[key]


def largest(fits: Callable[[int], bool], start: int, highest: int = 1 << 24) -> int:
    """The largest number that fits, 0 where not even 1 does: doubled until one does not, then bisected.

    >>> largest(lambda batch: batch <= 37, start=4)
    37
    """
    low, high = 0, None
    number = max(1, start)
    while high is None or high - low > 1:
        if fits(number):
            low = number
        else:
            high = number
        if low >= highest:
            break
        number = 2 * low if high is None else (low + high) // 2
    return low


def lower_bound(traced: Traced, device: Device, dtype: str) -> LowerBound | None:
    """From the FLOPs and from what must move; None where the device has no peak for a dtype that is multiplied in."""
    seconds = 0.0
    for entry in traced.flops["by_op"]:
        rate = device.peak_flops.get("tf32" if entry["dtype"] == "fp32" and dtype == "tf32" else entry["dtype"])
        if rate is None:
            return None
        seconds += entry["flops"] / rate
    moved = sum(
        entry["bytes"] * _TIMES.get(entry["owner"], 0)
        for entry in traced.memory["allocations"]
        if entry["died"] is None or entry["died"] >= traced.step_begins[-2]
    )
    compute_ms, bandwidth_ms = seconds * 1e3, moved / device.bandwidth_bytes_per_s * 1e3
    binds = "compute" if compute_ms >= bandwidth_ms else "bandwidth"
    return LowerBound(max(compute_ms, bandwidth_ms), compute_ms, bandwidth_ms, binds)


_TIMES = {"parameter": 2, "gradient": 2, "optimizer_state": 2, "activation": 2}
"""How often a byte of each owner must move in a step, at the least."""


def _verdict(events: Events, free: Replay, usable: int) -> tuple[str, int]:
    """Whether it fits with a margin both ways, and how often memory must be given back for it."""
    if free.peak_reserved_bytes <= usable * (1 - MARGIN):
        return FITS, 0
    tight = replay(events, int(usable * (1 - MARGIN)))
    if tight.out_of_memory is None:
        return FITS, tight.num_retries
    loose = replay(events, int(usable * (1 + MARGIN)))
    return (TOO_LARGE, 0) if loose.out_of_memory is not None else (TOO_CLOSE, loose.num_retries)


def _live(allocations: Sequence[Mapping[str, Any]], found: Replay) -> tuple[dict[str, int], dict[str, int]]:
    owners: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for index, block_bytes in found.at_peak.items():
        entry = allocations[index]
        owners[entry["owner"]] += entry["bytes"]
        owners[ROUNDING] += block_bytes - entry["bytes"]
        modules[entry["module"] or ""] += block_bytes
    return {name: size for name, size in owners.most_common() if size}, dict(modules.most_common())


def _unmodelled(traced: Traced, point: Point) -> tuple[str, ...]:
    found = [f"assumed: {text}" for text in traced.assumed]
    found += [f"{op}: {why}" for op, why in traced.unseen.items()]
    hidden = traced.flops["hidden_products"]
    found += [f"{op}: its FLOPs have no formula" for op in hidden]
    if point.run["dtype"] == "autocast_fp16":
        found.append("the gradient scaler's checks for infinities")
    return tuple(found)

"""The least time of a step on a device: its FLOPs at the peak rate, or its required bytes at full bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.devices.peaks import Device
from stepscope.planner.dataless_steps import Traced
from stepscope.recorder.clock import BACKWARD, OPTIMIZER
from stepscope.recorder.machine.environment import allows_tf32, products_in_tf32

_NO_SLOWER = {"fp64": "fp32", "bf16": "fp16"}
"""A dtype that every device multiplies at least as fast, used if the first has no peak in the table."""


@dataclass(frozen=True)
class LowerBound:
    """The least time that a step can take on a device, regardless of its kernels."""

    ms: float
    compute_ms: float
    """All counted FLOPs at the dense peak rate of their dtype."""
    bandwidth_ms: float
    """`bytes` at the device's bandwidth."""
    binds: str
    """`compute` or `bandwidth`, whichever takes longer."""
    bytes: int
    """The bytes that must be moved: see `moved_bytes`."""


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

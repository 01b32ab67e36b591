"""`stepscope.plan`: what a training step needs, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.api.sweeps import axes_of
from stepscope.errors import UsageError, need_torch

if TYPE_CHECKING:
    from stepscope.planner.plan import Plan

DEFAULT_DEVICE = "NVIDIA H100 80GB HBM3"


def plan(
    workload: str,
    *,
    preset: str | Sequence[str] | None = None,
    set: Mapping[str, Any] | None = None,
    mode: str | Sequence[str] | None = None,
    dtype: str | Sequence[str] | None = None,
    compile: str | Sequence[str] | None = None,
    sdpa: str | Sequence[str] | None = None,
    optimizer: str | Sequence[str] | None = None,
    device: str | Sequence[str] = DEFAULT_DEVICE,
    fsdp: int | None = None,
    max_batch: bool = False,
    max_length: bool = False,
    on_line: Callable[[str], None] | None = None,
) -> Plan:
    """Return the predicted memory, fit and least time of a step, like `stepscope plan`.

    Nothing runs on a GPU and no weights are allocated. `workload` is a name of `stepscope list workloads`,
    `hf:config.json` or `file.py:build`. `set` maps knobs to a value or a list of values; lists multiply. `device` is
    the full name of one or more GPUs, or `cpu`. `max_batch` and `max_length` search the largest that fits. `on_line`
    receives what is being planned.

    >>> plan("cs336", preset="2.7B", set={"seq_len": 512}, device="NVIDIA H200")  # doctest: +SKIP
    <Plan: cs336 2.7B batch=4 seq_len=512 fp32 step on NVIDIA H200>
    """
    need_torch()
    from stepscope.planner.plan import CPU, MAX_BATCH, MAX_LENGTH, find_devices, plan_points
    from stepscope.sweep.grid import find_workload, grid_points

    devices = find_devices([device] if isinstance(device, str) else device)
    if not devices:
        raise UsageError("device names no device")
    found = find_workload(workload)
    axes = axes_of(preset, set, mode=mode, dtype=dtype, compile=compile, sdpa=sdpa, optimizer=optimizer)
    searches = [key for key, is_asked in ((MAX_BATCH, max_batch), (MAX_LENGTH, max_length)) if is_asked]
    points, tell = grid_points(found, {"device": [CPU], **axes}), on_line or (lambda line: None)
    return plan_points(found, points, devices, fsdp=fsdp, searches=searches, on_line=tell)

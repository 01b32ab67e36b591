"""Blocks of a history made of others: of exact steps, or of several blocks, so that a week fits into memory."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from statistics import median
from typing import Any

from stepscope.analysis.run.series import summed
from stepscope.trace.history_file import Block, GpuBlock
from stepscope.trace.recording import StepSample

BLOCK_NS = 10_000_000_000  # what a recorder puts into one block
_SUMS = ("num_steps", "wall_ns", "num_compiles", "num_collections")
_SUMS_IF_KNOWN = ("num_tokens", "num_samples")
_LAST_KNOWN = ("allocated_bytes", "reserved_bytes", "total_bytes", "resident_bytes")


def thinned(blocks: Sequence[Block], most: int) -> list[Block]:
    """Return at most about `most` blocks of the same run: the last ones as they are, longer ones before."""
    if len(blocks) <= most:
        return list(blocks)
    older, newer = blocks[: -most // 4], blocks[-most // 4 :]
    target_ns = sum(block.wall_ns for block in older) // max(1, most // 4)
    return [*map(merged, _groups(older, target_ns)), *newer]


def _groups(blocks: Sequence[Block], most_ns: int) -> Iterator[list[Block]]:
    group: list[Block] = []
    sum_ns = 0
    for block in blocks:
        is_alike = group and (block.process, block.window) == (group[0].process, group[0].window)
        if group and (not is_alike or sum_ns + block.wall_ns > most_ns):
            yield group
            group, sum_ns = [], 0
        group.append(block)
        sum_ns += block.wall_ns
    if group:
        yield group


def merged(blocks: Sequence[Block]) -> Block:
    """Return one block for consecutive ones of one process and window."""
    if len(blocks) == 1:
        return blocks[0]
    longest = max(blocks, key=lambda block: block.max_ns)
    with_loss = next((block for block in reversed(blocks) if block.loss is not None), blocks[-1])
    highest = max(blocks, key=lambda block: _height(block.max_loss))
    peaks = [block.peak_bytes for block in blocks if block.peak_bytes is not None]
    sums: dict[str, Any] = {name: sum(getattr(block, name) for block in blocks) for name in _SUMS}
    for name in _SUMS_IF_KNOWN:
        known = [getattr(block, name) for block in blocks]
        sums[name] = None if None in known else sum(known)
    for name in _LAST_KNOWN:
        sums[name] = next((value for block in reversed(blocks) if (value := getattr(block, name)) is not None), None)
    return replace(
        blocks[0],
        **sums,
        t=blocks[-1].t,
        median_ns=_median_ns(blocks),
        max_ns=longest.max_ns,
        max_step=longest.max_step,
        host_ns=summed(block.host_ns for block in blocks),
        num_times=summed(block.num_times for block in blocks),
        loss=with_loss.loss,
        loss_step=with_loss.loss_step,
        max_loss=highest.max_loss,
        max_loss_step=highest.max_loss_step,
        peak_bytes=max(peaks, default=None),
        gpu=_gpu([(block.gpu, block.wall_ns) for block in blocks if block.gpu is not None]),
    )


def blocks_of(steps: Sequence[StepSample], began: float) -> list[Block]:
    """Return blocks of exact steps, as a recorder would have written them; `began` is the Unix time of the first."""
    found: list[Block] = []
    group: list[StepSample] = []
    first_ns = steps[0].start_ns if steps else 0
    for index, step in enumerate(steps):
        group.append(step)
        following = steps[index + 1] if index + 1 < len(steps) else None
        is_whole = step.end_ns - group[0].start_ns >= BLOCK_NS
        if following is None or is_whole or following.window != step.window or following.start_ns < step.start_ns:
            found.append(_block(group, began + (step.end_ns - first_ns) / 1e9))
            group = []
    return found


def _block(steps: Sequence[StepSample], t: float) -> Block:
    longest = max(steps, key=lambda step: step.wall_ns)
    with_loss = next((step for step in reversed(steps) if step.loss is not None), steps[-1])
    tokens, samples = ([getattr(step, name) for step in steps] for name in ("num_tokens", "num_samples"))
    return Block(
        step=steps[0].step,
        num_steps=len(steps),
        window=steps[0].window,
        start_ns=steps[0].start_ns,
        t=t,
        wall_ns=sum(step.wall_ns for step in steps),
        median_ns=round(median(step.wall_ns for step in steps)),
        max_ns=longest.wall_ns,
        max_step=longest.step,
        host_ns=summed(step.host_ns for step in steps),
        num_times=summed(step.num_times for step in steps),
        num_tokens=None if None in tokens else sum(tokens),
        num_samples=None if None in samples else sum(samples),
        num_compiles=sum(step.num_compiles for step in steps),
        loss=with_loss.loss,
        loss_step=None if with_loss.loss is None else with_loss.step,
    )


def _height(loss: float | None) -> float:
    """Return what puts NaN above everything, and an unknown loss below."""
    return -math.inf if loss is None else math.inf if math.isnan(loss) else loss


def _median_ns(blocks: Sequence[Block]) -> int:
    """Return the median of the blocks' medians, each counted as often as it has steps."""
    ordered = sorted(blocks, key=lambda block: block.median_ns)
    half = sum(block.num_steps for block in ordered) / 2
    counts = accumulate(block.num_steps for block in ordered)
    return next(block.median_ns for block, count in zip(ordered, counts) if count >= half)


def _gpu(parts: Sequence[tuple[GpuBlock, int]]) -> GpuBlock | None:
    if not parts:
        return None
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(GpuBlock)):
        known = [(getattr(gpu, name), weight) for gpu, weight in parts if getattr(gpu, name) is not None]
        values = [value for value, _ in known]
        if name == "throttle":
            found[name] = tuple(dict.fromkeys(reason for reasons in values for reason in reasons))
        elif not values:
            found[name] = None
        elif name == "energy_joules":
            found[name] = sum(values)
        elif name.startswith("min_"):
            found[name] = min(values)
        elif name in ("memory_bytes", "num_processes"):
            found[name] = max(values)
        else:
            found[name] = sum(value * weight for value, weight in known) / sum(weight for _, weight in known)
    return GpuBlock(**found)

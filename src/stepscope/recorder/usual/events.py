"""What the hooks note of usual steps (`steps.py`), and the steps that the writer's thread makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepscope.recorder import clock
from stepscope.recorder.step_facts import Forward

FORWARD, BACKWARD, BACKWARD_ENDED, DATA, DATA_ENDED, OPTIMIZER, OPTIMIZER_ENDED, END = range(8)
Event = tuple[int, int, Any]
"""One of these, when, and what is known about it."""
UsualStep = tuple[int, int, dict[str, int], tuple[int, int, int]]
"""Start, length and phases of a step in ns, and its tokens, samples and passes."""


def usual_steps(start_ns: int, events: list[Event]) -> Iterator[UsualStep]:
    """Yield each step of free running, summed up. None of them calls several models or starts a DataLoader."""
    cut_ns = start_ns
    label: str | None = None
    around: str | None = None
    following: str | None
    host_ns: dict[str, int] = {}
    num_tokens = num_samples = num_passes = 0
    waiting: Forward | None = None
    for kind, ns, what in events:
        if kind == BACKWARD:
            if waiting is not None and not waiting[4]:
                num_tokens += waiting[2].num_tokens or 0
                num_samples += waiting[2].num_samples or 0
                num_passes += 1
            waiting = None
            continue
        if kind == FORWARD:
            waiting = what
            if label == clock.UNATTRIBUTED:
                continue
            name, following = label or clock.BEFORE_FORWARD, clock.UNATTRIBUTED
        elif kind == DATA:
            name, following, around = label or clock.OTHER, clock.DATA, label
        elif kind == DATA_ENDED:
            name, following = clock.DATA, around
        else:
            name, following = label or clock.OTHER, None
        host_ns[name] = host_ns.get(name, 0) + ns - cut_ns
        cut_ns, label = ns, following
        if kind == END:
            yield start_ns, ns - start_ns, host_ns, (num_tokens, num_samples, num_passes)
            start_ns, host_ns, around = ns, {}, None
            num_tokens = num_samples = num_passes = 0

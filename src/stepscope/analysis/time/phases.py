"""The typical clean step's time by phase, in rows that add up to the step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepscope.trace.recording import StepSample

PHASES = ("data", "forward", "backward", "optimizer", "other")
BEFORE_FORWARD = "before_forward"
BEFORE_BACKWARD = "before_backward"
IDLE = "idle"
UNATTRIBUTED = "unattributed"


@dataclass(frozen=True)
class Phase:
    """One phase of the mean step, in nanoseconds."""

    name: str
    host_ns: float
    device_ns: float | None  # between the phase's CUDA events: GPU busy and idle time. None without a GPU.
    gpu_busy_ns: float | None
    """Union of the GPU work launched in this phase, from the trace window; at most `device_ns`."""


@dataclass(frozen=True)
class Row:
    """One row of a step's time; the shares add up to 1."""

    name: str
    ns: float
    share: float


def data_is_named(samples: Iterable[StepSample]) -> bool:
    """Return whether a DataLoader (or `stepscope.phase("data")`) shows the time spent on data."""
    return any("data" in sample.host_ns for sample in samples)


def phase_of(samples: Sequence[StepSample]) -> dict[str, str]:
    """Return the phase of each recorded stretch.

    The stretch before a forward is data if there is no DataLoader, else `other`. The stretch before a backward is the
    forward if none was seen (a compiled function hides it), else `other`.
    """
    forward_seen = any("forward" in sample.host_ns for sample in samples)
    return {
        **{name: name for name in PHASES},
        BEFORE_FORWARD: "other" if data_is_named(samples) else "data",
        BEFORE_BACKWARD: "other" if forward_seen else "forward",
    }


def mean_phases(samples: Sequence[StepSample], gpu_busy_ns: Mapping[str, float] | None) -> list[Phase]:
    """Return the mean step's phases; `gpu_busy_ns` is one traced step's GPU work by stretch, if there is a trace."""
    belongs = phase_of(samples)
    on_device = all(sample.device_ns is not None for sample in samples)
    host, device, busy = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
    for sample in samples:
        for label, ns in sample.host_ns.items():
            host[belongs.get(label, "other")] += ns / len(samples)
        for label, ns in (sample.device_ns or {}).items():
            device[belongs.get(label, "other")] += ns / len(samples)
    for label, busy_ns in (gpu_busy_ns or {}).items():
        busy[belongs.get(label, "other")] += busy_ns
    return [
        Phase(
            name,
            host[name],
            device[name] if on_device else None,
            # Kernels on a side stream can outlast their phase: a phase is never busier than it is long.
            min(device[name], busy[name]) if on_device and gpu_busy_ns is not None else None,
        )
        for name in PHASES
    ]


def rows(phases: Sequence[Phase], unattributed_busy_ns: float = 0.0) -> list[Row]:
    """Return rows that add up to the step: phases on a CPU; on a GPU, busy time by phase, idle, unattributed."""
    named: list[tuple[str, float]] = []
    if all(phase.gpu_busy_ns is not None and phase.device_ns is not None for phase in phases):
        waiting = sum((p.device_ns or 0.0) - (p.gpu_busy_ns or 0.0) for p in phases)
        unattributed = min(waiting, unattributed_busy_ns)
        named = [(phase.name, phase.gpu_busy_ns or 0.0) for phase in phases]
        named += [(IDLE, waiting - unattributed), (UNATTRIBUTED, unattributed)]
    elif all(phase.device_ns is not None for phase in phases):
        named = [(phase.name, phase.device_ns or 0.0) for phase in phases]
    else:
        named = [(phase.name, phase.host_ns) for phase in phases]
    total = sum(ns for _, ns in named)
    return [Row(name, ns, ns / total if total else 0.0) for name, ns in named]

"""Where a step goes, in rows that sum to it: of the host, and of the GPU of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.analysis.time.gpu_time import GpuTime
from stepscope.analysis.time.phases import IDLE, Phase, Row, rows


def host_rows(phases: Sequence[Phase]) -> list[Row]:
    """A recording's mean step on the host, by phase, whatever the GPU did meanwhile."""
    return rows([replace(phase, device_ns=None, gpu_busy_ns=None) for phase in phases])


def waiting_ns(phase: Phase) -> float | None:
    """How long the GPU had nothing to do between a phase's CUDA events; None where no trace tells."""
    if phase.device_ns is None or phase.gpu_busy_ns is None:
        return None
    return phase.device_ns - phase.gpu_busy_ns


def host_rows_of_trace(account: RankAccount) -> list[Row]:
    """The host's time by phase, a step's where there are steps; the shares are the account's."""
    steps = max(1, account.steps.height)
    table = account.phases.select("phase", "host_ns", "host_share")
    return [Row(name, ns / steps, share) for name, ns, share in table.iter_rows()]


def gpu_rows_of_trace(account: RankAccount) -> list[Row]:
    """The GPU's window by the phase that launched its work, with `unattributed` and `idle`, a step's where there are
    steps. Empty where the trace has no GPU work. The shares are of `GpuTime.window_ns` and sum to 1."""
    window_ns, steps = account.gpu_time.window_ns, max(1, account.steps.height)
    if not window_ns:
        return []
    parts = [*account.phases.select("phase", "device_ns").iter_rows(), (IDLE, account.gpu_time.idle_ns)]
    return [Row(name, ns / steps, ns / window_ns) for name, ns in parts]


def gpu_split(time: GpuTime) -> list[Row]:
    """The GPU's window by what it did: computing, communication and copies that nothing hid, idle; sums to it.

    >>> [(row.name, row.share) for row in gpu_split(GpuTime(window_ns=8, idle_ns=2, compute_ns=6)) if row.ns]
    [('compute', 0.75), ('idle', 0.25)]
    """
    parts = {
        "compute": time.compute_ns,
        "communication": time.exposed_communication_ns,
        "copies and fills": time.exposed_memory_ns,
        IDLE: time.idle_ns,
    }
    return [Row(name, ns, ns / time.window_ns) for name, ns in parts.items()] if time.window_ns else []

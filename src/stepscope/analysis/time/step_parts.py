"""A step's time in rows that add up to it: for the host, and for the GPU of a trace."""

from collections.abc import Sequence
from dataclasses import replace

from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.analysis.time.gpu_time import GpuTime
from stepscope.analysis.time.phases import IDLE, Phase, Row, rows


def host_rows(phases: Sequence[Phase]) -> list[Row]:
    """Return a recording's mean step on the host, by phase."""
    return rows([replace(phase, device_ns=None, gpu_busy_ns=None) for phase in phases])


def waiting_ns(phase: Phase) -> float | None:
    """Return GPU idle time between a phase's CUDA events; None without a trace."""
    if phase.device_ns is None or phase.gpu_busy_ns is None:
        return None
    return phase.device_ns - phase.gpu_busy_ns


def host_rows_of_trace(account: RankAccount) -> list[Row]:
    """Return host time by phase, per step if there are steps."""
    steps = max(1, account.steps.height)
    table = account.phases.select("phase", "host_ns", "host_share")
    return [Row(name, ns / steps, share) for name, ns, share in table.iter_rows()]


def gpu_rows_of_trace(account: RankAccount) -> list[Row]:
    """Return the GPU's window by launching phase, with `unattributed` and `idle`, per step if there are steps.

    Empty without GPU work. Shares are of `GpuTime.window_ns` and add up to 1.
    """
    window_ns, steps = account.gpu_time.window_ns, max(1, account.steps.height)
    if not window_ns:
        return []
    parts = [*account.phases.select("phase", "device_ns").iter_rows(), (IDLE, account.gpu_time.idle_ns)]
    return [Row(name, ns / steps, ns / window_ns) for name, ns in parts]


def gpu_split(time: GpuTime) -> list[Row]:
    """Return the GPU's window by activity: computing, exposed communication and copies, idle.

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

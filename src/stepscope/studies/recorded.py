"""Figures of recordings and traces that several studies use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepscope.document.model import Chart
from stepscope.errors import Unavailable
from stepscope.formatting import safe
from stepscope.studies.stored import Recorded, Stored
from stepscope.studies.study import Drawn, Records

if TYPE_CHECKING:
    from stepscope.session import Session


def step_of(recorded: Recorded) -> dict[str, Any]:
    """Return the step of a recording: knobs, time, throughput, phases, memory. What the device lacks is None."""
    source, summary, axes = recorded.source, recorded.source.summary, recorded.axes
    step, facts, counters = summary.step_ns, source.recording.facts, summary.counters
    if step is None or summary.throughput is None or summary.parameters is None:
        raise Unavailable(f"the recording of {axes['preset']} has no clean step")
    phases = {phase.name: phase.host_ns if phase.device_ns is None else phase.device_ns for phase in summary.phases}
    gauges = (counters.gpu_busy_share, counters.memory_controller_busy_share) if counters else (None, None)
    busy, controller = (None if gauge is None else gauge.mean for gauge in gauges)
    number, flops = int(summary.parameters["num_total"]), summary.flops
    losses = [sample.loss for sample in source.recording.samples if sample.loss is not None]
    peak = (facts.get("memory") or {}).get("peak_allocated_bytes")
    return {
        **axes,
        **{f"{name}_share": ns / sum(phases.values()) for name, ns in {"data": 0, **phases}.items()},
        "model": f"{axes['preset']} ({axes['batch']} × {axes['seq_len']}), {number:,} parameters",
        "num_parameters": number,
        "num_active_parameters": flops.num_active_parameters if flops else None,
        "step_ns": step.median,
        "tokens_per_s": summary.throughput.per_s,
        "model_flops": flops.model_flops if flops else None,
        "flops_per_s": flops.model_flops / step.median * 1e9 if flops else None,
        "mfu_share": summary.mfu.share if summary.mfu else None,
        "gpu_busy_share": busy,
        "memory_controller_busy_share": controller,
        "num_kernels": summary.num_kernels_per_step,
        "gpu_idle_share": next((row.share for row in summary.rows if row.name == "idle"), None),
        "peak_bytes": source.memory.account.peak_bytes if peak is None else peak,
        "loss": losses[0] if losses else None,
        "device_name": safe(str((facts.get("environment") or {}).get("device_name")), 80),
    }


def op_times(source: Session) -> tuple[list[tuple[str, float, float]], str]:
    """Return (op, calls, own ns) per traced step, longest first, and whose time it is. Nothing counts twice."""
    rank = source.analysis.ranks[0]
    where, num = "device" if rank.gpu_time.window_ns else "host", max(1, rank.steps.height)
    rows = rank.ops.sort(f"{where}_self_ns", descending=True).select("op", "num_calls", f"{where}_self_ns")
    return [(op or "no op", calls / num, ns / num) for op, calls, ns in rows.iter_rows() if ns], where


def differences(
    base: Session, new: Session, names: tuple[str, str], num: int, allow: tuple[str, ...] = ()
) -> Records:
    """Return the largest differences of two recordings or traces: by kernel class, on a CPU by op."""
    from stepscope.session.compare import compare

    pair = compare([base], [new], allow=allow).pairs[0]
    if pair.refused:
        raise Unavailable(f"the two are not comparable: {', '.join(each.what for each in pair.refused)}")
    found = {table.by: table for table in pair.tables}
    by = found.get("kernel_class") or found.get("op")
    if by is None:
        raise Unavailable("the recordings have no traces to compare")
    columns = ("what", *(f"{name}_ns" for name in names), "difference_ns")
    return [dict(zip(columns, (safe(row.name, 80), row.base, row.new, row.delta))) for row in by.rows[:num]]


def memory_chart(
    id: str, title: str, recorded: Callable[[Stored], Recorded], chart: str = "memory_timeline"
) -> Drawn:
    def draw(stored: Stored) -> Chart:
        from stepscope.document.sections.memory import parts

        for part in parts(recorded(stored).source):
            if isinstance(part, Chart) and part.id == chart:
                return part
        raise Unavailable(f"the recording has no chart {chart}")

    return Drawn(id, title, draw)

"""Traces as subjects of a comparison, and a traced step's time and memory as parts of a whole."""

from collections.abc import Sequence

import polars as pl

from stepscope.analysis.comparison.compare import ASPECTS, Parts, Subject
from stepscope.analysis.comparison.metrics import Measure
from stepscope.analysis.kernels.ops import module_groups
from stepscope.analysis.memory.allocator_events import at_peak_by
from stepscope.analysis.ranks.rank_account import Analysis, RankAccount
from stepscope.analysis.time.phases import IDLE, UNATTRIBUTED
from stepscope.analysis.time.statistics import quantile

TRACED_STEP, CLEAN_STEP, GPU_WINDOW = "a traced step", "a clean step", "the GPU's whole window"
OVERLAP = "at the same time as other work"
OUTSIDE = "outside every module"
NO_OP = "outside every op"
NO_MODULES = "the trace has no module labels: record one with stepscope run SCRIPT"
NO_STEPS = (
    "the trace does not mark where steps end: call profiler.step(), name ranges `step 12`, or use stepscope run"
)
NO_MEMORY = "the trace has no memory totals: use profile(profile_memory=True), or stepscope run SCRIPT"
# With more GPU work outside of steps, figures per step are not exact.
_MUCH_OUTSIDE = 0.05


def trace_subject(analysis: Analysis, name: str) -> Subject:
    """Return the subject of a trace, or of all ranks' traces with the mean over ranks."""
    ranks = analysis.ranks
    measures: dict[str, Measure] = {}
    missing: dict[str, str] = {}
    durations, busy = _by_step(ranks, "duration_ns"), _by_step(ranks, "gpu_busy_ns")
    if durations:
        measures["step_time"] = Measure(_median(durations), durations)
        if has_gpu(ranks) and min(busy) > 0:
            measures["gpu_busy_time"] = Measure(_median(busy), busy)
        if has_gpu(ranks):
            counts = [rank.launches["num_kernel_launches_per_step"] or 0 for rank in ranks]
            measures["kernels"] = Measure(sum(counts) / len(counts))
    else:
        missing["step_time"] = NO_STEPS
    tables, lacks = time_tables(ranks)
    # The GPU with the highest peak, else the CPU, if its totals are known.
    main = [min(rank.memory, key=lambda summary: summary.device_type == "cpu") for rank in ranks if rank.memory]
    memory = [summary for summary in main if summary.is_start_known]
    if memory:
        largest = max(memory, key=lambda summary: summary.peak_allocated_bytes)
        peak = largest.peak_allocated_bytes
        measures["peak_memory"] = Measure(peak)
        if largest.peak_reserved_bytes is not None:
            measures["peak_reserved_memory"] = Measure(largest.peak_reserved_bytes)
        ops = {op: float(size) for op, size in at_peak_by(largest, "op").select("name", "bytes").iter_rows()}
        tables["memory"] = (Parts("peak allocated, by allocating op", "bytes", peak, ops),)
    else:
        missing |= {"peak_memory": NO_MEMORY, "memory": NO_MEMORY}
    first = ranks[0]
    return Subject(
        name=name,
        measures=measures,
        identity={**dict.fromkeys(ASPECTS), "device": first.device_name, "topology": len(ranks)},
        context={
            "ranks": ", ".join(str(rank.rank) for rank in ranks),
            "steps found by": first.step_source,
            "phases found by": first.phase_source,
            "modules found by": first.module_source,
            "steps in the trace": min(rank.steps.height for rank in ranks),
        },
        tables=tables,
        missing={**missing, **lacks},
        notes=(*analysis.warnings, *_work_outside(ranks)),
    )


def has_gpu(ranks: Sequence[RankAccount]) -> bool:
    return any(rank.gpu_time.busy_ns for rank in ranks)


def time_tables(
    ranks: Sequence[RankAccount], clean_ns: float | None = None, clean_idle_ns: float | None = None
) -> tuple[dict[str, tuple[Parts, ...]], dict[str, str]]:
    """Return a step's time by phase, kernel class (on a CPU: op) and module, and why a table is missing.

    Kernels take as long in a traced step as in a clean one, so GPU time is compared with the clean step if known, and
    the rest is idle. The profiler slows down the host, so host time is compared with the traced step.
    """
    num_steps = sum(rank.steps.height for rank in ranks)
    on_gpu = has_gpu(ranks)
    if not num_steps and not on_gpu:
        return {}, dict.fromkeys(("phase", "op", "module"), NO_STEPS)
    device, host = "device_ns" if on_gpu else "host_ns", "device_self_ns" if on_gpu else "host_self_ns"
    extra: dict[str, float] = {}
    num = num_steps or len(ranks)
    busy_ns = sum(rank.gpu_time.busy_ns for rank in ranks) / num
    if not num_steps:
        of = GPU_WINDOW
        whole = sum(rank.gpu_time.window_ns for rank in ranks) / num
        extra[IDLE] = sum(rank.gpu_time.idle_ns for rank in ranks) / num
    else:
        of = TRACED_STEP
        whole = _median(_by_step(ranks, "duration_ns"))
        if on_gpu:
            lasted = sum(int(rank.steps["duration_ns"].sum()) for rank in ranks)
            extra[IDLE] = (lasted - sum(int(rank.steps["gpu_busy_ns"].sum()) for rank in ranks)) / num
        if on_gpu and clean_ns is not None:
            idle_ns = max(0.0, clean_ns - busy_ns) if clean_idle_ns is None else clean_idle_ns
            of, whole, extra[IDLE] = CLEAN_STEP, clean_ns, idle_ns

    def parts(
        frames: Sequence[pl.DataFrame], value: str, nameless: str, is_summed: bool = False
    ) -> tuple[Parts, ...]:
        sums: dict[str, float] = {}
        for frame in frames:  # the first column has the names
            for key, ns in frame.select(frame.columns[0], value).iter_rows():
                row = nameless if key is None else key
                sums[row] = sums.get(row, 0.0) + ns / num
        beside = busy_ns - sum(sums.values())
        # Kernels on several streams overlap: their sum exceeds the busy time.
        overlap = {OVERLAP: beside} if is_summed and beside < -1 else {}
        return (Parts(of, "ns", whole, {**sums, **overlap, **extra}),)

    tables = {"phase": parts([rank.phases for rank in ranks], device, UNATTRIBUTED)}
    if on_gpu:
        tables["kernel_class"] = parts([rank.kernel_classes for rank in ranks], "total_ns", UNATTRIBUTED, on_gpu)
    else:
        tables["op"] = parts([rank.ops for rank in ranks], "host_self_ns", NO_OP)
    if any(rank.module_source == "none" for rank in ranks):
        return tables, {"module": NO_MODULES}
    tables["module"] = parts([module_groups(rank.modules) for rank in ranks], host, OUTSIDE, on_gpu)
    return tables, {}


def _by_step(ranks: Sequence[RankAccount], column: str) -> tuple[float, ...]:
    """Return one figure per step that every rank has: the mean over ranks."""
    by_rank = [dict(rank.steps.select("step", column).iter_rows()) for rank in ranks]
    common = [step for step in by_rank[0] if all(step in steps for steps in by_rank)]
    return tuple(sum(steps[step] for steps in by_rank) / len(by_rank) for step in common)


def _median(values: Sequence[float]) -> float:
    return quantile(sorted(values), 0.5)


def _work_outside(ranks: Sequence[RankAccount]) -> list[str]:
    busy = sum(rank.gpu_time.busy_ns for rank in ranks)
    outside = sum(
        int(rank.phases.filter(pl.col("phase") == UNATTRIBUTED)["device_ns"].sum())
        for rank in ranks
        if rank.steps.height
    )
    if not busy or outside <= _MUCH_OUTSIDE * busy:
        return []
    return [
        f"{100 * outside / busy:.0f} % of the GPU's work was launched outside of the trace's steps but is included "
        "in the tables"
    ]

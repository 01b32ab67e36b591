"""Points of a sweep as flat records, for `results.csv` and `bench --json`."""

from __future__ import annotations

import hashlib
from typing import Any

from stepscope.analysis.comparison.sweeps import PointSummary, SweepSummary

_FIGURES = (
    "first_call_ns", "compile_ns", "tokens_per_s", "flops_counted", "flops_formula", "flops_coverage",
    "flops_per_s", "peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes",
    "before_backward_bytes", "loss", "final_loss", "num_parameters", "num_active_parameters", "num_tokens",
    "num_kernels", "num_kernel_launches", "gpu_busy_share", "max_batch", "speedup", "break_even_steps",
    "loss_deviation", "differs", "is_best", "is_tied", "is_noisy",
)  # fmt: skip


def record_of(point: PointSummary) -> dict[str, Any]:
    """Return a point as one flat record; times in nanoseconds, sizes in bytes."""
    figures: dict[str, Any] = {"status": point.status, "reason": point.reason}
    for prefix, distribution in (("time", point.time), ("host", point.host)):
        for name in ("median", "p10", "p90", "mean", "std", "ci_low", "ci_high"):
            figures[f"{prefix}_{name}_ns"] = None if distribution is None else round(getattr(distribution, name))
    figures["num_samples"] = None if point.time is None else point.time.num_samples
    figures |= {name: getattr(point, name) for name in _FIGURES}
    figures["notes"] = "; ".join(point.notes) or None
    figures["mfu_share"] = None if point.mfu is None else point.mfu.share
    figures["mfu_limit"] = None if point.mfu is None else point.mfu.limit
    figures["device_name"] = point.device_name
    figures.update({f"fact_{name}": value for name, value in point.facts.items()})
    figures.update({name.replace(".", "_"): value for name, value in point.compiler.items()})
    # A knob may have the name of a figure, such as hydra's `loss`.
    axes = {f"knob_{name}" if name in figures else name: value for name, value in point.axes.items()}
    return {"hash": point.hash, **axes, **figures}


def sweep_json(sweep: SweepSummary) -> dict[str, Any]:
    """Return the sweep as plain values (docs/bench.md)."""
    return {
        "num_by_status": dict(sweep.num_by_status),
        "varying": list(sweep.varying),
        "constants": dict(sweep.constants),
        "points": [record_of(point) for point in sweep.points],
    }


def hash_of(sweep: SweepSummary) -> str:
    return hashlib.sha256("".join(point.hash for point in sweep.points).encode("utf-8", "replace")).hexdigest()[:12]

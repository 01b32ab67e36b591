"""Kernels by name, class, phase and size; launches and queue waits."""

import polars as pl

from stepscope.analysis.structure.intervals import last_covering, spans, sweep
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import matches
from stepscope.analysis.structure.once import once
from stepscope.analysis.time.phases import PHASES, UNATTRIBUTED

_NUM = pl.len().cast(pl.Int64)
SIZES = ("under 5 µs", "5 to 20 µs", "20 to 100 µs", "100 µs to 1 ms", "over 1 ms")
BORDERS_NS = (5_000, 20_000, 100_000, 1_000_000)
"""Borders between size groups, in the upper group; 5 µs is about the cost of a launch."""


def top_kernels(device: pl.DataFrame) -> pl.DataFrame:
    """Return GPU work by name, the longest first.

    `share` is relative to the sum of all durations, so shares add up to 1.
    """
    whole = max(1, int(device["duration_ns"].sum()))
    length = pl.col("duration_ns")
    return (
        device.group_by("name")
        .agg(
            pl.col("class").mode().sort().first(),
            _NUM.alias("num_calls"),
            length.sum().alias("total_ns"),
            length.mean().alias("mean_ns"),
            _nearest(length, 0.5).alias("p50_ns"),
            _nearest(length, 0.99).alias("p99_ns"),
        )
        .with_columns(pl.col("name").cast(pl.String), (pl.col("total_ns") / whole).alias("share"))
        .sort("total_ns", "name", descending=[True, False])
    )


def kernel_classes(device: pl.DataFrame) -> pl.DataFrame:
    """Return GPU work by class, the longest first; `other` is unclassified."""
    whole = max(1, int(device["duration_ns"].sum()))
    return (
        device.group_by("class")
        .agg(_NUM.alias("num_calls"), pl.col("duration_ns").sum().alias("total_ns"))
        .with_columns((pl.col("total_ns") / whole).alias("share"))
        .sort("total_ns", "class", descending=[True, False])
    )


def gemm_share_by_phase(device: pl.DataFrame) -> pl.DataFrame:
    """Return `total_ns`, `gemm_ns` and `gemm_share` by launching `phase` (null if unknown)."""
    return (
        device.group_by("phase")
        .agg(
            pl.col("duration_ns").sum().alias("total_ns"),
            pl.col("duration_ns").filter(pl.col("class") == "gemm").sum().alias("gemm_ns"),
        )
        .with_columns((pl.col("gemm_ns") / pl.col("total_ns").clip(1)).alias("gemm_share"))
        .sort("phase")
    )


def kernel_sizes(device: pl.DataFrame) -> pl.DataFrame:
    """Return kernels by duration: `size`, `num_kernels`, `total_ns`."""
    kernels = device.select("duration_ns").filter(device["kind"] == "kernel")
    border = pl.Series(BORDERS_NS, dtype=pl.Int64).search_sorted(kernels["duration_ns"], side="right")
    counted = kernels.group_by(pl.Series("size", SIZES).gather(border)).agg(
        _NUM.alias("num_kernels"), pl.col("duration_ns").sum().alias("total_ns")
    )
    every = pl.DataFrame({"size": list(SIZES)})
    return every.join(counted, on="size", how="left", maintain_order="left").fill_null(0)


@once
def launches(linked: Linked) -> dict[str, float | int | None]:
    """Return launch statistics: kernels per step, latency from launch to start, queue depth.

    `num_unlaunched_kernels` have no launch in the trace; they belong to no step and are not in
    `num_kernel_launches_per_step`. Latency counts from the start of the launching call. A kernel that starts before
    its launch (clocks differ) has latency zero and is counted in `num_before_launch`.
    """
    device = linked.device
    kernels = device.select("launch", "launch_start_ns", "start_ns", "end_ns", "step").filter(
        device["kind"] == "kernel"
    )
    launched = kernels.filter(pl.col("launch").is_not_null())
    raw = launched["start_ns"] - launched["launch_start_ns"]
    depth = _queue_depths(launched)
    graph = matches(linked.host["name"].gather(launched["launch"]), "GraphLaunch")
    return {
        "num_kernels": kernels.height,
        "num_unlaunched_kernels": kernels.height - launched.height,
        "num_kernel_launches_per_step": kernels["step"].count() / linked.steps.num if linked.steps.num else None,
        "num_graph_kernels": int(graph.sum()),
        "num_graph_launches": launched.filter(graph)["launch"].n_unique(),
        "latency_p50_ns": pl.select(_nearest(pl.lit(raw.clip(0)), 0.5)).item(),
        "latency_p99_ns": pl.select(_nearest(pl.lit(raw.clip(0)), 0.99)).item(),
        "num_before_launch": int((raw < 0).sum()),
        "queue_depth_p50": pl.select(_nearest(pl.lit(depth), 0.5)).item(),
        "queue_depth_max": int(depth.max()) if len(depth) else None,  # type: ignore[arg-type]  # numbers
        "starved_share": float((depth == 0).mean()) if len(depth) else None,  # type: ignore[arg-type]  # numbers
    }


def _queue_depths(launched: pl.DataFrame) -> pl.Series:
    """Return for each launch how many earlier kernels had not finished."""
    issued = launched["launch_start_ns"].sort()
    # Clock differences can make a kernel end before its launch: it counts as unfinished until then.
    finished = launched.select(pl.max_horizontal("end_ns", pl.col("launch_start_ns") + 1)).to_series().sort()
    before = pl.int_range(len(issued), eager=True)
    depths: pl.Series = before - finished.search_sorted(issued, side="right").cast(pl.Int64)
    return depths.clip(0)


def queue_depth_over_time(linked: Linked, num_points: int = 100) -> pl.DataFrame:
    """Return launched and unfinished kernels at evenly spaced moments: `time_ns`, `depth`."""
    launched = linked.device.select("kind", "launch", "launch_start_ns", "end_ns")
    launched = launched.filter(pl.col("kind") == "kernel", pl.col("launch").is_not_null())
    if launched.is_empty():
        return pl.DataFrame(schema={"time_ns": pl.Int64, "depth": pl.Int64})
    first, last = int(launched["launch_start_ns"].min()), int(launched["end_ns"].max())  # type: ignore[arg-type]
    times = pl.Series([first + (last - first) * i // num_points for i in range(num_points)], dtype=pl.Int64)
    issued = launched["launch_start_ns"].sort().search_sorted(times, side="right").cast(pl.Int64)
    finished = launched["end_ns"].sort().search_sorted(times, side="right").cast(pl.Int64)
    return pl.DataFrame({"time_ns": times, "depth": (issued - finished).clip(0)})


def device_phases(linked: Linked) -> pl.DataFrame:
    """Return GPU time by launching phase: `phase`, `busy_ns`, `num_kernels`; the last row is `unattributed`.

    With steps, only work launched in steps is attributed. A moment with work of two phases counts for the later
    phase, and as `unattributed` only if no other phase runs, so `busy_ns` adds up to the busy time.
    """
    device = linked.device
    every = pl.DataFrame({"phase": [*PHASES, UNATTRIBUTED]})
    # Phases cover all host time, so every launch has one.
    is_owned = pl.col("step" if linked.steps.num else "phase").is_not_null()
    phase = pl.when(is_owned).then(pl.col("phase").cast(pl.String)).otherwise(pl.lit(UNATTRIBUTED))
    named = device.select("kind", "start_ns", "duration_ns", phase.fill_null("other").alias("phase"))
    counts = named.filter(pl.col("kind") == "kernel").group_by("phase").agg(_NUM.alias("num_kernels"))
    stretches = sweep({phase: spans(named, pl.col("phase") == phase) for phase in every["phase"]})
    owner = last_covering((UNATTRIBUTED, "other", *PHASES[:-1])).alias("phase")
    sums = stretches.group_by(owner).agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("busy_ns"))
    joined = every.join(sums, on="phase", how="left", maintain_order="left")
    return joined.join(counts, on="phase", how="left", maintain_order="left").fill_null(0)


def _nearest(values: pl.Expr, share: float) -> pl.Expr:
    """Return the quantile as a value that occurs, without interpolation."""
    return values.quantile(share, "nearest").cast(pl.Int64)

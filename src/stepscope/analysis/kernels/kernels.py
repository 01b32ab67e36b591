"""Kernels by name, by class and by phase; their launches, how long they wait in the queue, how large they are."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.structure.intervals import spans, sweep
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.time.phases import PHASES, UNATTRIBUTED

SIZES = ("under 5 µs", "5 to 20 µs", "20 to 100 µs", "100 µs to 1 ms", "over 1 ms")
BORDERS_NS = (5_000, 20_000, 100_000, 1_000_000)
"""Between these sizes; a kernel of a border is of the larger. 5 µs is about what a launch costs."""


def top_kernels(device: pl.DataFrame) -> pl.DataFrame:
    """GPU work by name, longest first.

    `name`, `class`, `num_calls`, `total_ns`, `mean_ns`, `p50_ns`, `p99_ns`, `share`. The share is of the sum of all
    durations, so that the shares of all names add up to 1.
    """
    whole = max(1, int(device["duration_ns"].sum()))
    length = pl.col("duration_ns")
    return (
        device.group_by("name")
        .agg(
            pl.col("class").mode().sort().first(),
            pl.len().cast(pl.Int64).alias("num_calls"),
            length.sum().alias("total_ns"),
            length.mean().alias("mean_ns"),
            _nearest(length, 0.5).alias("p50_ns"),
            _nearest(length, 0.99).alias("p99_ns"),
        )
        .with_columns(pl.col("name").cast(pl.String), (pl.col("total_ns") / whole).alias("share"))
        .sort("total_ns", "name", descending=[True, False])
    )


def kernel_classes(device: pl.DataFrame) -> pl.DataFrame:
    """GPU work by class, longest first: `class`, `num_calls`, `total_ns`, `share`; `other` is what no rule knows."""
    whole = max(1, int(device["duration_ns"].sum()))
    return (
        device.group_by("class")
        .agg(pl.len().cast(pl.Int64).alias("num_calls"), pl.col("duration_ns").sum().alias("total_ns"))
        .with_columns((pl.col("total_ns") / whole).alias("share"))
        .sort("total_ns", "class", descending=[True, False])
    )


def gemm_share_by_phase(device: pl.DataFrame) -> pl.DataFrame:
    """`phase` (null: not known), `total_ns` of the GPU work it launched, `gemm_ns`, `gemm_share`."""
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
    """Kernels by duration: `size`, `num_kernels`, `total_ns`."""
    kernels = device.select("duration_ns").filter(device["kind"] == "kernel")
    border = pl.Series(BORDERS_NS, dtype=pl.Int64).search_sorted(kernels["duration_ns"], side="right")
    size = pl.Series(SIZES).gather(border)
    counted = (
        kernels.with_columns(size.alias("size"))
        .group_by("size")
        .agg(pl.len().cast(pl.Int64).alias("num_kernels"), pl.col("duration_ns").sum().alias("total_ns"))
    )
    every = pl.DataFrame({"size": list(SIZES)})
    return every.join(counted, on="size", how="left", maintain_order="left").fill_null(0)


def launches(linked: Linked) -> dict[str, float | int | None]:
    """How kernels are launched: how many a step, how long from launch to start, how many wait in the queue.

    `num_kernels` is of all, `num_unlaunched_kernels` of those whose launch is not in the trace: they belong to no
    step, and are not in `num_kernel_launches_per_step`.

    Latency counts from the start of the launching call. A kernel that starts before its launch, which clocks of two
    devices can make it do, has a latency of zero and is counted in `num_before_launch`.
    """
    device = linked.device
    kernels = device.select("launch", "launch_start_ns", "start_ns", "end_ns", "step").filter(
        device["kind"] == "kernel"
    )
    launched = kernels.filter(pl.col("launch").is_not_null())
    raw = launched["start_ns"] - launched["launch_start_ns"]
    latency = raw.clip(0)
    depth = _queue_depths(launched)
    graph = linked.host["name"].gather(launched["launch"]).cast(pl.String).str.contains("GraphLaunch")
    return {
        "num_kernels": kernels.height,
        "num_unlaunched_kernels": kernels.height - launched.height,
        "num_kernel_launches_per_step": kernels["step"].count() / linked.steps.num if linked.steps.num else None,
        "num_graph_kernels": int(graph.sum()),
        "num_graph_launches": launched.filter(graph)["launch"].n_unique(),
        "latency_p50_ns": pl.select(_nearest(latency, 0.5)).item(),
        "latency_p99_ns": pl.select(_nearest(latency, 0.99)).item(),
        "num_before_launch": int((raw < 0).sum()),
        "queue_depth_p50": pl.select(_nearest(depth, 0.5)).item(),
        "queue_depth_max": int(depth.max()) if len(depth) else None,  # type: ignore[arg-type]
        "starved_share": float((depth == 0).mean()) if len(depth) else None,  # type: ignore[arg-type]
    }


def _queue_depths(launched: pl.DataFrame) -> pl.Series:
    """For each launch, how many kernels launched before it had not finished."""
    issued = launched["launch_start_ns"].sort()
    # With a clock behind the host's a kernel can end before its launch: it has not before it was launched.
    finished = launched.select(pl.max_horizontal("end_ns", pl.col("launch_start_ns") + 1)).to_series().sort()
    before = pl.Series(range(len(issued)), dtype=pl.Int64)
    depths: pl.Series = before - finished.search_sorted(issued, side="right").cast(pl.Int64)
    return depths.clip(0)


def queue_depth_over_time(linked: Linked, num_points: int = 100) -> pl.DataFrame:
    """Launched and unfinished kernels at evenly spaced moments: `time_ns`, `depth`."""
    device = linked.device.select("kind", "launch", "launch_start_ns", "end_ns")
    launched = device.filter(pl.col("kind") == "kernel", pl.col("launch").is_not_null())
    if launched.is_empty():
        return pl.DataFrame(schema={"time_ns": pl.Int64, "depth": pl.Int64})
    first, last = int(launched["launch_start_ns"].min()), int(launched["end_ns"].max())  # type: ignore[arg-type]
    times = pl.Series([first + (last - first) * i // num_points for i in range(num_points)], dtype=pl.Int64)
    issued = launched["launch_start_ns"].sort().search_sorted(times, side="right").cast(pl.Int64)
    finished = launched["end_ns"].sort().search_sorted(times, side="right").cast(pl.Int64)
    return pl.DataFrame({"time_ns": times, "depth": (issued - finished).clip(0)})


def device_phases(linked: Linked) -> pl.DataFrame:
    """GPU time by the phase that launched it: `phase`, `busy_ns`, `num_kernels`; the last row is `unattributed`.

    Of a trace with steps, the work that steps launched; what was launched outside them, or by a call that the trace
    does not have, is unattributed. A moment in which work of two phases runs goes to the later phase, and to
    `unattributed` only when no other does, so that `busy_ns` adds up to the busy time.
    """
    device = linked.device
    every = pl.DataFrame({"phase": [*PHASES, UNATTRIBUTED]})
    if device.is_empty():
        return every.with_columns(busy_ns=pl.lit(0, pl.Int64), num_kernels=pl.lit(0, pl.Int64))
    # Phases are all of the host's time: what was launched has one.
    is_owned = pl.col("step" if linked.steps.num else "phase").is_not_null()
    phase = pl.when(is_owned).then(pl.col("phase").cast(pl.String)).otherwise(pl.lit(UNATTRIBUTED))
    named = device.select("kind", "start_ns", "duration_ns", phase.fill_null("other").alias("phase"))
    counts = (
        named.filter(pl.col("kind") == "kernel").group_by("phase").agg(pl.len().cast(pl.Int64).alias("num_kernels"))
    )
    stretches = sweep({phase: spans(named, pl.col("phase") == phase) for phase in every["phase"]})
    owner = pl.lit(None, pl.String)
    for name in (UNATTRIBUTED, "other", *PHASES[:-1]):
        owner = pl.when(pl.col(name)).then(pl.lit(name)).otherwise(owner)
    sums = (
        stretches.with_columns(owner.alias("phase"))
        .group_by("phase")
        .agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("busy_ns"))
    )
    joined = every.join(sums, on="phase", how="left", maintain_order="left")
    return joined.join(counts, on="phase", how="left", maintain_order="left").fill_null(0)


def _nearest(values: pl.Expr | pl.Series, share: float) -> pl.Expr:
    """The value below which such a share lies: one that occurs, none between two."""
    column = pl.lit(values) if isinstance(values, pl.Series) else values
    return column.quantile(share, "nearest").cast(pl.Int64)

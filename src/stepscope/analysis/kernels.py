"""Kernels by name, by class and by phase; their launches, how long they wait in the queue, how large they are."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.intervals import spans, sweep
from stepscope.analysis.links import Linked

SIZES_NS = (0, 5_000, 20_000, 100_000, 1_000_000)
"""Borders between kernels called tiny, small, medium, large and huge: 5 µs is about what a launch costs."""
SIZES = ("under 5 µs", "5 to 20 µs", "20 to 100 µs", "100 µs to 1 ms", "over 1 ms")


def top_kernels(device: pl.DataFrame, most: int | None = None) -> pl.DataFrame:
    """GPU work by name, longest first.

    `name`, `class`, `num_calls`, `total_ns`, `mean_ns`, `p50_ns`, `p99_ns`, `share`. The share is of the sum of all
    durations, so that the shares of all names add up to 1.
    """
    whole = max(1, int(device["duration_ns"].sum()))
    length = pl.col("duration_ns")
    table = (
        device.group_by("name")
        .agg(
            pl.col("class").mode().sort().first(),
            pl.len().cast(pl.Int64).alias("num_calls"),
            length.sum().alias("total_ns"),
            length.mean().alias("mean_ns"),
            length.quantile(0.5, "nearest").cast(pl.Int64).alias("p50_ns"),
            length.quantile(0.99, "nearest").cast(pl.Int64).alias("p99_ns"),
        )
        .with_columns(pl.col("name").cast(pl.String), (pl.col("total_ns") / whole).alias("share"))
        .sort("total_ns", "name", descending=[True, False])
    )
    return table if most is None else table.head(most)


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
    """`phase`, `total_ns` of its GPU work, `gemm_ns`, `gemm_share`."""
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
    border = pl.Series(SIZES_NS[1:], dtype=pl.Int64).search_sorted(kernels["duration_ns"], side="right")
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
    inside = kernels.filter(pl.col("step").is_not_null())
    graph = linked.host["name"].gather(launched["launch"]).cast(pl.String).str.contains("GraphLaunch")
    return {
        "num_kernels": kernels.height,
        "num_kernel_launches_per_step": inside.height / linked.steps.num if linked.steps.num else None,
        "num_graph_kernels": int(graph.sum()),
        "num_graph_launches": launched.filter(graph)["launch"].n_unique(),
        "latency_p50_ns": _quantile(latency, 0.5),
        "latency_p99_ns": _quantile(latency, 0.99),
        "num_before_launch": int((raw < 0).sum()),
        "queue_depth_p50": _quantile(depth, 0.5),
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
    """GPU time by the phase that launched it: `phase`, `busy_ns`, `num_kernels`.

    A moment in which work of two phases runs goes to the later phase, so that `busy_ns` adds up to the busy time.
    """
    device = linked.device
    order = ("data", "forward", "backward", "optimizer", "other")
    named = device.select("kind", "start_ns", "duration_ns", pl.col("phase").fill_null("other"))
    counts = (
        named.filter(pl.col("kind") == "kernel")
        .group_by(pl.col("phase").cast(pl.String))
        .agg(pl.len().cast(pl.Int64).alias("num_kernels"))
    )
    every = pl.DataFrame({"phase": list(order)})
    if device.is_empty():
        return every.with_columns(busy_ns=pl.lit(0, pl.Int64), num_kernels=pl.lit(0, pl.Int64))
    stretches = sweep({phase: spans(named, pl.col("phase") == phase) for phase in order})
    owner = pl.lit(None, pl.String)
    for phase in ("other", *order[:-1]):
        owner = pl.when(pl.col(phase)).then(pl.lit(phase)).otherwise(owner)
    sums = (
        stretches.with_columns(owner.alias("phase"))
        .group_by("phase")
        .agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("busy_ns"))
    )
    joined = every.join(sums, on="phase", how="left", maintain_order="left")
    return joined.join(counts, on="phase", how="left", maintain_order="left").fill_null(0)


def _quantile(values: pl.Series, share: float) -> int | None:
    found = values.quantile(share, "nearest")
    return None if found is None else int(found)

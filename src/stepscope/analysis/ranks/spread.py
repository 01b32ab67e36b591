"""How the parts of a step are spread over many ranks, and which ranks stand out."""

from collections.abc import Sequence

import polars as pl

from stepscope.analysis.ranks.rank_account import RankSummary

_FAR = 5.0  # spreads from the median: half of the ranks lie within one
_LEAST_SHARE = 0.02  # of a step: a smaller difference does not matter
_GPU = {
    "GPU compute": "compute_ns",
    "GPU communication": "exposed_communication_ns",
    "GPU copies": "exposed_memory_ns",
    "GPU idle": "idle_ns",
}


def rank_parts(summaries: Sequence[RankSummary]) -> pl.DataFrame:
    """Return a row per rank: `rank`, then the time of each part of its step in ns, on the GPU and on the host.

    Communication and copies are what no computation overlaps. Parts that no rank has are left out.
    """
    rows = []
    for each in summaries:
        gpu = {part: getattr(each.gpu_time, name) / max(1, each.num_steps) for part, name in _GPU.items()}
        rows.append({"rank": each.rank, **gpu, **{f"host {phase}": ns for phase, ns in each.host_ns.items()}})
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pl.DataFrame([{name: row.get(name, 0.0) for name in names} for row in rows], infer_schema_length=None)
    return table.select("rank", *(name for name in names[1:] if table[name].sum()))


def long_parts(parts: pl.DataFrame) -> pl.DataFrame:
    """Return a row per rank and part: `rank`, `part`, `time_ns`, `median_ns` of all ranks, and `excess_share`.

    That is how much longer it is than the median, as a share of a median step; negative if it is shorter.
    """
    names = [name for name in parts.columns if name != "rank"]
    sides = [[name for name in names if name.startswith(side)] for side in ("GPU", "host")]
    whole = max((parts.select(pl.sum_horizontal(side).median()).item() for side in sides if side), default=0.0)
    table = parts.unpivot(names, index="rank", variable_name="part", value_name="time_ns")
    table = table.with_columns(median_ns=pl.col("time_ns").median().over("part"))
    return table.with_columns(excess_share=(pl.col("time_ns") - pl.col("median_ns")) / max(1.0, whole))


def spread(long: pl.DataFrame) -> pl.DataFrame:
    """Return how each part is spread over the ranks: `part`, quantiles in ns, and the ranks at both ends."""
    time = pl.col("time_ns")
    return long.group_by("part", maintain_order=True).agg(
        min_ns=time.min(),
        p05_ns=time.quantile(0.05, "linear"),
        median_ns=pl.col("median_ns").first(),
        p95_ns=time.quantile(0.95, "linear"),
        max_ns=time.max(),
        min_rank=pl.col("rank").sort_by("time_ns", "rank").first(),
        max_rank=pl.col("rank").sort_by(-time, "rank").first(),
    )


def outliers(long: pl.DataFrame) -> pl.DataFrame:
    """Return ranks with a part far from all others', the largest difference first.

    Far: more than five times the median distance from the median, and 2 % of a step.
    """
    away = (pl.col("time_ns") - pl.col("median_ns")).abs()
    usual = away.median().over("part")
    far = (away > _FAR * usual) & (pl.col("excess_share").abs() > _LEAST_SHARE)
    return long.filter(far).sort(pl.col("excess_share").abs(), "rank", descending=[True, False])


def in_blocks(long: pl.DataFrame, most: int) -> pl.DataFrame:
    """Return the slowest rank of each block of neighboring ranks, at most `most` blocks: `first`, `last`, `part`,
    `rank` and its `excess_share`."""
    ranks = long["rank"].unique().sort()
    size = -(-len(ranks) // most)
    place = pl.DataFrame({"rank": ranks, "block": [index // size for index in range(len(ranks))]})
    return (
        long.join(place, on="rank")
        .sort("excess_share", "rank", descending=[True, False])
        .group_by("block", "part", maintain_order=True)
        .agg(pl.col("rank", "excess_share").first(), first=pl.col("rank").min(), last=pl.col("rank").max())
        .sort("block")
    )

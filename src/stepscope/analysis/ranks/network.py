"""Whether the network is slow: how long equal collectives take in each group once all of its ranks have come.

Ranks leave a collective together, so its shortest kernel, that of the rank that came last, is the transfer alone, on
any clock. A slow link slows down its whole group. So groups can be told apart, and calls in time; but not the links
of a group.
"""

import polars as pl

from stepscope.analysis.kernels.copies import bandwidth
from stepscope.analysis.ranks.collectives import bus_factor
from stepscope.analysis.ranks.side_by_side import ENOUGH_CALLS, Stragglers

SLOW = 1.5  # times the usual transfer
_EQUAL = ["collective", "bytes", "group_size"]


def timed_transfers(found: Stragglers) -> pl.DataFrame:
    """Return calls whose transfer can be compared with others': `call`, `step`, `members`, `transfer_ns`, `usual_ns`,
    and `excess_ns` of those that take `SLOW` times as long as usual.

    If a rank of the group has no trace, it may have come last: such calls are left out. The usual transfer is the
    median of the other groups that make such calls, else of this group's calls.
    """
    calls = (
        found.arrivals.group_by("call")
        .agg(
            transfer_ns=pl.col("duration_ns").min(),
            members=pl.col("rank").sort().cast(pl.String).str.join(", "),
        )
        .join(found.calls.select("call", "step", "num_ranks", *_EQUAL), on="call")
        .filter(pl.col("bytes") > 0, pl.col("transfer_ns") > 0, pl.col("num_ranks") >= pl.col("group_size"))
        .filter(pl.len().over(*_EQUAL, "members") >= ENOUGH_CALLS)
    )
    groups = calls.group_by(*_EQUAL, "members").agg(own_ns=pl.col("transfer_ns").median())
    others = groups.join(groups, on=_EQUAL, suffix="_other").filter(pl.col("members") != pl.col("members_other"))
    usual = others.group_by(*_EQUAL, "members").agg(usual_ns=pl.col("own_ns_other").median())
    calls = calls.join(groups.join(usual, on=[*_EQUAL, "members"], how="left"), on=[*_EQUAL, "members"])
    calls = calls.with_columns(num_groups=pl.col("members").n_unique().over(_EQUAL))
    calls = calls.with_columns(pl.col("usual_ns").fill_null(pl.col("own_ns")))
    over = pl.col("transfer_ns") - pl.col("usual_ns")
    excess = pl.when(pl.col("transfer_ns") > SLOW * pl.col("usual_ns")).then(over).otherwise(0.0)
    return calls.with_columns(excess_ns=excess).sort("call")


def transfers(found: Stragglers) -> pl.DataFrame:
    """Return equal calls of each group, the most lost time first: `collective`, `bytes`, `group_size`, `members`,
    `num_calls`, `num_slow`, `transfer_ns` (median), `usual_ns`, `excess_ns` (of all slow calls), `num_groups` that
    make such calls, and `bus_bandwidth_bytes_per_s`."""
    return (
        timed_transfers(found)
        .group_by(*_EQUAL, "members")
        .agg(
            num_calls=pl.len().cast(pl.Int64),
            num_slow=(pl.col("excess_ns") > 0).sum().cast(pl.Int64),
            transfer_ns=pl.col("transfer_ns").median().round().cast(pl.Int64),
            usual_ns=pl.col("usual_ns").first().round().cast(pl.Int64),
            excess_ns=pl.col("excess_ns").sum().round().cast(pl.Int64),
            num_groups=pl.col("num_groups").first().cast(pl.Int64),
        )
        .with_columns(bus_bandwidth_bytes_per_s=bandwidth(pl.col("bytes") * bus_factor(), pl.col("transfer_ns")))
        .sort("excess_ns", *_EQUAL, "members", descending=[True, *[False] * 4])
    )

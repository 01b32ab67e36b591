"""The accounts of all ranks of a job, and the object that `stepscope analyze --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from stepscope.analysis.ranks import side_by_side
from stepscope.analysis.ranks.collectives import collectives_by_size
from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.display import Shown

SCHEMA_VERSION = 1
NUM_ROWS = 8  # default number of rows in lists of names on a terminal
_ALL = 2**32


@dataclass(frozen=True, repr=False)
class Analysis(Shown):
    """Every rank's account, and how the ranks affect each other."""

    ranks: tuple[RankAccount, ...]
    across: AcrossRanks | None  # none for a single rank

    @classmethod
    def of(cls, accounts: Sequence[RankAccount]) -> Analysis:
        """Return the analysis of ranks from their accounts."""
        ordered = tuple(sorted(accounts, key=lambda account: account.rank))
        return cls(ordered, across_ranks(ordered) if len(ordered) > 1 else None)

    @property
    def warnings(self) -> list[str]:
        """Problems with the files; with several ranks, each names its rank."""
        is_one = len(self.ranks) == 1
        return [text if is_one else f"rank {rank.rank}: {text}" for rank in self.ranks for text in rank.warnings]

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """Return one object of plain values, with at most `most` rows in lists of names (docs/analyze.md)."""
        first, limit = self.ranks[0], _ALL if most is None else most
        return {
            "schema_version": SCHEMA_VERSION,
            "trace": {
                "device": first.device_name,
                "ranks": [rank.rank for rank in self.ranks],
                "events": sum(rank.num_events for rank in self.ranks),
                "steps": max(rank.steps.height for rank in self.ranks),
                "warnings": self.warnings,
            },
            "ranks": [_rank_json(rank, limit) for rank in self.ranks],
            "across_ranks": _across_json(self.across, limit) if self.across else None,
        }


@dataclass(frozen=True)
class AcrossRanks:
    """Collectives that several ranks took part in."""

    matched: side_by_side.Matched
    clocks: pl.DataFrame  # each rank's clock offset (`side_by_side.clock_alignment`)
    stragglers: side_by_side.Stragglers
    table: pl.DataFrame  # each rank's GPU time side by side


def across_ranks(accounts: Sequence[RankAccount]) -> AcrossRanks:
    matched = side_by_side.match_collectives({account.rank: account.collectives for account in accounts})
    clocks = side_by_side.clock_alignment(matched, {account.rank: account.base_time_ns for account in accounts})
    table = side_by_side.rank_table({account.rank: account.gpu_time for account in accounts})
    return AcrossRanks(matched, clocks, side_by_side.stragglers(matched, clocks), table)


def _across_json(across: AcrossRanks, most: int) -> dict[str, Any]:
    return {
        "gpu_time": across.table.to_dicts(),
        "unmatched_collectives": across.matched.unlinked.to_json(),
        "unmatched_reasons": across.matched.unmatched.to_dicts(),
        "clocks": across.clocks.to_dicts(),
        "stragglers": across.stragglers.ranks.to_dicts(),
        "num_clamped": across.stragglers.num_clamped,
        "waits": across.stragglers.pairs.head(most).to_dicts(),
        "collectives": across.stragglers.calls.sort("wait_ns", descending=True).head(most).to_dicts(),
    }


def _rank_json(rank: RankAccount, most: int) -> dict[str, Any]:
    whole = ("steps", "phases", "idle_causes", "kernel_classes", "gemm_share", "kernel_sizes", "queue_depth")
    names = ("longest_gaps", "top_kernels", "ops", "modules", "copies", "syncs")
    return {
        "rank": rank.rank,
        "file": rank.path,
        "device": rank.device_name,
        "events": rank.num_events,
        **{name: getattr(rank, name) for name in ("is_cut_off", "step_source", "phase_source", "module_source")},
        "gpu_time": rank.gpu_time.to_json(),
        "gpu_time_by_device": {str(index): time.to_json() for index, time in rank.gpu_time_by_device.items()},
        **{name: getattr(rank, name).to_dicts() for name in whole},
        **{name: getattr(rank, name).head(most).to_dicts() for name in names},
        "num_kernel_launches_per_step": rank.launches["num_kernel_launches_per_step"],
        "launches": rank.launches,
        "roofline": {**rank.roofline_summary.to_json(), "ops": rank.roofline.head(most).to_dicts()},
        "memory": [summary.to_json() for summary in rank.memory],
        "memory_timeline": rank.memory_timeline.to_dicts(),
        "collectives": collectives_by_size(rank.collectives).head(most).to_dicts(),
        "unlinked": {name: share.to_json() for name, share in rank.unlinked.items()},
        "events_by_category": rank.counts.to_dicts(),
    }

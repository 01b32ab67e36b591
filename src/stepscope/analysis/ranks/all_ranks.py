"""The accounts of all ranks of a job, and the object that `stepscope analyze --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from stepscope.analysis.ranks.collectives import collectives_by_size
from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.analysis.ranks.side_by_side import (
    ClockAlignment,
    Matched,
    Stragglers,
    clock_alignment,
    match_collectives,
    rank_table,
    stragglers,
)
from stepscope.display import Shown

SCHEMA_VERSION = 1
NUM_ROWS = 8  # default number of rows in lists of names


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

    def to_json(self, most: int = NUM_ROWS) -> dict[str, Any]:
        """Return one object of plain values, with `most` rows in each list of names (docs/analyze.md)."""
        first = self.ranks[0]
        return {
            "schema_version": SCHEMA_VERSION,
            "trace": {
                "device": first.device_name,
                "ranks": [rank.rank for rank in self.ranks],
                "events": sum(rank.num_events for rank in self.ranks),
                "steps": max(rank.steps.height for rank in self.ranks),
                "warnings": self.warnings,
            },
            "ranks": [_rank_json(rank, most) for rank in self.ranks],
            "across_ranks": _across_json(self.across, most) if self.across else None,
        }


@dataclass(frozen=True)
class AcrossRanks:
    """Collectives that several ranks took part in."""

    matched: Matched
    clocks: ClockAlignment
    stragglers: Stragglers
    table: pl.DataFrame  # each rank's GPU time side by side


def across_ranks(accounts: Sequence[RankAccount]) -> AcrossRanks:
    """Return how the ranks affect each other through collectives."""
    matched = match_collectives({account.rank: account.collectives for account in accounts})
    clocks = clock_alignment(matched, {account.rank: account.base_time_ns for account in accounts})
    table = rank_table({account.rank: account.gpu_time for account in accounts})
    return AcrossRanks(matched, clocks, stragglers(matched, clocks), table)


def _across_json(across: AcrossRanks, most: int) -> dict[str, Any]:
    return {
        "gpu_time": rows(across.table),
        "unmatched_collectives": across.matched.unlinked.to_json(),
        "unmatched_reasons": rows(across.matched.unmatched),
        "clocks": rows(across.clocks.offsets),
        "stragglers": rows(across.stragglers.ranks),
        "num_clamped": across.stragglers.num_clamped,
        "waits": rows(across.stragglers.pairs.head(most)),
        "collectives": rows(across.stragglers.calls.sort("wait_ns", descending=True).head(most)),
    }


def _rank_json(rank: RankAccount, most: int) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "file": rank.path,
        "device": rank.device_name,
        "events": rank.num_events,
        "is_cut_off": rank.is_cut_off,
        "step_source": rank.step_source,
        "phase_source": rank.phase_source,
        "module_source": rank.module_source,
        "gpu_time": rank.gpu_time.to_json(),
        "gpu_time_by_device": {str(index): time.to_json() for index, time in rank.gpu_time_by_device.items()},
        "steps": rows(rank.steps),
        "phases": rows(rank.phases),
        "idle_causes": rows(rank.idle_causes),
        "longest_gaps": rows(rank.longest_gaps.head(most)),
        "kernel_classes": rows(rank.kernel_classes),
        "top_kernels": rows(rank.top_kernels.head(most)),
        "gemm_share": rows(rank.gemm_share),
        "kernel_sizes": rows(rank.kernel_sizes),
        "num_kernel_launches_per_step": rank.launches["num_kernel_launches_per_step"],
        "launches": rank.launches,
        "queue_depth": rows(rank.queue_depth),
        "ops": rows(rank.ops.head(most)),
        "modules": rows(rank.modules.head(most)),
        "copies": rows(rank.copies.head(most)),
        "roofline": {**rank.roofline_summary.to_json(), "ops": rows(rank.roofline.head(most))},
        "memory": [summary.to_json() for summary in rank.memory],
        "memory_timeline": rows(rank.memory_timeline),
        "syncs": rows(rank.syncs.head(most)),
        "collectives": rows(collectives_by_size(rank.collectives).head(most)),
        "unlinked": {name: share.to_json() for name, share in rank.unlinked.items()},
        "events_by_category": rows(rank.counts),
    }


def rows(table: pl.DataFrame) -> list[dict[str, Any]]:
    """Return a table as a list of objects."""
    return table.to_dicts()

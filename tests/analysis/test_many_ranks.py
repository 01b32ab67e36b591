"""Hundreds of ranks: accounts in a file, JSON in pieces, and a page that shows how the ranks are spread."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace

import polars as pl
import pytest

from stepscope.analysis.ranks.rank_account import Analysis, RankAccount, account, summary_of_rank
from stepscope.analysis.ranks.spread import in_blocks, long_parts, outliers, rank_parts, spread
from stepscope.document.model import Bars, Heat, Lines, Table
from stepscope.document.sections import many_ranks
from stepscope.document.sections.ranks import parts
from stepscope.errors import StepscopeError
from stepscope.session import open_session
from stepscope.session.rank_accounts import KEPT, RankAccounts
from trace_builder import TraceBuilder

SLOW = 17


def trace(rank: int) -> TraceBuilder:
    """A step of 100 us: 20 of compute, or 50 on a slow rank, then a collective that ends together."""
    compute = 50 if rank in (SLOW, 4) else 20
    made = TraceBuilder(distributedInfo={"rank": rank, "world_size": 40}).step(1, 0, 100)
    made.op("aten::mm", 1, 5, id=1).launch("gemm", 2, (5, compute), id=1)
    made.annotation("nccl:all_reduce", 8, 5)
    return made.launch("ncclKernel_AllReduce", 9, (5 + compute, 85 - compute), id=2)


@pytest.fixture(scope="module")
def accounts() -> list[RankAccount]:
    usual, slow = (account(trace(rank).read(), rank) for rank in (0, SLOW))
    return [slow if rank == SLOW else replace(usual, rank=rank) for rank in range(40)]


def test_accounts_from_the_file_give_the_same_figures(accounts):
    stored = RankAccounts()
    for each in [*accounts[20:], *accounts[:20]]:  # in any order
        stored.add(each)
    analysis, whole = stored.analysis(), Analysis.of(accounts)

    assert len(vars(stored)["_kept"]) == KEPT and [each.rank for each in analysis.ranks] == list(range(40))
    assert analysis.ranks[0].rank == 0 and [each.rank for each in analysis.ranks[38:]] == [38, 39]
    assert analysis.to_json() == whole.to_json() and analysis.to_json(3) == whole.to_json(3)
    assert "".join(analysis.json_text(3)) == json.dumps(whole.to_json(3))


def test_a_full_disk_is_one_sentence(accounts, monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    stored = RankAccounts()
    with pytest.raises(StepscopeError, match=r"No space left on device\. Set TMPDIR"):
        for each in accounts[: KEPT + 1]:
            stored.add(each)


def test_the_rank_that_differs_stands_out(accounts):
    table = rank_parts([summary_of_rank(each) for each in accounts])
    long = long_parts(table)
    row = spread(long).filter(pl.col("part") == "GPU compute").row(0, named=True)

    assert table.filter(pl.col("rank") == SLOW)["GPU compute"].item() == 50_000
    assert (row["min_ns"], row["median_ns"], row["max_ns"], row["max_rank"]) == (20_000, 20_000, 50_000, SLOW)
    found = outliers(long)
    assert set(found["rank"]) == {SLOW} and "GPU compute" in found["part"].to_list()
    assert found.row(0, named=True)["excess_share"] == pytest.approx(30 / 100, abs=0.1)
    blocks = in_blocks(long, 8).filter(pl.col("part") == "GPU compute")
    assert blocks["first"].to_list() == list(range(0, 40, 5)) and blocks["last"][-1] == 39
    assert blocks.filter(pl.col("first") == 15)["rank"].to_list() == [SLOW]


@pytest.mark.long
def test_many_ranks_are_drawn_as_a_distribution_and_a_heat_map(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "ranks"
    folder.mkdir()
    monkeypatch.setattr(many_ranks, "MANY", 5)
    for rank in range(6):
        trace(rank).write(folder / f"rank{rank}.json")
    made = parts(open_session(folder))
    of = {type(part): part for part in made if isinstance(part, (Lines, Heat))}

    assert not [part for part in made if isinstance(part, Bars)], "no bar per rank"
    assert of[Heat].y_labels == [str(rank) for rank in range(6)] and "Rank 4 has the most" in of[Heat].caption
    tables = {part.id: part for part in made if isinstance(part, Table)}
    assert set(tables["rank_outliers"].columns["rank"]) == {4} and tables["ranks"].num_rows == 6
    assert {"rank_spread", "stragglers", "waits", "clocks"} <= set(tables)

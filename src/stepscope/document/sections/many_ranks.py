"""Many ranks on one page: how they are spread, a heat map of ranks and phases, and those that stand out."""

from collections.abc import Iterator, Sequence

import polars as pl

from stepscope.analysis.ranks.rank_account import Analysis
from stepscope.analysis.ranks.spread import in_blocks, long_parts, outliers, rank_parts, spread
from stepscope.document.model import Heat, Lines, Part, Series
from stepscope.document.tables import table_of
from stepscope.formatting import percent, plural

MANY = 32
"""More ranks than these are not drawn one by one."""
_MOST_BLOCKS = 32
_WORTH_A_NAME = 0.05  # of a step: such a cell of a block names its rank
_COLORS = {"GPU compute": "forward", "GPU communication": "communication", "GPU copies": "memset_memcpy",
           "GPU idle": "idle"}  # fmt: skip


def numbers(ranks: Sequence[int]) -> str:
    """Return rank numbers, those in a row as a range.

    >>> numbers([0, 1, 2, 3, 7, 9, 10])
    '0-3, 7, 9, 10'
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans)


def parts(analysis: Analysis) -> Iterator[Part]:
    """Yield the distribution, the heat map and the outliers of more ranks than can be drawn one by one."""
    table = rank_parts(analysis.summaries)
    if len(table.columns) < 2:
        return
    long = long_parts(table)
    yield from _sorted(table)
    yield table_of(spread(long), "rank_spread", "parts of a step over all ranks", note="per step; communication and "
                   "copies: what no compute overlaps")  # fmt: skip
    yield _heat(long)
    found = outliers(long)
    note = "excess: how much longer than the median rank's, as a share of its step. `--rank N` shows one rank in full"
    names = "rank part time_ns median_ns excess_share"
    yield table_of(found.head(200), "rank_outliers", f"ranks that stand out ({found.height:,})", names, note=note)


def _sorted(table: pl.DataFrame) -> Iterator[Lines]:
    names = [name for name in _COLORS if name in table.columns]
    if not names:
        return
    ordered = table.sort(pl.sum_horizontal(names), "rank", descending=[True, False])
    places = [float(place) for place in range(1, table.height + 1)]
    series = tuple(Series(name, ordered[name].to_list(), places, _COLORS[name]) for name in names)
    caption = f"All {plural(table.height, 'rank')}, the slowest first."
    title = "GPU time of all ranks"
    yield Lines("rank_distribution", title, "place", "time_ns", series, style="areas", caption=caption)


def _heat(long: pl.DataFrame) -> Heat:
    blocks = in_blocks(long, _MOST_BLOCKS)
    rows = blocks.select("first", "last").unique(maintain_order=True).rows()
    labels = [f"{first}" if first == last else f"{first}-{last}" for first, last in rows]
    names = long["part"].unique(maintain_order=True).to_list()
    found = blocks.select("first", "part", "rank", "excess_share").iter_rows()
    by_place = {(first, part): (rank, share) for first, part, rank, share in found}
    cells = [[by_place[first, name] for name in names] for first, _ in rows]
    is_block = any(first != last for first, last in rows)
    values = [[share for _, share in row] for row in cells]
    texts = [[_text(*cell, is_block) for cell in row] for row in cells]
    worst = long.sort("excess_share", "rank", descending=[True, False]).row(0, named=True)
    whose = ", of the slowest rank of each row" * is_block
    caption = (
        f"How much longer than the median rank's, as a share of a step{whose}. "
        f"Rank {worst['rank']} has the most: {worst['part']}, {percent(worst['excess_share'])}."
    )
    return Heat("rank_phases", "ranks and phases", "part", "ranks", names, labels, "excess_share", values, texts,
                caption=caption)  # fmt: skip


def _text(rank: int, share: float, is_block: bool) -> str:
    text = f"{100 * share:+.0f} %"
    return "0 %" if text[1:] == "0 %" else text + (f" ({rank})" if is_block and share > _WORTH_A_NAME else "")

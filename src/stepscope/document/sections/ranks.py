"""Ranks side by side: their GPU time, who comes last to collectives, their clocks, how fast data moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from stepscope.analysis.ranks.all_ranks import AcrossRanks, Analysis
from stepscope.analysis.ranks.collectives import collectives_by_size
from stepscope.analysis.ranks.side_by_side import REASONS
from stepscope.document.model import Bars, Fact, Facts, Lines, Missing, Series, Table, Text, Value
from stepscope.document.sections.shared import mapping, plain, table_of, table_of_rows
from stepscope.document.trace_facts import facts_of
from stepscope.errors import RecordingError, Unavailable
from stepscope.formatting import percent, plural
from stepscope.session import Session

_SPLIT = {
    "compute": ("compute_ns", "forward"),
    "communication, exposed": ("exposed_communication_ns", "communication"),
    "copies and fills": ("exposed_memory_ns", "memset_memcpy"),
    "idle": ("idle_ns", "idle"),
}
_ONE = (
    "there is one rank: name a folder with a trace of each, or record all of them with "
    "`torchrun -m stepscope run train.py`"
)


def parts(session: Session) -> tuple[Any, ...]:
    """Of several ranks what they did to one another; of one its collectives, where it has any."""
    recordings = tuple(_recordings(session))
    try:
        analysis = session.analysis
    except Unavailable as reason:
        if not recordings:
            raise Unavailable(_ONE) from None
        return (*recordings, Missing(str(reason)))
    collectives = tuple(_collectives(analysis))
    if analysis.across is None:
        if not recordings and not collectives:
            raise Unavailable(_ONE)
        return (*recordings, *collectives, Missing(_ONE))
    return (*recordings, *_side_by_side(analysis), *_waits(analysis.across), *collectives, *_clocks(analysis.across))


def _recordings(session: Session) -> Iterator[Table]:
    """The steps of each rank's own recording, under torchrun."""
    if not session.is_recording:
        return
    ranks = session.rank_recordings
    if not ranks:
        return
    first = mapping(session.recording.facts.get("environment")).get("rank")
    rows = [_recorded(rank, each) for rank, each in [(plain(first), session), *ranks.items()]]
    note = "step: the median; low and high: its 95 % interval"
    yield table_of_rows(rows, list(rows[0]), "rank_steps", "the clean steps of each rank", note=note)


def _recorded(rank: Value, session: Session) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("rank", "device", "status", "num_steps", "step_ns", "low_ns", "high_ns"))
    row["rank"] = rank
    try:
        recording, summary = session.recording, session.summary
    except RecordingError as error:
        return {**row, "status": str(error)}
    row["device"] = plain(mapping(recording.facts.get("environment")).get("device_name"))
    row["status"], row["num_steps"] = recording.status, summary.num_steps
    if (step := summary.step_ns) is not None:
        row["step_ns"], row["low_ns"], row["high_ns"] = step.median, step.ci_low, step.ci_high
    return row


def _side_by_side(analysis: Analysis) -> Iterator[Any]:
    assert analysis.across is not None
    table = analysis.across.table
    said = [Fact(title, text) for title, text in facts_of(analysis) if title in ("waiting", "clocks", "not matched")]
    yield Facts((Fact("ranks", ", ".join(str(rank.rank) for rank in analysis.ranks)), *said))
    if not int(table["window_ns"].sum()):
        yield Missing("GPU time of the ranks: their traces have no GPU work")
        return
    idlest = table.filter(pl.col("idle_share").is_not_null()).sort("idle_share", "rank", descending=[True, False])
    worst = idlest.row(0, named=True)
    yield Bars(
        id="ranks",
        title="the GPU time of each rank",
        caption=f"Rank {worst['rank']} is idle most, for {percent(worst['idle_share'])} of its window; exposed "
        "communication is what no computing hid.",
        labels=[f"rank {rank}" for rank in table["rank"]],
        series=tuple(
            Series(name, [float(ns) for ns in table[column]], color=color)
            for name, (column, color) in _SPLIT.items()
            if table[column].sum()
        ),
        unit="time_ns",
    )
    note = "compute, exposed communication, exposed memory and idle add up to the window"
    yield table_of(table, "ranks", "ranks side by side", num_shown=32, note=note)


def _waits(across: AcrossRanks) -> Iterator[Any]:
    found = across.stragglers
    if found.calls.is_empty():
        yield Missing("who waits for whom: no collective is in the traces of two ranks")
        return
    if len(found.ranks) > 1:
        yield Bars(
            id="stragglers",
            title="time in matched collectives",
            caption=f"Of all of it {percent(found.wait_share)} is waiting for the last rank to come.",
            labels=[f"rank {rank}" for rank in found.ranks["rank"]],
            series=(
                Series("transfer", [float(ns) for ns in found.ranks["transfer_ns"]], color="communication"),
                Series("waiting", [float(ns) for ns in found.ranks["wait_ns"]], color="idle"),
            ),
            unit="time_ns",
        )
    note = "caused wait: what other ranks waited for this one; certain: by more than the clocks' uncertainty"
    yield table_of(found.ranks, "stragglers", "who comes last", num_shown=32, note=note)
    names = {"rank": "rank", "last_rank": "waits_for_rank", "wait_ns": "wait_ns", "num_calls": "num_calls"}
    yield table_of(found.pairs, "waits", "who waits for whom", names)
    calls = found.calls.sort("wait_ns", descending=True)
    columns = ["call", "collective", "step", "bytes", "num_ranks", "last_rank", "wait_ns", "transfer_ns", "lead_ns",
               "is_certain", "bus_bandwidth_bytes_per_s"]  # fmt: skip
    yield table_of(calls, "collective_calls", "collectives that were waited for longest", columns)
    if found.num_clamped:
        yield Text(
            f"{plural(found.num_clamped, 'kernel')} of a rank ended before the last rank came, on these clocks: the "
            "clocks or the matches are wrong by that much."
        )


def _collectives(analysis: Analysis) -> Iterator[Any]:
    table = collectives_by_size(pl.concat([rank.collectives for rank in analysis.ranks]))
    if table.is_empty():
        return
    sized = table.filter(pl.col("bytes") > 0, pl.col("bus_bandwidth_bytes_per_s") > 0)
    kinds = sized["collective"].unique(maintain_order=True).to_list()
    if sized.height:
        best = sized.sort("bus_bandwidth_bytes_per_s", descending=True).row(0, named=True)
        series = []
        for kind in kinds:
            of = sized.filter(pl.col("collective") == kind).sort("bytes")
            rates = [float(rate) for rate in of["bus_bandwidth_bytes_per_s"]]
            series.append(Series(str(kind), rates, [float(size) for size in of["bytes"]]))
        rate = f"{best['bus_bandwidth_bytes_per_s'] / 1e9:.3g} GB/s"
        yield Lines(
            id="collectives",
            title="bandwidth of collectives by their size",
            caption=f"The fastest is {best['collective']} with {rate} of bus bandwidth, waiting included.",
            x="bytes",
            y="bus_bandwidth_bytes_per_s",
            series=tuple(series),
            style="dots",
            log_x=True,
            log_y=True,
        )
    note = "over the kernels' whole time, waiting included; best: of the call that waited least; exposed: nothing "
    yield table_of(table, "collectives", "collectives by size", note=f"{note}computed beside it")


def _clocks(across: AcrossRanks) -> Iterator[Any]:
    columns = ["rank", "reference", "offset_ns", "uncertainty_ns", "skew_ns", "num_calls", "is_contradicted"]
    note = "offset: the rank's clock less the reference's; skew: after the traces' own base times"
    yield table_of(across.clocks.offsets, "clocks", "the ranks' clocks", columns, 32, note)
    lost = across.matched.unmatched
    if lost.height:
        reasons = lost.with_columns(pl.col("reason").replace_strict(REASONS, default=None).alias("meaning"))
        yield table_of(reasons, "unmatched_collectives", "collectives without a match")

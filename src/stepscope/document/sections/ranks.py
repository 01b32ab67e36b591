"""The section `ranks`: GPU time of each rank, who comes last to collectives, clocks, bandwidth of collectives."""

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from stepscope.analysis.ranks.collectives import collectives_by_size
from stepscope.analysis.ranks.network import SLOW, transfers
from stepscope.analysis.ranks.rank_account import AcrossRanks, Analysis
from stepscope.analysis.ranks.side_by_side import REASONS
from stepscope.document.model import Bars, Fact, Facts, Lines, Missing, Part, Series, Table, Text, Value
from stepscope.document.sections import many_ranks
from stepscope.document.tables import columns_of, mapping, plain, table_of
from stepscope.document.trace_facts import rank_facts
from stepscope.errors import RecordingError, Unavailable
from stepscope.formatting import cell, duration, percent, plural
from stepscope.session import Session
from stepscope.session.job_clocks import clocks_of

_MOST_RANKS = 32
_MOST_PAIRS = 1000  # of more than 32 ranks: every pair would be a million rows
_SPLIT = {
    "compute": ("compute_ns", "forward"),
    "communication, exposed": ("exposed_communication_ns", "communication"),
    "copies and fills": ("exposed_memory_ns", "memset_memcpy"),
    "idle": ("idle_ns", "idle"),
}
_COLLECTIVE_SPLIT = {"transfer": ("transfer_ns", "communication"), "waiting": ("wait_ns", "idle")}
_ONE = (
    "there is only one rank: name a folder with a trace of each, or record all of them with "
    "`stepscope run torchrun … train.py`"
)


def parts(session: Session) -> tuple[Part, ...]:
    """Return what several ranks did to one another; of one rank its collectives, if it has any."""
    recordings = tuple(_recordings(session))
    try:
        analysis = session.analysis
    except Unavailable as reason:
        if not recordings:
            raise Unavailable(_ONE) from None
        return (*recordings, Missing(str(reason)))
    collectives, across = tuple(_collectives(analysis)), analysis.across
    if across is None:
        if not recordings and not collectives:
            raise Unavailable(_ONE)
        return (*recordings, *collectives, Missing(_ONE))
    facts = Facts((Fact("ranks", many_ranks.numbers(across.table["rank"].to_list())), *rank_facts(across)))
    several = many_ranks.parts(analysis) if across.table.height > many_ranks.MANY else ()
    return (*recordings, facts, *several, *_gpu_time(across), *_waits(across), *collectives, *_clocks(across))


def _recordings(session: Session) -> Iterator[Part]:
    if not session.is_recording or not (ranks := session.rank_recordings):
        return
    rows = [_recorded(plain(mapping(session.recording.facts.get("environment")).get("rank")), session)]
    for rank, each in ranks.items():
        rows.append(_recorded(rank, each))
        each.release()
    yield from _job_clocks(session)
    note = "step: the median; low and high: its 95 % interval"
    yield Table("rank_steps", "clean steps of each rank", columns_of(rows, " ".join(rows[0])), note=note)


def _job_clocks(session: Session) -> Iterator[Part]:
    """Yield who is late over the whole run and why, and the clocks of the ranks, from the steps that each timed."""
    try:
        found = clocks_of(session)
    except Unavailable as reason:
        yield Missing(str(reason))
        return
    tied = found.clocks.filter(pl.col("rank") != pl.col("reference"))
    widest, spread = (duration(int(tied[name].max() or 0), 3) for name in ("uncertainty_ns", "spread_ns"))  # type: ignore[arg-type]  # numbers
    text = (
        f"Clocks are aligned on the ends of {plural(found.num_steps, 'step')}; the middle half of them lies within "
        f"{spread}. Causality bounds the error to ±{widest}."
    )
    for row in tied.filter("is_contradicted").head(3).iter_rows(named=True):
        text += (
            f" The clock of rank {row['rank']} changed during the run, or its steps are not those of rank "
            f"{row['reference']}: only the last {plural(row['num_agreeing'], 'step')} agree."
        )
    for each in found.late[:3]:
        text += f" Rank {each.rank} is last in {percent(each.last_share)} of them"
        if each.phase:
            phase = each.phase.replace("_", " ")
            text += f": {phase}, it takes {duration(each.excess_ns, 3)} longer than others, on the {each.where}"
        text += "."
    yield Text(text if found.late else f"{text} No rank is last in more than a quarter of them.")
    if found.late:
        names = "rank host num_last last_share caused_wait_ns phase excess_ns where"
        note = "last: by more than the spread of the ends; excess: per step, longer than the median rank"
        yield Table("late_ranks", "ranks that others wait for", columns_of(found.late, names), note=note)
    clocks = found.clocks.with_columns(host=pl.col("rank").replace_strict(found.hosts, return_dtype=pl.String))
    names = "rank host offset_ns uncertainty_ns earliest_ns latest_ns spread_ns skew_ns skew_uncertainty_ns \
num_steps:num_calls num_agreeing is_contradicted"
    note = (
        "offset: of the clock of the steps; spread: of the ends it is measured on; uncertainty: its larger distance "
        "from earliest and latest, the bounds by causality; skew: of the hosts' time of day; against the first rank"
    )
    yield table_of(clocks, "rank_clocks", "clocks of the ranks over the run", names, _MOST_RANKS, note=note)


def _recorded(rank: Value, session: Session) -> dict[str, Any]:
    names = ("rank", "device", "status", "num_steps", "step_ns", "low_ns", "high_ns")
    try:
        recording, summary = session.recording, session.summary
    except RecordingError as error:
        return {**dict.fromkeys(names), "rank": rank, "status": str(error)}
    device = plain(mapping(recording.facts.get("environment")).get("device_name"))
    times = (None,) * 3 if (step := summary.step_ns) is None else (step.median, step.ci_low, step.ci_high)
    return dict(zip(names, (rank, device, recording.status, summary.num_steps, *times)))


def _gpu_time(across: AcrossRanks) -> Iterator[Part]:
    table = across.table
    if not int(table["window_ns"].sum()):
        yield Missing("GPU time of the ranks: their traces have no GPU work")
        return
    idlest = table.filter(pl.col("idle_share").is_not_null()).sort("idle_share", "rank", descending=[True, False])
    worst = idlest.row(0, named=True)
    caption = f"Rank {worst['rank']} is idle the most, {percent(worst['idle_share'])} of its window."
    split = {name: part for name, part in _SPLIT.items() if table[part[0]].sum()}
    if table.height <= many_ranks.MANY:
        yield _bars("ranks", "GPU time of each rank", table, split, caption)
    yield rank_table(across)


def _bars(id: str, title: str, table: pl.DataFrame, split: Mapping[str, tuple[str, str]], caption: str) -> Bars:
    """Return a bar per rank; `split` has the column and the color of each part."""
    times = {name: [float(ns) for ns in table[column]] for name, (column, _) in split.items()}
    series = tuple(Series(name, times[name], color=color) for name, (_, color) in split.items())
    return Bars(id, title, [f"rank {rank}" for rank in table["rank"]], series, "time_ns", caption=caption)


def rank_table(across: AcrossRanks) -> Table:
    note = "exposed: not overlapped by compute; compute, exposed and idle time add up to the window"
    shares = ("idle_share", "exposed_communication_share", "overlapped_communication_share")
    screen = ("rank", "window_ns", *shares, "busy_ns", "compute_ns")
    return table_of(across.table, "ranks", "ranks", num_shown=_MOST_RANKS, note=note, screen=screen)


def _waits(across: AcrossRanks) -> Iterator[Part]:
    found = across.stragglers
    if found.calls.is_empty():
        yield Missing("who waits for whom: no collective of NCCL, RCCL or gloo is in the traces of two ranks")
        return
    if 1 < len(found.ranks) <= many_ranks.MANY:
        caption = f"{percent(found.wait_share)} of it is waiting for the last rank."
        yield _bars("stragglers", "time in matched collectives", found.ranks, _COLLECTIVE_SPLIT, caption)
    note = "caused wait: how long other ranks waited for this one; certain: by more than the clocks' uncertainty"
    yield table_of(found.ranks, "stragglers", "who comes last", num_shown=_MOST_RANKS, note=note)
    pairs, most = found.pairs, _MOST_PAIRS if len(found.ranks) > many_ranks.MANY else len(found.pairs)
    note = f"the {most:,} longest of {pairs.height:,}" if most < pairs.height else ""
    names = "rank waits_for_rank:last_rank wait_ns num_calls"
    yield table_of(pairs.head(most), "waits", "who waits for whom", names, note=note)
    names = "call collective step bytes num_ranks last_rank wait_ns transfer_ns lead_ns is_certain"
    calls = found.calls.sort("wait_ns", descending=True)
    title = "collectives with the longest waits"
    yield table_of(calls, "collective_calls", title, f"{names} bus_bandwidth_bytes_per_s")
    if (groups := transfers(found)).height:
        note = "transfer: median after the last rank came; usual: of other groups, else of this group's calls"
        title = "equal collectives by group"
        yield table_of(groups, "transfers", title, num_shown=_MOST_RANKS, note=f"{note}; slow: {SLOW} times as long")
    if found.num_clamped:
        yield Text(
            f"{plural(found.num_clamped, 'kernel')} ended before the last rank arrived: the clocks or the matches of "
            "collectives are wrong there."
        )


def _collectives(analysis: Analysis) -> Iterator[Part]:
    table = collectives_by_size(pl.concat([rank.collectives for rank in analysis.summaries]))
    if table.is_empty():
        return
    rate = "bus_bandwidth_bytes_per_s"
    sized = table.filter(pl.col("bytes") > 0, pl.col(rate) > 0).sort("bytes", maintain_order=True)
    if sized.height:
        best = sized.sort(rate, descending=True).row(0, named=True)
        kinds = sized.partition_by("collective", as_dict=True, maintain_order=True)
        series = tuple(
            Series(str(kind), of[rate].cast(pl.Float64).to_list(), of["bytes"].cast(pl.Float64).to_list())
            for (kind,), of in kinds.items()
        )
        caption = f"The fastest is {best['collective']} with {cell(rate, best[rate])}, waiting included."
        title = "bandwidth of collectives by size"
        yield Lines("collectives", title, "bytes", rate, series, (), "dots", True, True, caption=caption)
    note = "bandwidth over the whole kernel time, waiting included; best: of the call that waited least; "
    note += "exposed: not overlapped by compute"
    yield table_of(table, "collectives", "collectives by size", note=note)


def _clocks(across: AcrossRanks) -> Iterator[Table]:
    names = "rank reference offset_ns uncertainty_ns skew_ns num_calls is_contradicted"
    note = "offset: this rank's clock minus the reference's; skew: after the base times of the traces"
    yield table_of(across.clocks, "clocks", "clocks of the ranks", names, _MOST_RANKS, note=note)
    lost = across.matched.unmatched
    if lost.height:
        reasons = lost.with_columns(meaning=pl.col("reason").replace_strict(REASONS, default=None))
        yield table_of(reasons, "unmatched_collectives", "collectives without a match")

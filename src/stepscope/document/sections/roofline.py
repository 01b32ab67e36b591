"""The section `roofline` of a report: what kernels reach of what the device can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import polars as pl

from stepscope.analysis.costs.roofline import NEAR_SHARE, time_at_limit
from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.devices import find_device, load_ceilings
from stepscope.document.model import Bars, Dot, Fact, Facts, Missing, Scatter, Series, Text
from stepscope.document.sections.kernels import no_gpu, titles_of
from stepscope.document.sections.shared import table_of
from stepscope.document.trace_facts import limit_facts
from stepscope.formatting import cell, duration, percent, plural, safe
from stepscope.session import Session

MOST_DOTS = 300
LEAST_SHARE = 0.0005
"""Of the GPU's work, for a dot."""
_UNKNOWN_CLASS = "other"
_NO_OP = "launched by no op in the trace"


class Limits(NamedTuple):
    """What the device can do at most."""

    peak_flops: dict[str, int]
    bandwidth_bytes_per_s: int
    source: str


def parts(session: Session) -> tuple[Any, ...]:
    """FLOP/s over intensity, bytes/s over size, time above the limits, and every op with its rates."""
    account = session.analysis.ranks[0]
    if not account.gpu_time.window_ns:
        return (Missing(f"a roofline is of work on a GPU: {no_gpu(account)}"),)
    if not account.roofline_summary.known_ns:
        return (
            Missing("the trace does not say how large the ops were: profile(record_shapes=True), or `stepscope run`"),
        )
    limits = _limits(account)
    rows = _with_classes(account)
    return (
        *_device(account, limits),
        *_flops(rows, limits),
        *_bytes(rows, limits),
        *_above(account),
        _table(account),
    )


def _limits(account: RankAccount) -> Limits | None:
    """From the maker's document, else as measured."""
    name = account.device_name or ""
    device = find_device(name)
    if device is not None:
        return Limits(dict(device.peak_flops), device.bandwidth_bytes_per_s, device.source)
    ceilings = load_ceilings(name)
    if ceilings is None:
        return None
    measured = f"measured on this machine by stepscope doctor --measure, {ceilings.measured_at}"
    return Limits(dict(ceilings.matmul_flops), ceilings.copy_bytes_per_s, measured)


def _device(account: RankAccount, limits: Limits | None) -> Iterator[Any]:
    name = safe(account.device_name)
    summary = account.roofline_summary
    known = [Fact("known", f"{percent(summary.known_share)} of {duration(summary.total_ns)}",
                  "GPU work whose FLOPs or bytes the trace tells; the rest is not in the charts")]  # fmt: skip
    if limits is None:
        yield Missing(
            f"the limits of {name} are not in the table of devices: `stepscope doctor --measure` measures them there"
            if account.device_name
            else "the trace does not name its device, so that its limits are not known: `stepscope run` names it"
        )
        yield Facts(tuple(known))
        return
    used = [dtype for dtype in limits.peak_flops if dtype in set(account.roofline["peak_dtype"].drop_nulls())]
    peaks = [f"{dtype} {cell('flops_per_s', limits.peak_flops[dtype])}" for dtype in used]
    absent = sorted(set(account.roofline["peak_dtype"].drop_nulls()) - set(limits.peak_flops))
    facts = [
        Fact("device", name, safe(limits.source, 400)),
        Fact("limits", ", ".join([*peaks, f"memory {cell('bytes_per_s', limits.bandwidth_bytes_per_s)}"]), "dense"),
        *(Fact(title, text) for title, text in limit_facts(account)),
        *known,
    ]
    if absent:
        facts.append(Fact("no peak", ", ".join(absent), "of these dtypes the device's peak is not known"))
    yield Facts(tuple(facts))


def _with_classes(account: RankAccount) -> pl.DataFrame:
    """The rows with the class of their longest kernel and its short name."""
    classes = dict(account.top_kernels.select("name", pl.col("class").cast(pl.String)).iter_rows())
    titles = titles_of(account)
    kernels = account.roofline["kernel"].cast(pl.String).to_list()
    return account.roofline.with_columns(
        pl.Series("class", [classes.get(name) or _UNKNOWN_CLASS for name in kernels], dtype=pl.String),
        pl.Series("title", [titles.get(name, name) for name in kernels], dtype=pl.String),
        pl.col("op", "shapes").cast(pl.String),
    )


def _dots(rows: pl.DataFrame, x: str, y: str) -> tuple[Dot, ...]:
    return tuple(
        Dot(row[x], row[y], row["time_share"], _name(row), row["class"]) for row in _worth(rows).iter_rows(named=True)
    )


def _worth(rows: pl.DataFrame) -> pl.DataFrame:
    """Those that are drawn: what takes next to no time would only stretch the axes."""
    return rows.filter(pl.col("time_share") >= LEAST_SHARE).head(MOST_DOTS)


def _name(row: dict[str, Any]) -> str:
    return f"{row['op'] or _NO_OP} {row['shapes'] or ''}: {row['title'] or 'no kernel'}"


def _drawn(rows: pl.DataFrame, what: str) -> str:
    """How much of the work is in a chart."""
    shown = _worth(rows)
    share = percent(float(shown["time_share"].sum()))
    few = f" of {rows.height:,}, those with most time" if rows.height > shown.height else ""
    return f"{plural(shown.height, what)}{few}: {share} of the GPU's work. A dot's area is its share of the time."


def _flops(rows: pl.DataFrame, limits: Limits | None) -> Iterator[Any]:
    """The roofline itself."""
    found = rows.filter(pl.col("flops") > 0, pl.col("intensity") > 0, pl.col("flops_per_s") > 0)
    drawn = _worth(found)
    others = float(rows.filter(pl.col("flops") == 0, pl.col("bytes") > 0)["time_share"].sum())
    rest = f" Another {percent(others)} of it has no FLOPs to count, and is in the next chart." if others else ""
    if drawn.is_empty():
        share = percent(float(found["time_share"].sum()))
        yield Text(
            f"Ops whose FLOPs and bytes are both known have {share} of the GPU's work: too little to draw.{rest}"
        )
        return
    best = drawn.sort("flops_per_s", descending=True).row(0, named=True)
    least, most = float(drawn["intensity"].min()), float(drawn["intensity"].max())  # type: ignore[arg-type]
    yield Scatter(
        id="roofline",
        title="FLOP/s over FLOPs a byte",
        caption=f"{_drawn(found, 'op')}{rest} The fastest, {safe(best['op'], 60)}, reaches "
        f"{cell('flops_per_s', best['flops_per_s'])}.",
        x="flops_per_byte",
        y="flops_per_s",
        points=_dots(found, "intensity", "flops_per_s"),
        limits=tuple(_roofs(limits, set(drawn["peak_dtype"].drop_nulls()), least, most)) if limits else (),
    )


def _roofs(limits: Limits, dtypes: set[str], least: float, most: float) -> Iterator[Series]:
    """The slope of the memory, up to the highest peak in use, and each peak from where the slope meets it."""
    bandwidth = limits.bandwidth_bytes_per_s
    peaks = {dtype: peak for dtype, peak in limits.peak_flops.items() if dtype in dtypes}
    ridges = {dtype: peak / bandwidth for dtype, peak in peaks.items()}
    end = max(ridges.values(), default=most)
    first, last = min(least, min(ridges.values(), default=most) / 8), max(most, 2 * end)
    text = f"memory, {cell('bytes_per_s', bandwidth)}"
    yield Series(text, [bandwidth * first, bandwidth * end], [first, end])
    for dtype, peak in peaks.items():
        yield Series(f"{dtype}, {cell('flops_per_s', peak)}", [peak, peak], [ridges[dtype], last])


def _bytes(rows: pl.DataFrame, limits: Limits | None) -> Iterator[Any]:
    """Every op's rate of bytes, over the time of one call: what is short does not reach the memory's."""
    found = rows.filter(pl.col("bytes") > 0, pl.col("num_calls") > 0, pl.col("bytes_per_s") > 0)
    found = found.with_columns((pl.col("total_ns") / pl.col("num_calls")).alias("call_ns"))
    drawn = _worth(found)
    if drawn.is_empty():
        return
    caption, lines = _drawn(found, "op"), tuple[Series, ...]()
    if limits:
        above = drawn.filter(pl.col("bytes_per_s") > limits.bandwidth_bytes_per_s).height
        if above:
            caption += f" {plural(above, 'dot')} above the line: what is still in the cache need not be read."
        ends = [float(drawn["call_ns"].min()), float(drawn["call_ns"].max())]  # type: ignore[arg-type]
        text = f"memory, {cell('bytes_per_s', limits.bandwidth_bytes_per_s)}"
        lines = (Series(text, [limits.bandwidth_bytes_per_s] * 2, ends),)
    yield Scatter(
        id="bandwidth",
        title="Bytes a second over the time of a call",
        caption=caption,
        x="time_of_a_call_ns",
        y="bytes_per_s",
        points=_dots(found, "call_ns", "bytes_per_s"),
        limits=lines,
    )


def _above(account: RankAccount) -> Iterator[Any]:
    """How much of each class's time its limits explain."""
    summary = account.roofline_summary
    if summary.limit_share is None:
        return
    table = time_at_limit(account.roofline, account.top_kernels)
    placed_ns = summary.compute_ns + summary.memory_ns + summary.neither_ns
    above_ns = int(table["above_limit_ns"].sum())
    worst = table.sort("above_limit_ns", descending=True).row(0, named=True)
    most = f"{worst['class'].replace('_', ' ')} has most, {duration(worst['above_limit_ns'])}"
    yield Bars(
        id="time_at_limit",
        title="Time that the limits explain, by class of kernel",
        caption=f"At their limits the ops would take {percent(summary.limit_share)} of {duration(placed_ns)}. Of the "
        f"{duration(above_ns)} above, {most}.",
        labels=[name.replace("_", " ") for name in table["class"]],
        series=(
            Series("at the limit", table["at_limit_ns"].to_list()),
            Series("above it", table["above_limit_ns"].to_list()),
            Series("not known", table["unknown_ns"].to_list(), color="other"),
        ),
        unit="total_ns",
    )
    bounds = {"compute": summary.compute_ns, "memory": summary.memory_ns, "neither": summary.neither_ns}
    shares = {name: percent(ns / max(1, summary.total_ns)) for name, ns in bounds.items()}
    yield Bars(
        id="bounds",
        title="What limits the GPU's work",
        caption=f"The arithmetic limits {shares['compute']} of the GPU's work, the memory {shares['memory']}; "
        f"{shares['neither']} reaches less than {percent(NEAR_SHARE)} of either.",
        labels=[*bounds, "not known"],
        series=(Series("GPU time", [*bounds.values(), summary.unknown_ns]),),
        unit="total_ns",
    )


def _table(account: RankAccount) -> Any:
    rows = _with_classes(account).with_columns(pl.col("op").fill_null(_NO_OP))
    # Without the device's limits nothing is a share of them.
    is_placed = account.roofline_summary.limit_share is not None
    names = ["op", "dtype", "num_calls", "total_ns", "time_share", "flops_per_s", "bytes_per_s", "intensity"]
    names += ["limit_share", "bound", "compute_share", "memory_share"] if is_placed else []
    names += ["flops", "bytes", "num_kernels", "class", "shapes", "title"]
    shown = {"title": "longest_kernel", "intensity": "flops_per_byte"}
    return table_of(
        rows,
        "roofline",
        "Ops with their rates",
        {name: shown.get(name, name) for name in names},
        note="Shares can pass 100 %: what is still in the cache need not be read from memory." if is_placed else "",
    )

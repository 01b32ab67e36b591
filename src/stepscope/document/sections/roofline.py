"""The section `roofline`: what ops reach of what the device can do."""

from collections.abc import Iterator
from typing import NamedTuple

import polars as pl

from stepscope.analysis.costs.roofline import NEAR_SHARE, time_at_limit
from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.devices import find_device, load_ceilings
from stepscope.document.model import Bars, Dot, Fact, Facts, Missing, Part, Scatter, Series, Table, Text
from stepscope.document.sections.kernels import no_gpu, with_titles
from stepscope.document.tables import table_of
from stepscope.document.trace_facts import limit_facts
from stepscope.document.verdict import class_name
from stepscope.formatting import cell, duration, percent, plural, safe
from stepscope.session import Session

MOST_DOTS = 300
LEAST_SHARE = 0.0005  # ops with a smaller share of the GPU work have no dot: they would only stretch the axes
_NO_OP = "launched by no op in the trace"
_IN_CACHE = "data that is still in the cache is not read from memory"


class Limits(NamedTuple):
    peak_flops: dict[str, int]
    bandwidth_bytes_per_s: int
    source: str

    @property
    def bandwidth(self) -> str:
        return cell("bytes_per_s", self.bandwidth_bytes_per_s)


def parts(session: Session) -> tuple[Part, ...]:
    """Return FLOP/s by intensity, bandwidth by duration, time at the limits, and every op with its rates."""
    account = session.analysis.ranks[0]
    if not account.gpu_time.window_ns:
        return (Missing(f"the roofline needs GPU work: {no_gpu(account)}"),)
    if not account.roofline_summary.known_ns:
        why = "the trace has no shapes of ops: record with profile(record_shapes=True) or `stepscope run`"
        return (Missing(why),)
    limits, rows = _limits(account.device_name or ""), _with_classes(account)
    charts = (*_flops(rows, limits), *_bandwidth(rows, limits), *_at_limit(account))
    return (*_device(account, limits), *charts, _table(account, rows))


def _limits(name: str) -> Limits | None:
    """Return the limits from the maker's documents, else as measured, else None."""
    if (device := find_device(name)) is not None:
        return Limits(dict(device.peak_flops), device.bandwidth_bytes_per_s, device.source)
    if (ceilings := load_ceilings(name)) is None:
        return None
    measured = f"measured on this machine by stepscope doctor --measure, {ceilings.measured_at}"
    return Limits(dict(ceilings.matmul_flops), ceilings.copy_bytes_per_s, measured)


def _device(account: RankAccount, limits: Limits | None) -> Iterator[Part]:
    name, summary = safe(account.device_name), account.roofline_summary
    covered = f"{percent(summary.known_share)} of {duration(summary.total_ns)}"
    known = Fact("covered", covered, "GPU work whose FLOPs or bytes are known; the charts leave out the rest")
    if limits is None:
        yield Missing(
            f"the limits of {name} are not in the table of devices: run `stepscope doctor --measure` on that machine"
            if account.device_name
            else "the trace does not name its device, so its limits are unknown: record with `stepscope run`"
        )
        yield Facts((known,))
        return
    used = set(account.roofline["peak_dtype"].drop_nulls())
    peaks = [f"{dtype} {cell('flops_per_s', peak)}" for dtype, peak in limits.peak_flops.items() if dtype in used]
    facts = [
        Fact("device", name, safe(limits.source, 400)),
        Fact("limits", ", ".join([*peaks, f"memory {limits.bandwidth}"]), "dense"),
        *limit_facts(account),
        known,
    ]
    if absent := sorted(used - set(limits.peak_flops)):
        facts.append(Fact("no peak", ", ".join(absent), "the peak of the device for these dtypes is unknown"))
    yield Facts(tuple(facts))


def _with_classes(account: RankAccount) -> pl.DataFrame:
    classes = dict(account.top_kernels.select("name", pl.col("class").cast(pl.String)).iter_rows())
    names = [classes.get(name) or "other" for name in account.roofline["kernel"].cast(pl.String)]
    kinds, texts = pl.Series("class", names, pl.String), pl.col("op", "shapes").cast(pl.String)
    return with_titles(account, account.roofline.with_columns(kinds, texts), "kernel")


def _worth(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(pl.col("time_share") >= LEAST_SHARE).head(MOST_DOTS)


def _dots(drawn: pl.DataFrame, x: str, y: str) -> tuple[Dot, ...]:
    rows = drawn.to_dicts()
    names = [f"{row['op'] or _NO_OP} {row['shapes'] or ''}: {row['title'] or 'no kernel'}" for row in rows]
    return tuple(Dot(row[x], row[y], row["time_share"], name, row["class"]) for row, name in zip(rows, names))


def _coverage(drawn: pl.DataFrame, rows: pl.DataFrame) -> str:
    few = f" of {rows.height:,}, those with the most time" if rows.height > drawn.height else ""
    return f"{plural(drawn.height, 'op')}{few}, {percent(float(drawn['time_share'].sum()))} of the GPU work."


def _flops(rows: pl.DataFrame, limits: Limits | None) -> Iterator[Part]:
    found = rows.filter(pl.col("flops") > 0, pl.col("intensity") > 0, pl.col("flops_per_s") > 0)
    drawn = _worth(found)
    others = float(rows.filter(pl.col("flops") == 0, pl.col("bytes") > 0)["time_share"].sum())
    rest = f" Another {percent(others)} has no FLOPs and is in the next chart." if others else ""
    if drawn.is_empty():
        share = f"{percent(float(found['time_share'].sum()))} of the GPU work"
        yield Text(f"Ops whose FLOPs and bytes are both known take {share}, too little to draw.{rest}")
        return
    best = drawn.sort("flops_per_s", descending=True).row(0, named=True)
    fastest = f" The fastest, {safe(best['op'], 60)}, reaches {cell('flops_per_s', best['flops_per_s'])}."
    caption, title = f"{_coverage(drawn, found)}{rest}{fastest}", "FLOP/s by FLOPs per byte"
    dots, roofs = _dots(drawn, "intensity", "flops_per_s"), tuple(_roofs(limits, drawn)) if limits else ()
    yield Scatter("roofline", title, "flops_per_byte", "flops_per_s", dots, roofs, caption=caption)


def _roofs(limits: Limits, drawn: pl.DataFrame) -> Iterator[Series]:
    """Yield the slope of the memory, up to the highest peak in use, and each peak from where the slope meets it."""
    least, most = float(drawn["intensity"].min()), float(drawn["intensity"].max())  # type: ignore[arg-type]  # numbers
    bandwidth, dtypes = limits.bandwidth_bytes_per_s, set(drawn["peak_dtype"].drop_nulls())
    peaks = {dtype: peak for dtype, peak in limits.peak_flops.items() if dtype in dtypes}
    ridges = {dtype: peak / bandwidth for dtype, peak in peaks.items()}
    end = max(ridges.values(), default=most)
    first, last = min(least, min(ridges.values(), default=most) / 8), max(most, 2 * end)
    yield Series(f"memory, {limits.bandwidth}", [bandwidth * first, bandwidth * end], [first, end])
    for dtype, peak in peaks.items():
        yield Series(f"{dtype}, {cell('flops_per_s', peak)}", [peak, peak], [ridges[dtype], last])


def _bandwidth(rows: pl.DataFrame, limits: Limits | None) -> Iterator[Part]:
    found = rows.filter(pl.col("bytes") > 0, pl.col("num_calls") > 0, pl.col("bytes_per_s") > 0)
    found = found.with_columns((pl.col("total_ns") / pl.col("num_calls")).alias("call_ns"))
    drawn = _worth(found)
    if drawn.is_empty():
        return
    caption, lines = _coverage(drawn, found), tuple[Series, ...]()
    if limits:
        if above := drawn.filter(pl.col("bytes_per_s") > limits.bandwidth_bytes_per_s).height:
            caption += f" {plural(above, 'dot')} above the line: {_IN_CACHE}."
        ends = [float(drawn["call_ns"].min()), float(drawn["call_ns"].max())]  # type: ignore[arg-type]  # numbers
        lines = (Series(f"memory, {limits.bandwidth}", [limits.bandwidth_bytes_per_s] * 2, ends),)
    title, dots = "bandwidth by duration of a call", _dots(drawn, "call_ns", "bytes_per_s")
    yield Scatter("bandwidth", title, "time_of_a_call_ns", "bytes_per_s", dots, lines, caption=caption)


def _at_limit(account: RankAccount) -> Iterator[Bars]:
    """Yield how much of each class's time its limits explain, and what limits the GPU work."""
    summary = account.roofline_summary
    if summary.limit_share is None:
        return
    table = time_at_limit(account.roofline, account.top_kernels)
    placed_ns = summary.compute_ns + summary.memory_ns + summary.neither_ns
    above_ns = int(table["above_limit_ns"].sum())
    parts = {"at the limit": "at_limit_ns", "above it": "above_limit_ns", "unknown": "unknown_ns"}
    colors = {"unknown": "other"}
    series = tuple(Series(name, table[ns].to_list(), color=colors.get(name)) for name, ns in parts.items())
    reached = f"At their limits the ops would take {percent(summary.limit_share)} of {duration(placed_ns)}"
    labels, title = [class_name(name) for name in table["class"]], "time at the hardware limit by class of kernel"
    caption = f"{reached}; {duration(above_ns)} is above."
    yield Bars("time_at_limit", title, labels, series, "total_ns", caption=caption)
    bounds = {name: getattr(summary, f"{name}_ns") for name in ("compute", "memory", "neither", "unknown")}
    series = (Series("GPU time", [*bounds.values()]),)
    caption = f"Neither: less than {percent(NEAR_SHARE)} of both limits."
    yield Bars("bounds", "what limits the GPU work", [*bounds], series, "total_ns", caption=caption)


def _table(account: RankAccount, rows: pl.DataFrame) -> Table:
    # Without the limits of the device nothing is a share of them.
    has_limits = account.roofline_summary.limit_share is not None
    names = "op dtype num_calls total_ns time_share flops_per_s bytes_per_s flops_per_byte:intensity"
    names += " limit_share bound compute_share memory_share" if has_limits else ""
    names += " flops bytes num_kernels class shapes longest_kernel:title"
    note = f"shares can exceed 100 %: {_IN_CACHE}" if has_limits else ""
    rows = rows.with_columns(pl.col("op").fill_null(_NO_OP))
    return table_of(rows, "roofline", "ops with their rates", names, note=note)

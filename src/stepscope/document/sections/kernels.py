"""The section `kernels` of a report: what the GPU ran, how it was fed, why it stood idle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.analysis.time.idle import CAUSES
from stepscope.document.kernel_names import kernel_titles
from stepscope.document.model import Bars, Fact, Facts, Lines, Missing, Series, Table, Text
from stepscope.document.sections.shared import table_of
from stepscope.document.trace_facts import work_facts
from stepscope.formatting import average, duration, percent, plural
from stepscope.session import Session

NUM_BARS = 12
UNCLASSIFIED = "unclassified"
_NO_GPU = "the trace has no GPU work: record on a GPU, with ProfilerActivity.CUDA among the activities"
_CUT_OFF = "the trace is cut off, and GPU work is written last: record it again"


def parts(session: Session) -> tuple[Any, ...]:
    """Classes, names and sizes of kernels; launches and the queue; idle time; ops, copies and waits as tables."""
    account = session.analysis.ranks[0]
    if not account.gpu_time.window_ns:
        return (Missing(no_gpu(account)), *_ops(account))
    every = (
        Text(_said(account)),
        _classes(account),
        *_top(account),
        _gemms(account),
        *_sizes(account),
        *_launches(account),
        *_idle(account),
        *_ops(account),
        *_copies(account),
        *_syncs(account),
    )
    # Pictures first: tables are long.
    return tuple(sorted(every, key=lambda part: isinstance(part, Table)))


def no_gpu(account: RankAccount) -> str:
    """Why a trace has no GPU work, and what to do about it."""
    return _CUT_OFF if account.is_cut_off else _NO_GPU


def _work_ns(account: RankAccount) -> int:
    """The sum of all durations: what shares of kernels are of."""
    return int(account.kernel_classes["total_ns"].sum())


def _said(account: RankAccount) -> str:
    over = plural(account.steps.height, "step") if account.steps.height else "the whole trace"
    shares = _shares(account)
    unknown = shares.pop("other", 0.0)
    most = [f"{_class_name(name)} {percent(share)}" for name, share in list(shares.items())[:3]]
    known = "Every kernel is classified." if not unknown else f"{percent(unknown)} of it is {UNCLASSIFIED}."
    kernels = plural(int(account.launches["num_kernels"] or 0), "kernel")
    said = f": {', '.join(most)}" if most else ""
    return f"{kernels}, {duration(_work_ns(account))} of GPU work over {over}{said}. {known}"


def _shares(account: RankAccount) -> dict[str, float]:
    return dict(account.kernel_classes.select(pl.col("class").cast(pl.String), "share").iter_rows())


def _class_name(name: str) -> str:
    return UNCLASSIFIED if name == "other" else name.replace("_", " ")


def _classes(account: RankAccount) -> Bars:
    table = account.kernel_classes
    shares = _shares(account)
    first = next(iter(shares))
    return Bars(
        id="kernel_classes",
        title="GPU time by class of kernel",
        caption=f"{_class_name(first)} has most, {percent(shares[first])} of the sum of all durations; "
        f"{percent(shares.get('other', 0.0))} is {UNCLASSIFIED}.",
        labels=[_class_name(str(name)) for name in table["class"]],
        series=(Series("GPU time", table["total_ns"].to_list()),),
        unit="total_ns",
    )


def _top(account: RankAccount) -> Iterator[Bars | Table]:
    table, titles = account.top_kernels, titles_of(account)
    first = table.head(NUM_BARS)
    yield Bars(
        id="top_kernels",
        title="Kernels with most time",
        caption=f"These {first.height} of {plural(table.height, 'name')} have "
        f"{percent(float(first['share'].sum()))} of the GPU's work.",
        labels=[titles[name] for name in first["name"]],
        series=(Series("GPU time", first["total_ns"].to_list()),),
        unit="total_ns",
    )
    columns = ("class", "num_calls", "total_ns", "mean_ns", "p50_ns", "p99_ns", "share")
    yield table_of(
        table.with_columns(_titles(table["name"], titles)),
        "kernels",
        "Kernels by name",
        {"title": "kernel", **dict(zip(columns, columns)), "name": "whole_name"},
        note="The share is of the sum of all durations.",
    )


def titles_of(account: RankAccount) -> dict[str | None, str]:
    """Every kernel's name, and a short one for it: the same wherever it is shown."""
    names = account.top_kernels["name"].to_list()
    return dict(zip(names, kernel_titles([name or "" for name in names])))


def _titles(names: pl.Series, titles: dict[str | None, str]) -> pl.Series:
    return pl.Series("title", [titles.get(name, name) for name in names.cast(pl.String)], dtype=pl.String)


def _gemms(account: RankAccount) -> Bars:
    table = account.gemm_share.with_columns(pl.col("phase").cast(pl.String).fill_null("not known"))
    rows = table.to_dicts()
    texts = [f"{row['phase']} {percent(row['gemm_share'])}" for row in rows if row["total_ns"]]
    return Bars(
        id="gemm_share",
        title="Matrix products in each phase",
        caption=f"Matrix products are this much of each phase's GPU work: {', '.join(texts)}.",
        labels=table["phase"].to_list(),
        series=(
            Series("matrix products", table["gemm_ns"].to_list(), color="gemm"),
            Series("everything else", [row["total_ns"] - row["gemm_ns"] for row in rows], color="other"),
        ),
        unit="total_ns",
    )


def _sizes(account: RankAccount) -> Iterator[Bars | Table]:
    table = account.kernel_sizes
    num, total_ns = max(1, int(table["num_kernels"].sum())), max(1, int(table["total_ns"].sum()))
    small = table.row(0, named=True)
    yield Bars(
        id="kernel_sizes",
        title="Kernels by duration",
        caption=f"{small['num_kernels']:,} of {num:,} kernels ({percent(small['num_kernels'] / num)}) take "
        f"{small['size']}; they have {percent(small['total_ns'] / total_ns)} of the kernels' time.",
        labels=table["size"].to_list(),
        series=(Series("kernels", table["num_kernels"].to_list()),),
        unit="num_kernels",
    )
    yield table_of(table, "kernel_sizes", "Kernels by duration")


def _launches(account: RankAccount) -> Iterator[Any]:
    yield Facts(tuple(Fact(title, text) for title, text in work_facts(account)))
    table, found = account.queue_depth, account.launches
    if table.is_empty() or found["queue_depth_p50"] is None:
        return
    first = int(table["time_ns"][0])
    yield Lines(
        id="queue_depth",
        title="Kernels launched and not finished",
        caption=f"When a kernel is launched, {average(found['queue_depth_p50'])} others are in the queue (median), "
        f"{average(found['queue_depth_max'] or 0)} at most; at {percent(found['starved_share'] or 0.0)} of launches "
        "it was empty.",
        x="since_first_launch_ns",
        y="num_kernels_in_queue",
        series=(Series("in the queue", table["depth"].to_list(), (table["time_ns"] - first).to_list()),),
        style="steps",
    )


def _idle(account: RankAccount) -> Iterator[Any]:
    time, table = account.gpu_time, account.idle_causes
    if not time.idle_ns:
        yield Text("The GPU was never idle between its first event and its last.")
        return
    table = table.filter(table["total_ns"] > 0).sort("total_ns", descending=True)
    first = table.row(0, named=True)
    yield Bars(
        id="idle_causes",
        title="Why the GPU was idle",
        caption=f"The GPU was idle for {duration(time.idle_ns)} of {duration(time.window_ns)} "
        f"({percent(time.idle_ns / time.window_ns)}); {percent(first['share'])} of that is {_words(first['cause'])}: "
        f"{_lowered(CAUSES[first['cause']])}",
        labels=[_words(cause) for cause in table["cause"]],
        series=(Series("idle", table["total_ns"].to_list()),),
        unit="total_ns",
    )
    means = pl.Series("what_it_is", [CAUSES[cause] for cause in table["cause"]])
    yield table_of(table.with_columns(means), "idle_causes", "Idle time by cause")
    yield _gaps(account)


def _gaps(account: RankAccount) -> Table:
    gaps, steps = account.longest_gaps, account.steps
    zero = "the first step" if steps.height else "the first of them"
    first_ns = steps["start_ns"].min() if steps.height else gaps["start_ns"].min()
    columns = ("begin_ns", "duration_ns", "cause", "step", "host")
    return table_of(
        gaps.with_columns(
            (pl.col("start_ns") - pl.lit(first_ns)).alias("begin_ns"),
            _titles(gaps["next_kernel"], titles_of(account)),
        ),
        "longest_gaps",
        "Longest idle stretches",
        {**dict(zip(columns, columns)), "title": "next_kernel", "start_ns": "begin_on_trace_clock"},
        note=f"begin: since {zero}; host: what the launching thread was in, outermost first.",
    )


def _words(cause: object) -> str:
    return str(cause).replace("_", " ")


def _lowered(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _ops(account: RankAccount) -> Iterator[Table]:
    table = account.ops
    if table.is_empty():
        return
    table = table.with_columns(pl.col("op").fill_null("launched by no op in the trace"))
    table = table if account.gpu_time.window_ns else table.drop("device_self_ns", "device_total_ns")
    yield table_of(table, "ops", "Ops", note="Self is what no op below accounts for.")


def _copies(account: RankAccount) -> Iterator[Any]:
    table = account.copies
    if table.is_empty():
        yield Text("No copies, casts, changes of layout or fills ran on the GPU.")
        return
    columns = ("what", "op", "caller", "module", "num_calls", "num_calls_per_step", "num_pageable", "total_ns",
               "busy_share", "bytes", "bandwidth_bytes_per_s")  # fmt: skip
    note = "The busy share is of the time the GPU was at work."
    yield table_of(table, "copies", "Copies, casts, changes of layout and fills", columns, note=note)


def _syncs(account: RankAccount) -> Iterator[Any]:
    table = account.syncs
    if table.is_empty():
        yield Text("The trace has no call that waits for the GPU.")
        return
    columns = (
        "kind",
        "call",
        "op",
        "num_calls",
        "num_calls_per_step",
        "total_ns",
        "busy_ns",
        "wait_ns",
        "idle_after_ns",
    )
    yield table_of(
        table.with_columns(_titles(table["waited_for"], titles_of(account))),
        "syncs",
        "Waits for the GPU",
        {**dict(zip(columns, columns)), "title": "waited_for"},
        note="Idle after is how long the GPU then had nothing to do.",
    )

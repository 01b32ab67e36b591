"""The section `kernels`: what the GPU ran, how it was fed, ops, copies and synchronization."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.document.kernel_names import titles_of
from stepscope.document.model import Bars, Facts, Lines, Missing, Part, Series, Table, Text
from stepscope.document.sections.shared import table_of
from stepscope.document.trace_facts import work_facts
from stepscope.document.verdict import class_name
from stepscope.formatting import average, duration, percent, plural
from stepscope.session import Session

NUM_BARS = 12
_LEAST_SHARE = 0.001
_NO_GPU = "the trace has no GPU work: record on a GPU, with ProfilerActivity.CUDA among the activities"
_CUT_OFF = "the trace is cut off, and GPU work is written last: record it again"
_COPIES = ("what", "op", "caller", "module", "num_calls", "num_calls_per_step", "num_pageable", "total_ns",
           "busy_share", "bytes", "bandwidth_bytes_per_s")  # fmt: skip
_SYNCS = ("kind", "call", "op", "num_calls", "num_calls_per_step", "total_ns", "busy_ns", "wait_ns", "idle_after_ns")


def parts(session: Session) -> tuple[Part, ...]:
    """Return classes, names and sizes of kernels; launches and the queue; ops, copies and synchronization."""
    account = session.analysis.ranks[0]
    if not account.gpu_time.window_ns:
        ops = () if account.ops.is_empty() else (op_table(account),)
        return (Missing(no_gpu(account)), *ops)
    charts = (
        _class_chart(account),
        _top_chart(account),
        _gemm_chart(account),
        _size_chart(account),
        *_queue(account),
    )
    tables = (
        kernel_table(account),
        table_of(account.kernel_sizes, "kernel_sizes", "kernels by duration"),
        *([] if account.ops.is_empty() else [op_table(account)]),
        *_copies_and_syncs(account),
    )
    return (Text(work_text(account)), Facts(tuple(work_facts(account))), *charts, *tables)


def no_gpu(account: RankAccount) -> str:
    """Return why a trace has no GPU work, and what to do about it."""
    return _CUT_OFF if account.is_cut_off else _NO_GPU


def work_text(account: RankAccount) -> str:
    """Return the GPU work of all classes of kernels as a sentence."""
    over = plural(account.steps.height, "step") if account.steps.height else "the whole trace"
    work_ns = int(account.kernel_classes["total_ns"].sum())
    shares = dict(account.kernel_classes.select(pl.col("class").cast(pl.String), "share").iter_rows())
    unknown = percent(shares.pop("other", 0.0))
    known = [f"{class_name(name)} {percent(share)}" for name, share in shares.items() if share >= _LEAST_SHARE]
    kernels = plural(int(account.launches["num_kernels"] or 0), "kernel")
    shares_text = ", ".join([*known, f"unclassified {unknown}"])
    return f"{duration(work_ns)} of GPU work in {kernels} over {over}: {shares_text}."


def _class_chart(account: RankAccount) -> Bars:
    table = account.kernel_classes
    return Bars(
        id="kernel_classes",
        title="GPU time by class of kernel",
        labels=[class_name(name) for name in table["class"]],
        series=(Series("GPU time", table["total_ns"].to_list()),),
        unit="total_ns",
    )


def _top_chart(account: RankAccount) -> Bars:
    first, titles = account.top_kernels.head(NUM_BARS), titles_of(account)
    share = percent(float(first["share"].sum()))
    return Bars(
        id="top_kernels",
        title="kernels with the most time",
        caption=f"These {first.height} of {plural(account.top_kernels.height, 'kernel')} take {share} of GPU work.",
        labels=[titles[name] for name in first["name"]],
        series=(Series("GPU time", first["total_ns"].to_list()),),
        unit="total_ns",
    )


def kernel_table(account: RankAccount) -> Table:
    """Return one row per kernel, those with the most time first."""
    columns = ("class", "num_calls", "total_ns", "mean_ns", "p50_ns", "p99_ns", "share")
    return table_of(
        _with_titles(account, account.top_kernels, "name"),
        "kernels",
        "kernels",
        {"title": "kernel", **dict(zip(columns, columns)), "name": "whole_name"},
        note="share: of the sum of all durations",
        screen=("kernel", "share", "total_ns", "num_calls", "mean_ns", "p99_ns"),
    )


def _with_titles(account: RankAccount, table: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return the table with the short names of the kernels in a column as `title`."""
    titles = titles_of(account)
    names = [titles.get(name, name) for name in table[column].cast(pl.String)]
    return table.with_columns(pl.Series("title", names, dtype=pl.String))


def _gemm_chart(account: RankAccount) -> Bars:
    table = account.gemm_share.with_columns(pl.col("phase").cast(pl.String).fill_null("unknown"))
    shares = [f"{row['phase']} {percent(row['gemm_share'])}" for row in table.to_dicts() if row["total_ns"]]
    return Bars(
        id="gemm_share",
        title="matrix products by phase",
        caption=f"Share of matrix products in the GPU work: {', '.join(shares)}.",
        labels=table["phase"].to_list(),
        series=(
            Series("matrix products", table["gemm_ns"].to_list(), color="gemm"),
            Series("everything else", (table["total_ns"] - table["gemm_ns"]).to_list(), color="other"),
        ),
        unit="total_ns",
    )


def _size_chart(account: RankAccount) -> Bars:
    table = account.kernel_sizes
    num, total_ns = max(1, int(table["num_kernels"].sum())), max(1, int(table["total_ns"].sum()))
    small = table.row(0, named=True)
    return Bars(
        id="kernel_sizes",
        title="kernels by duration",
        caption=f"{small['num_kernels']:,} of {num:,} kernels ({percent(small['num_kernels'] / num)}) take "
        f"{small['size']}, {percent(small['total_ns'] / total_ns)} of the kernel time.",
        labels=table["size"].to_list(),
        series=(Series("kernels", table["num_kernels"].to_list()),),
        unit="num_kernels",
    )


def _queue(account: RankAccount) -> Iterator[Lines]:
    table, found = account.queue_depth, account.launches
    if table.is_empty() or found["queue_depth_p50"] is None:
        return
    since = table["time_ns"] - int(table["time_ns"][0])
    yield Lines(
        id="queue_depth",
        title="kernels launched and not finished",
        caption=f"In the queue at a launch: {average(found['queue_depth_p50'])} (median), at most "
        f"{average(found['queue_depth_max'] or 0)}, none at {percent(found['starved_share'] or 0.0)} of launches.",
        x="since_first_launch_ns",
        y="num_kernels_in_queue",
        series=(Series("in the queue", table["depth"].to_list(), since.to_list()),),
        style="steps",
    )


def op_table(account: RankAccount) -> Table:
    """Return one row per op, those with the most time of their own first."""
    table = account.ops.with_columns(pl.col("op").fill_null("launched by no op in the trace"))
    has_gpu = bool(account.gpu_time.window_ns)
    own = "device_self_ns" if has_gpu else "host_self_ns"
    table = table if has_gpu else table.drop("device_self_ns", "device_total_ns")
    share = (pl.col(own) / max(1, int(table[own].sum()))).alias("share")
    note = f"self: without the ops inside; share: of {'GPU work' if has_gpu else 'the time in ops'}"
    screen = ("op", "share", *([own] if has_gpu else []), "host_self_ns", "num_calls")
    return table_of(table.with_columns(share), "ops", "ops", note=note, screen=screen)


def _copies_and_syncs(account: RankAccount) -> Iterator[Any]:
    if account.copies.is_empty():
        yield Text("No copies, casts, layout changes or fills ran on the GPU.")
    else:
        title = "copies, casts, layout changes and fills"
        yield table_of(account.copies, "copies", title, _COPIES, note="busy share: of the time the GPU was busy")
    if account.syncs.is_empty():
        yield Text("The trace has no call that waits for the GPU.")
    else:
        yield table_of(
            _with_titles(account, account.syncs, "waited_for"),
            "syncs",
            "synchronization",
            {**dict(zip(_SYNCS, _SYNCS)), "title": "waited_for"},
            note="idle after: how long the GPU then had no work",
        )

"""The section `kernels`: what the GPU ran, how it was fed, ops, copies and synchronization."""

from collections.abc import Iterator

import polars as pl

from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.document.kernel_names import kernel_titles
from stepscope.document.model import Bars, Facts, Lines, Missing, Part, Series, Table, Text
from stepscope.document.tables import table_of
from stepscope.document.trace_facts import work_facts
from stepscope.document.verdict import class_name
from stepscope.formatting import average, duration, percent, plural
from stepscope.session import Session

NUM_BARS = 12
_LEAST_SHARE = 0.001
_NO_GPU = "the trace has no GPU work: record on a GPU, with ProfilerActivity.CUDA among the activities"
_CUT_OFF = "the trace is cut off, and GPU work is written last: record it again"
_COPIES = (
    "what op caller module num_calls num_calls_per_step num_pageable total_ns busy_share bytes bandwidth_bytes_per_s"
)
_SYNCS = "kind call op num_calls num_calls_per_step total_ns busy_ns wait_ns idle_after_ns waited_for:title"


def parts(session: Session) -> tuple[Part, ...]:
    """Return classes, names and sizes of kernels; launches and the queue; ops, copies and synchronization."""
    account = session.analysis.ranks[0]
    ops = () if account.ops.is_empty() else (op_table(account),)
    if not account.gpu_time.window_ns:
        return (Missing(no_gpu(account)), *ops)
    sizes = table_of(account.kernel_sizes, "kernel_sizes", "kernels by duration")
    tables = (kernel_table(account), sizes, *ops, *_copies_and_syncs(account))
    return (Text(work_text(account)), Facts(tuple(work_facts(account))), *_charts(account), *tables)


def no_gpu(account: RankAccount) -> str:
    return _CUT_OFF if account.is_cut_off else _NO_GPU


def work_text(account: RankAccount) -> str:
    over = plural(account.steps.height, "step") if account.steps.height else "the whole trace"
    work_ns = int(account.kernel_classes["total_ns"].sum())
    shares = dict(account.kernel_classes.select(pl.col("class").cast(pl.String), "share").iter_rows())
    unknown = percent(shares.pop("other", 0.0))
    known = [f"{class_name(name)} {percent(share)}" for name, share in shares.items() if share >= _LEAST_SHARE]
    kernels = plural(int(account.launches["num_kernels"] or 0), "kernel")
    shares_text = ", ".join([*known, f"unclassified {unknown}"])
    return f"{duration(work_ns)} of GPU work in {kernels} over {over}: {shares_text}."


def kernel_table(account: RankAccount) -> Table:
    """Return one row per kernel, those with the most time first."""
    return table_of(
        with_titles(account, account.top_kernels, "name"),
        "kernels",
        "kernels",
        "kernel:title class num_calls total_ns mean_ns p50_ns p99_ns share whole_name:name",
        note="share: of the sum of all durations",
        screen=("kernel", "share", "total_ns", "num_calls", "mean_ns", "p99_ns"),
    )


def titles_of(account: RankAccount) -> dict[str | None, str]:
    """Return a short name for every kernel, the same wherever it is shown."""
    names = account.top_kernels["name"].to_list()
    return dict(zip(names, kernel_titles([name or "" for name in names])))


def with_titles(account: RankAccount, table: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return the table with the short names of the kernels in a column as `title`."""
    titles = titles_of(account)
    names = [titles.get(name, name) for name in table[column].cast(pl.String)]
    return table.with_columns(pl.Series("title", names, dtype=pl.String))


def _charts(account: RankAccount) -> Iterator[Part]:
    classes = account.kernel_classes
    labels, series = [class_name(name) for name in classes["class"]], _one("GPU time", classes["total_ns"])
    yield Bars("kernel_classes", "GPU time by class of kernel", labels, series, "total_ns")

    every = account.top_kernels
    first, share = every.head(NUM_BARS), percent(float(every.head(NUM_BARS)["share"].sum()))
    caption = f"These {first.height} of {plural(every.height, 'kernel')} take {share} of GPU work."
    labels, series = with_titles(account, first, "name")["title"].to_list(), _one("GPU time", first["total_ns"])
    yield Bars("top_kernels", "kernels with the most time", labels, series, "total_ns", caption=caption)

    phases = account.gemm_share.with_columns(pl.col("phase").cast(pl.String).fill_null("unknown"))
    shares = [f"{row['phase']} {percent(row['gemm_share'])}" for row in phases.to_dicts() if row["total_ns"]]
    caption = f"Share of matrix products in the GPU work: {', '.join(shares)}."
    products = Series("matrix products", phases["gemm_ns"].to_list(), color="gemm")
    others = Series("everything else", (phases["total_ns"] - phases["gemm_ns"]).to_list(), color="other")
    labels, title = phases["phase"].to_list(), "matrix products by phase"
    yield Bars("gemm_share", title, labels, (products, others), "total_ns", caption=caption)

    sizes = account.kernel_sizes
    num, total_ns = max(1, int(sizes["num_kernels"].sum())), max(1, int(sizes["total_ns"].sum()))
    small = sizes.row(0, named=True)
    caption = (
        f"{small['num_kernels']:,} of {num:,} kernels ({percent(small['num_kernels'] / num)}) take "
        f"{small['size']}, {percent(small['total_ns'] / total_ns)} of the kernel time."
    )
    labels, series = sizes["size"].to_list(), _one("kernels", sizes["num_kernels"])
    yield Bars("kernel_sizes", "kernels by duration", labels, series, "num_kernels", caption=caption)

    table, found = account.queue_depth, account.launches
    if table.is_empty() or found["queue_depth_p50"] is None:
        return
    caption = (
        f"In the queue at a launch: {average(found['queue_depth_p50'])} (median), at most "
        f"{average(found['queue_depth_max'] or 0)}, none at {percent(found['starved_share'] or 0.0)} of launches."
    )
    since = table["time_ns"] - int(table["time_ns"][0])
    series = (Series("in the queue", table["depth"].to_list(), since.to_list()),)
    x, y, title = "since_first_launch_ns", "num_kernels_in_queue", "kernels launched and not finished"
    yield Lines("queue_depth", title, x, y, series, style="steps", caption=caption)


def _one(name: str, values: pl.Series) -> tuple[Series, ...]:
    return (Series(name, values.to_list()),)


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


def _copies_and_syncs(account: RankAccount) -> Iterator[Part]:
    if account.copies.is_empty():
        yield Text("No copies, casts, layout changes or fills ran on the GPU.")
    else:
        title = "copies, casts, layout changes and fills"
        yield table_of(account.copies, "copies", title, _COPIES, note="busy share: of the time the GPU was busy")
    if account.syncs.is_empty():
        yield Text("The trace has no call that waits for the GPU.")
    else:
        syncs = with_titles(account, account.syncs, "waited_for")
        note = "idle after: how long the GPU then had no work"
        yield table_of(syncs, "syncs", "synchronization", _SYNCS, note=note)

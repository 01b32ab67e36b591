"""Runs of consecutive kernels that belong to one module, at every depth of the module tree."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.structure.links import Linked

_MOST_DEPTH = 12
RUN = {"device": pl.Int32, "stream": pl.Int64, "depth": pl.UInt32, "module": pl.String, "phase": pl.String,
       "step": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64}  # fmt: skip


def module_runs(linked: Linked) -> pl.DataFrame:
    """Return the runs of each stream (`RUN`); a new module, phase or step begins another, as does a kernel of none.

    A number belongs to the word before it: `blocks.3.mlp` is `mlp` in `blocks.3`, never in `3`.
    """
    none = pl.DataFrame(schema=RUN)
    # A collective would belong to the module that happened to wait for it.
    device = linked.device.filter(pl.col("activity") != "communication")
    if device["module"].null_count() == device.height:
        return none
    names = device["module"].cast(pl.String)
    paths = {name: _prefixes(name) for name in names.unique().drop_nulls()}
    work = device.select(
        pl.col("device").fill_null(0), pl.col("stream").fill_null(0), pl.col("phase").cast(pl.String),
        pl.col("step").cast(pl.String), "start_ns", "end_ns",
    )  # fmt: skip
    found = [none]
    for depth in range(min(_MOST_DEPTH, max(map(len, paths.values())))):
        known = [name for name, path in paths.items() if len(path) > depth]
        module = names.replace_strict(known, [paths[name][depth] for name in known], default=None)
        found.append(_runs(work.with_columns(module.cast(pl.String).alias("module")), depth))
    return pl.concat(found)


def _runs(work: pl.DataFrame, depth: int) -> pl.DataFrame:
    lane, same = ["device", "stream"], ["device", "stream", "module", "phase", "step"]
    ordered = work.sort(*lane, "start_ns", maintain_order=True)
    is_new = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in same)
    runs = (
        ordered.with_columns(is_new.cum_sum().alias("run"))
        .group_by("run", maintain_order=True)
        .agg(*(pl.col(name).first() for name in same), pl.col("start_ns").min(), pl.col("end_ns").max())
    )
    next_start = pl.col("start_ns").shift(-1).over(lane)
    return runs.filter(pl.col("module").is_not_null()).select(
        "device", "stream", pl.lit(depth, pl.UInt32).alias("depth"), "module", "phase", "step", "start_ns",
        pl.min_horizontal("end_ns", next_start).alias("end_ns"),
    )  # fmt: skip


def _prefixes(name: str) -> list[str]:
    """
    >>> _prefixes("model.blocks.3.mlp")
    ['model', 'model.blocks.3', 'model.blocks.3.mlp']
    """
    prefixes, so_far = list[str](), ""
    words = name.split(".")
    for number, word in enumerate(words):
        so_far = f"{so_far}.{word}" if number else word
        if number + 1 == len(words) or not words[number + 1].isdigit():
            prefixes.append(so_far)
    return prefixes

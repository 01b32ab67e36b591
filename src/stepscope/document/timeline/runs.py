"""Runs of consecutive kernels that belong to one module, at every depth of the module tree."""

from __future__ import annotations

import polars as pl

from stepscope.analysis.structure.links import Linked

_MOST_DEPTH = 12
_LANE = ("device", "stream")
RUN = {"device": pl.Int32, "stream": pl.Int64, "depth": pl.UInt32, "module": pl.String, "phase": pl.String,
       "step": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64}  # fmt: skip


def module_runs(linked: Linked) -> pl.DataFrame:
    """Return the runs of each stream (`RUN`); a new module, phase or step begins another, as does a kernel of none.

    A number belongs to the word before it: `blocks.3.mlp` is `mlp` in `blocks.3`, never in `3`.
    """
    # A collective would belong to the module that happened to wait for it.
    device = linked.device.filter(pl.col("activity") != "communication")
    names = device["module"].cast(pl.String)
    paths = {name: _prefixes(name) for name in names.unique().drop_nulls()}
    texts = pl.col("phase", "step").cast(pl.String)
    work = device.select(pl.col(*_LANE).fill_null(0), texts, "start_ns", "end_ns")
    found = [pl.DataFrame(schema=RUN)]
    for depth in range(min(_MOST_DEPTH, max(map(len, paths.values()), default=0))):
        known = [name for name, path in paths.items() if len(path) > depth]
        module = names.replace_strict(known, [paths[name][depth] for name in known], default=None)
        found.append(_runs(work.with_columns(module=module.cast(pl.String)), depth))
    return pl.concat(found)


def _runs(work: pl.DataFrame, depth: int) -> pl.DataFrame:
    same = (*_LANE, "module", "phase", "step")
    is_new = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in same)
    ordered = work.sort(*_LANE, "start_ns", maintain_order=True).with_columns(run=is_new.cum_sum())
    runs = ordered.group_by("run", maintain_order=True).agg(
        pl.col(*same).first(), pl.col("start_ns").min(), pl.col("end_ns").max()
    )
    end = pl.min_horizontal("end_ns", pl.col("start_ns").shift(-1).over(_LANE))
    named = runs.filter(pl.col("module").is_not_null())
    return named.with_columns(depth=pl.lit(depth, pl.UInt32), end_ns=end).select(RUN.keys())


def _prefixes(name: str) -> list[str]:
    """Return a module and those around it.

    >>> _prefixes("model.blocks.3.mlp")
    ['model', 'model.blocks.3', 'model.blocks.3.mlp']
    """
    words = name.split(".")
    ends = [at for at in range(1, len(words) + 1) if at == len(words) or not words[at].isdigit()]
    return [".".join(words[:end]) for end in ends]

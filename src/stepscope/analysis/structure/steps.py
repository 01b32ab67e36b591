"""Where steps and phases begin and end in a trace, with or without labels."""

from __future__ import annotations

import re
from dataclasses import dataclass

import polars as pl

from stepscope.analysis.structure.intervals import intersect, spans, sweep, union
from stepscope.analysis.structure.names import matches
from stepscope.analysis.structure.nesting import ancestor
from stepscope.analysis.time.phases import PHASES

_NO_THREAD = 2**32 - 1
_UNTIMED = ["overhead", "other"]
PHASE_PREFIX = "stepscope.phase/"  # prefix of phase names, written by `recorder/trace.py`
_STEP = r"^ProfilerStep#(\d+)$"
_BACKWARD = "^autograd::engine::evaluate_function|^torch::autograd::AccumulateGrad$"
_PATTERNS = {
    "optimizer": r"^Optimizer\.(step|zero_grad)#",
    "data": r"^enumerate\(DataLoader\)#|DataLoaderIter\.__next__",
}
# Common names in `record_function`, without decoration.
_USERS = {
    "forward": {"forward", "fwd", "forward_pass", "model_forward"},
    "backward": {"backward", "bwd", "backward_pass"},
    "optimizer": {"optimizer", "optimizer_step", "optim", "opt", "optimizer.step"},
    "data": {"data", "dataloader", "data_loading", "load_data", "next_batch", "wait_for_batch", "get_batch"},
}


LABELS = r"^ProfilerStep#\d+$|^Optimizer\.(step|zero_grad)#|^enumerate\(DataLoader\)#"
"""The profiler's own labels, which old versions recorded as ops."""


@dataclass(frozen=True)
class Steps:
    """The steps of a trace and their phases."""

    source: str  # `ProfilerStep`, `optimizer`, `backward`, or `none` (the trace has no steps)
    table: pl.DataFrame  # `step`, `start_ns`, `end_ns`, in order and without overlaps
    phases: pl.DataFrame  # `start_ns`, `end_ns`, `phase`, covering all host time without gaps
    phase_source: str
    """`labels` (Stepscope's), `annotations` (the profiler's and the user's), or `autograd` (inferred)."""
    main_thread: int | None  # the thread that runs the training loop
    is_forward_found: bool = False
    """Whether the forward is unlabeled: it then begins with the first op, which may prepare the batch."""

    @property
    def num(self) -> int:
        return self.table.height


def find_steps(host: pl.DataFrame) -> Steps:
    """Return steps and phases from the nested host table."""
    annotations = host.filter(pl.col("kind") == "annotation").with_columns(pl.col("name").cast(pl.String))
    main = _main_thread(host, annotations)
    backward = _bursts(host, main)
    source, table = _steps(host, annotations, backward)
    sets, phase_source = _labeled(annotations)
    is_forward_found = phase_source != "labels" and sets["forward"].is_empty()
    phases, phase_source = _phases(host, sets, phase_source, backward, table, main)
    return Steps(source, table, phases, phase_source, main, is_forward_found)


def at_times(events: pl.DataFrame, steps: Steps, time: str) -> pl.DataFrame:
    """Return events with the `step` and `phase` at one of their times; null outside."""
    # All boundaries in order, so that one search finds both step and phase of an event.
    borders = pl.concat([table[end] for table in (steps.table, steps.phases) for end in ("start_ns", "end_ns")])
    borders = borders.unique().sort()
    begins = [_holding(steps.table, "step", borders), _holding(steps.phases, "phase", borders)]
    place = _last_at(borders, events[time])
    return events.with_columns(column.gather(place) for column in begins)


def _holding(intervals: pl.DataFrame, label: str, times: pl.Series) -> pl.Series:
    """Return the label of the disjoint, ordered interval that holds each time, or null."""
    place = _last_at(intervals["start_ns"], times)
    is_inside = (intervals["end_ns"].gather(place) > times).fill_null(False)
    found: pl.Series = intervals[label].gather(place.zip_with(is_inside, pl.Series([None], dtype=pl.UInt32)))
    return found.alias(label)


def _last_at(ordered: pl.Series, times: pl.Series) -> pl.Series:
    """Return the position of the last ordered time that is not after each time; null before the first."""
    num_before: pl.Series = ordered.search_sorted(times, side="right")
    place: pl.Series = num_before.zip_with(num_before > 0, pl.Series([None], dtype=pl.UInt32)) - 1
    return place


def _main_thread(host: pl.DataFrame, annotations: pl.DataFrame) -> int | None:
    """Return the thread of the step labels, else of the optimizer, else the one with most ops outside autograd."""
    working = host["thread"].filter(host["kind"] == "op").unique().implode()
    for pattern in (_STEP, _PATTERNS["optimizer"], "^" + re.escape(PHASE_PREFIX)):
        found = annotations.filter(pl.col("name").str.contains(pattern), pl.col("thread").is_in(working))
        if not found.is_empty():
            return int(found["thread"].mode().min())  # type: ignore[arg-type]
    is_root = (host["kind"] == "op") & ~matches(host["name"], "^autograd::")
    roots = host.select("thread", "self_ns").filter(is_root)
    if roots.is_empty():
        return None
    counts = roots.group_by("thread").agg(pl.col("self_ns").sum()).sort("self_ns", "thread")
    return int(counts["thread"][-1])


def _bursts(host: pl.DataFrame, main: int | None) -> pl.DataFrame:
    """Return stretches of autograd work, joined unless the main thread starts an op in between."""
    is_backward = (host["kind"] == "op") & (
        matches(host["name"], _BACKWARD) | (host["forward_thread"] > 0).fill_null(False)
    )
    work = union(spans(host, is_backward))
    if work.is_empty():
        return work
    is_own = (host["kind"] == "op") & (host["thread"] == (_NO_THREAD if main is None else main))
    if (is_own & is_backward).any():  # without a GPU, autograd runs on the calling thread
        is_own &= ancestor(host, is_backward).is_null()
    own = host["start_ns"].filter(is_own).sort()
    before = own.search_sorted(work["start_ns"], side="left")
    after = own.search_sorted(work["end_ns"], side="left")
    group = (before != after.shift(1).fill_null(before[0])).cast(pl.Int64).cum_sum()
    return (
        work.with_columns(group.alias("group"))
        .group_by("group", maintain_order=True)
        .agg(pl.col("start_ns").first(), pl.col("end_ns").last())
        .drop("group")
    )


def _steps(host: pl.DataFrame, annotations: pl.DataFrame, backward: pl.DataFrame) -> tuple[str, pl.DataFrame]:
    labeled = (
        annotations.with_columns(pl.col("name").str.extract(_STEP).cast(pl.Int64, strict=False).alias("step"))
        .filter(pl.col("step").is_not_null(), pl.col("duration_ns") > 0)
        .sort("start_ns", "duration_ns", descending=[False, True])
        .unique("step", keep="first", maintain_order=True)
        .select("step", "start_ns", "end_ns")
    )
    if not labeled.is_empty():
        # A step ends where the next one starts, even if labels overlap.
        end = pl.min_horizontal("end_ns", pl.col("start_ns").shift(-1).fill_null(pl.col("end_ns")))
        cut = labeled.with_columns(end.alias("end_ns"))
        return "ProfilerStep", cut.filter(pl.col("end_ns") > pl.col("start_ns"))
    empty = pl.DataFrame(schema={"step": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64})
    timed = host["start_ns"].filter(~host["kind"].is_in(_UNTIMED))
    if timed.is_empty():
        return "none", empty
    first = int(timed.min())
    # An optimizer may call another: only the outer one is the step.
    labels = annotations.filter(pl.col("name").str.contains(r"^Optimizer\.step#")).sort(
        "start_ns", "end_ns", descending=[False, True]
    )
    optimizer = labels.filter((pl.col("end_ns") > pl.col("end_ns").cum_max().shift(1)).fill_null(True))
    for source, ends in (("optimizer", optimizer["end_ns"]), ("backward", backward["end_ns"])):
        if len(ends):
            starts = pl.concat([pl.Series([first], dtype=pl.Int64), ends.head(-1)])
            table = pl.DataFrame({"step": range(len(ends)), "start_ns": starts, "end_ns": ends})
            return source, table.filter(pl.col("end_ns") > pl.col("start_ns"))
    return "none", empty


def _labeled(annotations: pl.DataFrame) -> tuple[dict[str, pl.DataFrame], str]:
    """Return the intervals that labels assign to phases."""
    ours = annotations.filter(pl.col("name").str.starts_with(PHASE_PREFIX))
    if not ours.is_empty():
        phase = pl.col("name").str.strip_prefix(PHASE_PREFIX)
        return {name: spans(ours.filter(phase == name)) for name in PHASES}, "labels"
    plain = annotations.with_columns(pl.col("name").str.strip_chars("#*=-[]<> ").str.to_lowercase().alias("plain"))
    sets = {}
    for name, words in _USERS.items():
        pattern = _PATTERNS.get(name)
        is_named = pl.col("plain").is_in(list(words))
        is_named = is_named | pl.col("name").str.contains(pattern) if pattern else is_named
        sets[name] = spans(plain.filter(is_named))
    return sets, "annotations"


def _phases(
    host: pl.DataFrame,
    sets: dict[str, pl.DataFrame],
    source: str,
    backward: pl.DataFrame,
    steps: pl.DataFrame,
    main: int | None,
) -> tuple[pl.DataFrame, str]:
    """Return host time in phases. Without labels, autograd's bursts are the backward, and the main thread's ops
    before a burst, with no other phase between, are the forward."""
    if source != "labels":
        if not any(not frame.is_empty() for frame in sets.values()):
            source = "autograd"
        if sets["backward"].is_empty():
            sets["backward"] = backward
        if sets["forward"].is_empty():
            sets["forward"] = _found_forward(host, sets, steps, main)
    sets = {name: frame for name, frame in sets.items() if name != "other"}
    bounds = spans(host, ~host["kind"].is_in(_UNTIMED))
    if bounds.is_empty():
        return pl.DataFrame(schema={"start_ns": pl.Int64, "end_ns": pl.Int64, "phase": pl.Enum(PHASES)}), source
    whole = pl.DataFrame({"start_ns": [bounds["start_ns"].min()], "end_ns": [bounds["end_ns"].max()]})
    stretches = sweep({"whole": whole, **sets})
    phase = pl.lit("other")
    for name in ("forward", "backward", "data", "optimizer"):  # the last one that covers a moment wins
        phase = pl.when(pl.col(name)).then(pl.lit(name)).otherwise(phase)
    labeled = stretches.select("start_ns", "end_ns", phase.alias("phase"))
    changes = (pl.col("phase") != pl.col("phase").shift(1)).fill_null(True).cum_sum().alias("run")
    return (
        labeled.with_columns(changes)
        .group_by("run", maintain_order=True)
        .agg(pl.col("start_ns").first(), pl.col("end_ns").last(), pl.col("phase").first())
        .drop("run")
        .cast({"phase": pl.Enum(PHASES)}),
        source,
    )


def _found_forward(
    host: pl.DataFrame, sets: dict[str, pl.DataFrame], steps: pl.DataFrame, main: int | None
) -> pl.DataFrame:
    ops = spans(host, (pl.col("kind") == "op") & (pl.col("thread") == (_NO_THREAD if main is None else main)))
    if ops.is_empty():
        return pl.DataFrame(schema={"start_ns": pl.Int64, "end_ns": pl.Int64})
    # Clearing gradients between forward and backward does not end the forward.
    clearing = spans(host, (host["kind"] == "annotation") & matches(host["name"], r"^Optimizer\.zero_grad#"))
    stepping = sets["optimizer"].join(clearing, on=["start_ns", "end_ns"], how="anti")
    taken = union(pl.concat([sets["backward"], stepping, sets["data"]]))
    bounds = pl.DataFrame({"start_ns": [ops["start_ns"].min()], "end_ns": [ops["end_ns"].max()]})
    cuts = steps.select("start_ns", "end_ns") if not steps.is_empty() else bounds
    # Stretches are not joined across step boundaries.
    edges = pl.concat([cuts["start_ns"], cuts["end_ns"]])
    free = sweep({"cuts": cuts, "taken": taken, "bounds": bounds}, edges).filter("cuts", ~pl.col("taken"))
    joined = _join_runs(free, edges)
    starts = ops["start_ns"].sort()
    first = starts.search_sorted(joined["start_ns"], side="left")
    last_end = ops.select("start_ns", pl.col("end_ns").cum_max().over(pl.lit(1))).sort("start_ns")
    candidates = joined.with_columns(
        starts.gather(pl.Series(first).cast(pl.UInt32).clip(0, len(starts) - 1)).alias("first_op")
    ).filter(pl.col("first_op") >= pl.col("start_ns"), pl.col("first_op") < pl.col("end_ns"))
    is_training = not sets["backward"].is_empty()
    if is_training:
        found = candidates.filter(pl.col("end_ns").is_in(sets["backward"]["start_ns"].implode()))
        return found.select(pl.col("first_op").alias("start_ns"), "end_ns")
    found = candidates.select(pl.col("first_op").alias("start_ns"), "end_ns")
    return intersect(found, union(_until_last_op(found, last_end)))


def _until_last_op(found: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """Return each stretch shortened to the end of the last op that starts in it."""
    return (
        found.sort("end_ns")
        .join_asof(
            ops.rename({"start_ns": "_start", "end_ns": "_end"}),
            left_on="end_ns",
            right_on="_start",
            allow_exact_matches=False,
            check_sortedness=False,
        )
        .select("start_ns", pl.min_horizontal("end_ns", "_end").alias("end_ns"))
    )


def _join_runs(stretches: pl.DataFrame, edges: pl.Series) -> pl.DataFrame:
    """Return touching stretches joined, except across an edge."""
    is_new = (pl.col("start_ns") != pl.col("end_ns").shift(1)).fill_null(True) | pl.col("start_ns").is_in(
        edges.implode()
    )
    return (
        stretches.with_columns(is_new.cum_sum().alias("run"))
        .group_by("run", maintain_order=True)
        .agg(pl.col("start_ns").first(), pl.col("end_ns").last())
        .drop("run")
    )

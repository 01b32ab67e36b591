"""Where steps and phases begin and end in a trace, with or without labels."""

import re
from dataclasses import dataclass

import polars as pl

from stepscope.analysis.structure.intervals import intersect, last_covering, spans, sweep, union
from stepscope.analysis.structure.nesting import ancestor, matches
from stepscope.analysis.time.phases import PHASES

_NO_THREAD = 2**32 - 1
_UNTIMED = ["overhead", "other"]
PHASE_PREFIX = "stepscope.phase/"  # prefix of phase names, written by `recorder/trace_window.py`
_STEP = r"^ProfilerStep#(\d+)$"
# Ranges that a user named: `step 12`, `train_step`. A number makes the word a step's even if it could mean a phase.
_RANGES = {
    r"(?i)^((train|training|global)[ _-]?)*(step|iteration|iter|batch)[ _:#=-]*\d{1,15}$": 1,
    r"(?i)^((train|training)[ _-]?)*(step|iteration|iter)$": 2,
}
"""Patterns, and the least number of ranges that make steps."""
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

    source: str  # `ProfilerStep`, `range`, `optimizer`, `backward`, or `none` (the trace has no steps)
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
    annotations = host.select("kind", "name", "thread", "start_ns", "duration_ns", "end_ns", "parent")
    annotations = annotations.filter(pl.col("kind") == "annotation").with_columns(pl.col("name").cast(pl.String))
    main = _main_thread(host, annotations)
    is_main_op = (host["kind"] == "op") & (host["thread"] == (_NO_THREAD if main is None else main))
    backward = _bursts(host, is_main_op)
    source, table = _steps(host, annotations, backward)
    sets, phase_source = _labeled(annotations)
    is_forward_found = phase_source != "labels" and sets["forward"].is_empty()
    if phase_source != "labels":
        # Without labels, autograd's bursts are the backward.
        if all(frame.is_empty() for frame in sets.values()):
            phase_source = "autograd"
        if sets["backward"].is_empty():
            sets["backward"] = backward
        if is_forward_found:
            sets["forward"] = _found_forward(host, sets, table, is_main_op)
    phases = _phases(host, sets)
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
    """Return the thread of the step labels, else of the optimizer, else the one with most work outside autograd."""
    working = host["thread"].filter(host["kind"] == "op").unique().implode()
    for pattern in (_STEP, _PATTERNS["optimizer"], "^" + re.escape(PHASE_PREFIX)):
        found = annotations.filter(pl.col("name").str.contains(pattern), pl.col("thread").is_in(working))
        if not found.is_empty():
            return int(found["thread"].mode().min())  # type: ignore[arg-type]  # numbers
    is_root = (host["kind"] == "op") & ~matches(host["name"], "^autograd::")
    for is_own in (is_root, host["kind"].is_in(["runtime", "driver"])):  # without ops, who calls the GPU most
        roots = host.select("thread", "self_ns").filter(is_own)
        if not roots.is_empty():
            counts = roots.group_by("thread").agg(pl.col("self_ns").sum()).sort("self_ns", "thread")
            return int(counts["thread"][-1])
    return None


def _bursts(host: pl.DataFrame, is_own: pl.Series) -> pl.DataFrame:
    """Return stretches of autograd work, joined unless the main thread starts an op in between."""
    is_backward = (host["kind"] == "op") & (
        matches(host["name"], _BACKWARD) | (host["forward_thread"] > 0).fill_null(False)
    )
    work = union(spans(host, is_backward))
    if work.is_empty():
        return work
    if (is_own & is_backward).any():  # without a GPU, autograd runs on the calling thread
        is_own = is_own & ancestor(host, is_backward).is_null()
    own = host["start_ns"].filter(is_own).sort()
    before = own.search_sorted(work["start_ns"], side="left")
    after = own.search_sorted(work["end_ns"], side="left")
    return _joined(work, before != after.shift(1).fill_null(before[0]))


def _joined(stretches: pl.DataFrame, is_new: pl.Series | pl.Expr, *others: pl.Expr) -> pl.DataFrame:
    """Return stretches joined into runs; a run begins where `is_new`."""
    return (
        stretches.with_columns(is_new.cum_sum().alias("run"))
        .group_by("run", maintain_order=True)
        .agg(pl.col("start_ns").first(), pl.col("end_ns").last(), *others)
        .drop("run")
    )


def _steps(host: pl.DataFrame, annotations: pl.DataFrame, backward: pl.DataFrame) -> tuple[str, pl.DataFrame]:
    labeled = (
        annotations.with_columns(pl.col("name").str.extract(_STEP).cast(pl.Int64, strict=False).alias("step"))
        .filter(pl.col("step").is_not_null(), pl.col("duration_ns") > 0)
        .sort("start_ns", "duration_ns", descending=[False, True])
        .unique("step", keep="first", maintain_order=True)
        .select("step", "start_ns", "end_ns")
    )
    for source, named in (("ProfilerStep", labeled), ("range", _ranges(host, annotations))):
        if not named.is_empty():
            # A step ends where the next one starts, even if labels overlap.
            end = pl.min_horizontal("end_ns", pl.col("start_ns").shift(-1).fill_null(pl.col("end_ns")))
            cut = named.with_columns(end.alias("end_ns"))
            return source, cut.filter(pl.col("end_ns") > pl.col("start_ns"))
    first = host["start_ns"].filter(~host["kind"].is_in(_UNTIMED)).min()
    # An optimizer may call another: only the outer one is the step.
    labels = annotations.filter(pl.col("name").str.starts_with("Optimizer.step#"))
    labels = labels.sort("start_ns", "end_ns", descending=[False, True])
    optimizer = labels.filter((pl.col("end_ns") > pl.col("end_ns").cum_max().shift(1)).fill_null(True))
    for source, ends in (("optimizer", optimizer["end_ns"]), ("backward", backward["end_ns"])):
        if len(ends):
            starts = ends.shift(1, fill_value=first)
            table = pl.DataFrame({"step": range(len(ends)), "start_ns": starts, "end_ns": ends})
            return source, table.filter(pl.col("end_ns") > pl.col("start_ns"))
    return "none", pl.DataFrame(schema=dict.fromkeys(("step", "start_ns", "end_ns"), pl.Int64))


def _ranges(host: pl.DataFrame, annotations: pl.DataFrame) -> pl.DataFrame:
    """Return the user's ranges that are steps, if any.

    Ranges are alike if only numbers in their names differ. They are steps if they are named so and fill half the time
    from the first to the last. Without ops, the outermost ranges that fill most of the time are steps too.
    """
    name, length = pl.col("name"), pl.col("end_ns") - pl.col("start_ns")
    chosen = [(annotations.filter(name.str.contains(pattern)), least) for pattern, least in _RANGES.items()]
    if not (host["kind"] == "op").any():
        phases = [word for words in _USERS.values() for word in words]
        is_phase = name.str.to_lowercase().is_in(phases) | name.str.contains("|".join(_PATTERNS.values()))
        chosen.append((annotations.filter(pl.col("parent").is_null() & ~is_phase), 3))
    for ranges, least in chosen:
        alike = ranges.with_columns(name.str.replace_all(r"\d+", "#").alias("alike")).sort("start_ns", "end_ns")
        is_outer = (pl.col("end_ns") > pl.col("end_ns").cum_max().shift(1)).fill_null(True).over("thread", "alike")
        outer = alike.filter(is_outer & (length > 0))
        groups = outer.group_by("thread", "alike").agg(
            num=pl.len(), covered=length.sum(), span=pl.col("end_ns").max() - pl.col("start_ns").min()
        )
        groups = groups.filter(pl.col("num") >= least, 2 * pl.col("covered") >= pl.col("span"))
        if groups.is_empty():
            continue
        best = groups.sort("covered", "thread", "alike").tail(1)
        found = outer.join(best, on=["thread", "alike"], how="semi", maintain_order="left")
        number = found["name"].str.extract(r"(\d{1,15})$").cast(pl.Int64)
        is_counted = number.null_count() == 0 and bool((number.diff() > 0).fill_null(True).all())
        counted = number if is_counted else pl.int_range(found.height, eager=True)
        return found.select(counted.alias("step"), "start_ns", "end_ns")
    return pl.DataFrame(schema=dict.fromkeys(("step", "start_ns", "end_ns"), pl.Int64))


def _labeled(annotations: pl.DataFrame) -> tuple[dict[str, pl.DataFrame], str]:
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


def _phases(host: pl.DataFrame, sets: dict[str, pl.DataFrame]) -> pl.DataFrame:
    bounds = spans(host, ~host["kind"].is_in(_UNTIMED))
    if bounds.is_empty():
        return pl.DataFrame(schema={"start_ns": pl.Int64, "end_ns": pl.Int64, "phase": pl.Enum(PHASES)})
    whole = pl.DataFrame({"start_ns": [bounds["start_ns"].min()], "end_ns": [bounds["end_ns"].max()]})
    phase = last_covering(("forward", "backward", "data", "optimizer"), "other").cast(pl.Enum(PHASES))
    labeled = sweep({**sets, "whole": whole}).select("start_ns", "end_ns", phase.alias("phase"))
    return _joined(labeled, (pl.col("phase") != pl.col("phase").shift(1)).fill_null(True), pl.col("phase").first())


def _found_forward(
    host: pl.DataFrame, sets: dict[str, pl.DataFrame], steps: pl.DataFrame, is_main_op: pl.Series
) -> pl.DataFrame:
    """Return the main thread's ops before each backward, with no other phase between; without a backward, all."""
    ops = spans(host, is_main_op)
    if ops.is_empty():
        return ops
    # Clearing gradients between forward and backward does not end the forward.
    clearing = spans(host, (host["kind"] == "annotation") & matches(host["name"], r"^Optimizer\.zero_grad#"))
    stepping = sets["optimizer"].join(clearing, on=["start_ns", "end_ns"], how="anti")
    taken = union(pl.concat([sets["backward"], stepping, sets["data"]]))
    bounds = pl.DataFrame({"start_ns": [ops["start_ns"].min()], "end_ns": [ops["end_ns"].max()]})
    cuts = bounds if steps.is_empty() else steps
    # Stretches are not joined across step boundaries.
    edges = pl.concat([cuts["start_ns"], cuts["end_ns"]])
    free = sweep({"cuts": cuts, "taken": taken, "bounds": bounds}, edges).filter("cuts", ~pl.col("taken"))
    is_apart = (pl.col("start_ns") != pl.col("end_ns").shift(1)).fill_null(True)
    joined = _joined(free, is_apart | pl.col("start_ns").is_in(edges.implode()))
    starts = ops["start_ns"].sort()
    first = starts.search_sorted(joined["start_ns"], side="left").clip(0, len(starts) - 1)
    found = joined.with_columns(starts.gather(first).alias("first_op")).filter(
        pl.col("first_op") >= pl.col("start_ns"), pl.col("first_op") < pl.col("end_ns")
    )
    found = found.select(pl.col("first_op").alias("start_ns"), "end_ns")
    if not sets["backward"].is_empty():
        return found.filter(pl.col("end_ns").is_in(sets["backward"]["start_ns"].implode()))
    # Each stretch ends with the last op that starts in it.
    last = ops.select(pl.col("start_ns").alias("_start"), pl.col("end_ns").cum_max().alias("_end")).sort("_start")
    ended = found.sort("end_ns").join_asof(
        last, left_on="end_ns", right_on="_start", allow_exact_matches=False, check_sortedness=False
    )
    return intersect(found, ended.select("start_ns", pl.min_horizontal("end_ns", "_end").alias("end_ns")))

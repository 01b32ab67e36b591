"""The lines of the script behind the ops of a CPU, as tables and as text."""

from dataclasses import replace

import polars as pl

from stepscope.analysis.structure.intervals import covered_before
from stepscope.analysis.structure.op_log import runs_unseen
from stepscope.analysis.time.cpu_ledger import DATA, TRAINING
from stepscope.analysis.time.ledger import Ledger
from stepscope.errors import ABOUT_CPUS, Unavailable, if_available
from stepscope.formatting import duration, plural, safe, whole_percent
from stepscope.session.case import Case

PHASE = pl.col("phase").cast(pl.String)
_MOST_LINES = 3  # in a sentence
_MOST_LISTED = 10


def ops_of(case: Case) -> pl.DataFrame:
    """Return the ops of the typical steps on a CPU with the line behind each (`analysis/structure/op_log.py`)."""
    if case.recording and not case.is_on_cpu:  # a trace alone does not say
        raise Unavailable(ABOUT_CPUS)
    return logged_of(case)


def logged_of(case: Case, of_all_steps: bool = False) -> pl.DataFrame:
    """Return the ops of the typical steps on any device with the line behind each."""
    if not case.recording or of_all_steps:  # a trace alone does not say
        return case.logged_steps
    if case.is_on_cpu:
        return case.within(case.logged_steps)
    # The host is ahead of the GPU: steps say more than times.
    return case.logged_steps.filter(pl.col("step").is_in(case.work["step"].unique().implode()))


def followed_of(case: Case) -> pl.DataFrame:
    """Return `logged_of` if the log has all that reads a result."""
    ops = logged_of(case)
    if runs_unseen(case.work):
        raise Unavailable("Compiled code or a library's own kernels ran in the step, and what they read is not seen.")
    return ops


def op_share(case: Case) -> float:
    """Return the time of an op without the profiler ÷ its `self_ns`, which is that of its work if there is a GPU."""
    return case.clean_share if case.is_on_cpu else 1.0


def lines_of(case: Case, ops: pl.DataFrame) -> pl.DataFrame:
    """Return ops by line, per step, the longest first: `place`, `num_calls`, `duration_ns`, `ops`."""
    inside = ops.filter(pl.col("place").is_not_null()).with_columns(pl.col("name").cast(pl.String))
    by_op = inside.group_by("place", "name").agg(pl.col("self_ns").sum(), pl.len())
    by_op = by_op.sort("self_ns", "name", descending=[True, False])
    sums = (
        (pl.col("len").sum() / case.num_steps).alias("num_calls"),
        (pl.col("self_ns").sum() * op_share(case) / case.num_steps).alias("duration_ns"),
    )
    names = pl.col("name").head(3).str.replace("aten::", "", literal=True).str.join(", ").alias("ops")
    table = by_op.group_by("place", maintain_order=True).agg(*sums, names)
    return table.sort("duration_ns", "place", descending=[True, False])


def lines_text(table: pl.DataFrame) -> str:
    """Return the longest lines of a table as text: `train.py:31 in step (12.0 ms: cat, mul)`."""
    rows, num_others = table.head(_MOST_LINES).iter_rows(named=True), table.height - _MOST_LINES
    parts = [f"{line_text(row['place'])} ({duration(row['duration_ns'], 3)}: {safe(row['ops'], 60)})" for row in rows]
    return ", ".join(parts) + (f" and {plural(num_others, 'other line')}" if num_others > 0 else "")


def caller_of(ops: pl.DataFrame) -> str | None:
    """Return the line that called the models whose ops take most of these ops' time; None if they are in none."""
    times = ops.group_by("caller").agg(pl.col("self_ns").sum()).sort("self_ns", "caller", descending=[True, False])
    return times["caller"][0] if times.height else None


def line_text(place: str) -> str:
    where, _, function = place.partition(" ")
    return safe(f"{where} in {function}" if function and function != "<module>" else where, 80)


def first_line(table: pl.DataFrame) -> str:
    return safe(str(table["place"][0]).partition(" ")[0], 80)


def python_between_ns(case: Case, ops: pl.DataFrame) -> float:
    """Return the time without an op between two ops of these in the forward, per step."""
    top = ops_of(case).filter(PHASE == "forward").sort("start_ns").select("row", "start_ns", "end_ns")
    top = top.with_columns(pl.col("row").is_in(ops["row"].implode()).alias("is_theirs"))
    gap = pl.col("start_ns") - pl.col("end_ns").cum_max().shift(1)
    both = pl.col("is_theirs") & pl.col("is_theirs").shift(1)
    gaps = top.select(pl.when(both).then(gap).clip(0)).to_series()
    return float(gaps.sum()) * case.clean_share / case.num_steps


def with_lines(ledger: Ledger, case: Case) -> Ledger:
    """Return a ledger with the lines that take most of a step, if a recording has them."""
    lines = if_available(lambda: lines_of(case, logged_of(case)).head(_MOST_LISTED))
    if lines is None:
        return ledger
    share = (pl.col("duration_ns") / ledger.step_ns).alias("share")
    return replace(ledger, largest_lines=lines.with_columns(share))


def pauses(case: Case, of_data: bool = False) -> pl.DataFrame:
    """Return the time in which no op runs by the lines before and after it, per step, the longest first:
    `after`, `before`, `duration_ns`. That in which a batch is fetched counts alone, or not at all."""
    ops = ops_of(case)
    called = ops.filter(PHASE.ne_missing("backward"))
    if called.is_empty():
        return called.select(after="place", before="place", duration_ns=pl.lit(0.0))
    main = called["thread"].mode().min()
    until = pl.col("end_ns").cum_max().shift(1).alias("until_ns")
    top = ops.filter(pl.col("thread") == main).sort("start_ns").select("start_ns", until, "end_ns", "place")
    last = pl.col("place").forward_fill().shift(1).alias("after")
    fetches = case.linked.steps.phases.filter(PHASE == DATA).select("start_ns", "end_ns").sort("start_ns")
    waited = covered_before(fetches, top["start_ns"]) - covered_before(fetches, top["until_ns"])
    left = pl.lit(waited) if of_data else pl.col("start_ns") - pl.col("until_ns") - waited
    gap = left.clip(0) * case.clean_share / case.num_steps
    before = pl.col("place").backward_fill().alias("before")
    table = top.select(last, before, gap.alias("duration_ns")).drop_nulls()
    sums = table.group_by("after", "before").agg(pl.col("duration_ns").sum())
    return sums.sort("duration_ns", "after", "before", descending=[True, False, False])


def pauses_text(case: Case, least_ns: float, of_data: bool = False) -> str:
    """Return where most time passes without an op as a sentence; nothing that takes less than `least_ns` per step."""
    parts = []
    table = if_available(lambda: pauses(case, of_data)) if case.is_on_cpu else None
    if table is None:
        return ""
    for after, before, ns in table.filter(pl.col("duration_ns") >= least_ns).head(_MOST_LINES).iter_rows():
        where = line_text(after) if after == before else f"from {line_text(after)} to {line_text(before)}"
        parts.append(f"{duration(ns, 3)} {'at ' if after == before else ''}{where}")
    return f" Most time without an op, per step: {', '.join(parts)}." if parts else ""


_FEWEST_SAMPLES = 5
_LEAST_SEEN = 0.1  # of the samples


def python_lines(case: Case, has_data: bool = True, has_others: bool = True) -> list[tuple[str, int]]:
    """Return the lines at which Python was outside of the passes in the step before the trace, with their samples:
    where a batch is fetched, elsewhere, or both; none if they are too few.

    On a GPU, the line of the optimizer's call outside of the optimizer's phase is where the recorder waits for the
    step's end.
    """
    facts = case.recording.facts.get("python") if case.has_recording else None
    lines = [line for line in (facts or {}).get("lines", []) if line["phase"] not in TRAINING
             and (has_data if line["phase"] == DATA else has_others)]  # fmt: skip
    ends = _optimizer_lines(case) if lines else frozenset()
    counts = [(line["place"], line["num_samples"]) for line in lines if line["place"] not in ends]
    return counts if sum(num for _, num in counts) >= _FEWEST_SAMPLES else []


def _optimizer_lines(case: Case) -> frozenset[str]:
    ops = None if case.is_on_cpu else if_available(lambda: logged_of(case))
    if ops is None:
        return frozenset()
    stepped = ops.filter(PHASE == "optimizer")
    return frozenset({*stepped["place"].drop_nulls(), *stepped["caller"].drop_nulls()})


def python_text(case: Case, has_data: bool = True, has_others: bool = True) -> str:
    """Return the lines at which Python was most often outside of the passes (`python_lines`) as a sentence."""
    lines = python_lines(case, has_data, has_others)
    num = sum(each for _, each in lines)
    worth = [(place, each) for place, each in lines if each >= _LEAST_SEEN * num][:_MOST_LINES]
    texts = [f"{line_text(place)} ({whole_percent(each / num)})" for place, each in worth]
    where = "" if not has_others else "Outside of data and passes, " if not has_data else "Outside of the passes, "
    return f" {where}Python was most often at {', '.join(texts)}, in {num} samples of its stack." if texts else ""


def data_text(case: Case, least_ns: float) -> str:
    """Return the lines that make a batch in the training process, as sentences; none whose ops take less than
    `least_ns`."""
    seen = python_text(case, has_others=False)
    ops = if_available(lambda: ops_of(case)) if case.is_on_cpu else None
    if ops is None:
        return seen
    text = _ops_at("The batch's", lines_of(case, ops.filter(PHASE == DATA)), least_ns)
    return text + (seen or pauses_text(case, least_ns, of_data=True))


def outside_text(case: Case, least_ns: float) -> str:
    """Return the lines of ops outside of data, passes and optimizer, and where most time passes without an op, as
    sentences; none that takes less than `least_ns`."""
    ops = if_available(lambda: ops_of(case)) if case.is_on_cpu else None
    if ops is None:
        return ""
    outside = ops.filter(~PHASE.is_in([DATA, *TRAINING]).fill_null(False))
    seen = python_text(case, has_data=False) or pauses_text(case, least_ns)
    return _ops_at("Its", lines_of(case, outside), least_ns) + seen


def _ops_at(whose: str, lines: pl.DataFrame, least_ns: float) -> str:
    worth = lines.filter(pl.col("duration_ns") >= least_ns)
    return f" {whose} ops are at {lines_text(worth)}." if worth.height else ""

"""The steps that a trace shows: how long, how many kernels, how much of each the GPU was at work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.document.model import Bars, Fact, Facts, Lines, Series, Table
from stepscope.document.sections.shared import table_of, thinned, thinning
from stepscope.document.text.trace_text import STEP_SOURCES
from stepscope.errors import Unavailable
from stepscope.formatting import duration, percent

_MOST_BARS = 24
_ID, _TITLE = "traced_steps", "the steps of the trace"


def traced_steps(account: RankAccount) -> Iterator[Any]:
    """Figures, a chart and a table; Unavailable where the trace has no steps."""
    if not (num := account.steps.height):
        raise Unavailable(
            "nothing in the trace says where a step ends: call prof.step() at the end of each step, or record with "
            "`stepscope run train.py`"
        )
    durations = [float(ns) for ns in account.steps["duration_ns"]]
    busy = [float(ns) for ns in account.steps["gpu_busy_ns"]]
    numbers = [int(step) for step in account.steps["step"]]
    spread = Fact("shortest to longest", f"{duration(min(durations), 3)} to {duration(max(durations), 3)}")
    mean = Fact("mean", duration(sum(durations) / num, 3), "under the profiler, which makes steps longer")
    yield Facts((Fact("steps", f"{num:,}", STEP_SOURCES[account.step_source]), mean, *([spread] if num > 1 else ())))
    longest = max(range(num), key=lambda i: durations[i])
    caption = (
        f"Step {numbers[longest]} {'is the longest with' if num > 1 else 'took'} {duration(durations[longest], 3)}"
    )
    if any(busy):
        caption += f"; the GPU is at work for {percent(sum(busy) / max(1, sum(durations)))} of the steps"
    if num <= _MOST_BARS:
        series = [Series("step", durations, color="forward")]
        if any(busy):
            idle = [ns - worked for ns, worked in zip(durations, busy)]
            series = [Series("GPU at work", busy, color="forward"), Series("GPU idle", idle, color="idle")]
        labels = [f"step {number}" for number in numbers]
        yield Bars(
            id=_ID, title=_TITLE, caption=f"{caption}.", labels=labels, series=tuple(series), unit="step_time_ns"
        )
    else:
        series = [thinned("step", numbers, durations)]
        series += [thinned("GPU at work", numbers, busy)] if any(busy) else []
        caption = f"{caption}.{thinning(series, num * len(series))}"
        yield Lines(
            id=_ID, title=_TITLE, caption=caption, x="step", y="step_time_ns", series=tuple(series), style="dots"
        )
    yield step_table(account)


def step_table(account: RankAccount) -> Table:
    """One row a traced step."""
    steps = account.steps.with_columns((account.steps["start_ns"] - account.steps["start_ns"][0]).alias("begin_ns"))
    columns, note = ["step", "begin_ns", "duration_ns"], "begin: since the first"
    if account.gpu_time.window_ns:
        columns += ["gpu_busy_ns", "num_kernels"]
        note += "; GPU busy: while the step lasted, whoever launched the work"
    return table_of(steps, _ID, _TITLE, columns, note=note)

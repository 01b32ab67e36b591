"""The section `steps`: how long every step took, in which phases, which took much longer and why."""

from collections.abc import Iterator, Sequence
from typing import Any

from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.analysis.time import step_times
from stepscope.analysis.time.phases import PHASES, UNATTRIBUTED
from stepscope.analysis.time.statistics import Distribution
from stepscope.analysis.time.step_times import Outlier, TimedStep
from stepscope.analysis.time.summary import Summary, clean_step_ns
from stepscope.document.card_figures import step_facts
from stepscope.document.model import Bars, Fact, Facts, Lines, Missing, Part, Series, Table, Text
from stepscope.document.sections.time import STEP_SOURCES
from stepscope.document.tables import MOST_POINTS, columns_of, mapping, table_of, thinned, thinning
from stepscope.document.verdict import verdict
from stepscope.errors import Unavailable
from stepscope.formatting import duration, milliseconds, percent, plural
from stepscope.session import Session
from stepscope.trace.recording import Recording

_TITLES = {
    "warmup": "warm-up", "clean": "clean", "trace_warmup": "profiler warm-up", "trace": "traced",
    "memory": "memory and FLOPs", "free": "free",
}  # fmt: skip
"""Windows in the order of a run."""
_DWARFS = 5.0
"""If the longest step is this many times the median, the axis is logarithmic to leave room for the clean steps."""
_MOST_BARS = 24
_SAMPLE = "num_tokens num_samples num_micro_batches num_skipped num_compiles loss"


def parts(session: Session) -> tuple[Part, ...]:
    """Return every sample of a recording and its traced steps, or the steps of a trace."""
    if not session.is_recording:
        return tuple(_traced(session.analysis.ranks[0]))
    recording, summary = session.recording, session.summary
    if not recording.samples:
        raise Unavailable(f"no step was recorded. {verdict(recording, summary)}")
    found = tuple(_recorded(recording, summary))
    try:
        account = session.analysis.ranks[0]
    except Unavailable as reason:
        return (*found, Missing(f"kernels per step: {reason}")) if summary.clock == "device" else found
    return (*found, *([_traced_table(account)] if account.steps.height else ()))


def _recorded(recording: Recording, summary: Summary) -> Iterator[Part]:
    steps = step_times.timed_steps(recording, summary.clock)
    yield Facts((*step_facts(summary), *_facts(steps, summary)))
    yield _over_time(steps, summary)
    if summary.step_ns is None:
        yield Missing("there are no clean steps: run longer, or lower --warmup")
    else:
        yield from _phases([step for step in steps if step.sample.window == "clean"])
        yield _distribution(clean_step_ns(recording), summary.step_ns)
        yield from _outliers(step_times.outliers(steps), summary, recording)
    yield _samples(steps)


def _by_window(steps: Sequence[TimedStep]) -> dict[str, list[TimedStep]]:
    groups: dict[str, list[TimedStep]] = {title: [] for title in _TITLES.values()}
    for step in steps:
        groups.setdefault(_TITLES.get(step.sample.window, step.sample.window), []).append(step)
    return {title: group for title, group in groups.items() if group}


def _facts(steps: Sequence[TimedStep], summary: Summary) -> Iterator[Fact]:
    if (step := summary.step_ns) is not None:
        mean = milliseconds(step.mean, step.ci_high - step.ci_low)
        yield Fact("mean", mean, f"standard deviation {duration(step.std, 2)}")
    if (host := summary.host_step_ns) is not None and summary.clock == "device":
        yield Fact("host", milliseconds(host.median, host.ci_high - host.ci_low), "median on the host clock")
    if warmup := summary.warmup_ns:
        last = f", the last of {len(warmup)} {duration(warmup[-1], 3)}" if len(warmup) > 1 else ""
        yield Fact("warm-up", f"the first step took {duration(warmup[0], 3)}{last}", "excluded; host clock")
    if compiling := [step for step in steps if step.sample.num_compiles]:
        worst = max(compiling, key=lambda step: step.sample.wall_ns).sample
        longest = f"the longest, step {worst.step}, took {duration(worst.wall_ns, 3)}"
        yield Fact("compiling", f"{plural(len(compiling), 'step')} compiled", longest)
    if summary.num_skipped:
        yield Fact("skipped", plural(summary.num_skipped, "optimizer step"), "by the GradScaler")
    yield Fact("steps", ", ".join(f"{title} {len(group):,}" for title, group in _by_window(steps).items()))


def _over_time(steps: Sequence[TimedStep], summary: Summary) -> Lines:
    groups = _by_window([step for step in steps if not step.sample.num_compiles])
    groups |= {"compiling": compiling} if (compiling := [step for step in steps if step.sample.num_compiles]) else {}
    series = tuple(
        thinned(name, [step.sample.step for step in group], [float(step.step_ns) for step in group])
        for name, group in groups.items()
    )
    longest = max(steps, key=lambda step: step.step_ns)
    caption = f"The longest is step {longest.sample.step} with {duration(longest.step_ns, 3)}"
    middle = summary.step_ns.median if summary.step_ns is not None else None
    if middle:
        caption += f", {longest.step_ns / middle:.1f} times the median of the clean steps ({duration(middle, 3)})"
    if summary.clock == "device" and any(step.clock == "host" for step in steps):
        caption += ". Steps without CUDA events are on the host clock, which may run ahead of the GPU"
    caption = f"{caption}.{thinning(series, len(steps))}"
    log_y = bool(middle and longest.step_ns > _DWARFS * middle and min(step.step_ns for step in steps) > 0)
    title = "every step by window"
    return Lines("step_times", title, "step", "step_time_ns", series, style="dots", log_y=log_y, caption=caption)


def _phases(clean: Sequence[TimedStep]) -> Iterator[Lines]:
    if len(clean) < 2:
        return
    every = -(-len(clean) // MOST_POINTS)
    shown = clean[::every]
    numbers = [float(step.sample.step) for step in shown]
    clock = "between CUDA events" if clean[0].clock == "device" else "on the host clock"
    caption = f"{plural(len(clean), 'clean step')}, {clock}." + (f" Shows every {every}th." if every > 1 else "")
    times = {name: [step.phases_ns.get(name, 0) for step in shown] for name in _names(shown)}
    series = tuple(Series(name, values, numbers, name) for name, values in times.items())
    id, title = "clean_step_phases", "phases of the clean steps"
    yield Lines(id, title, "step", "time_by_phase_ns", series, style="areas", caption=caption)


def _names(steps: Sequence[TimedStep]) -> list[str]:
    return [name for name in (*PHASES, UNATTRIBUTED) if any(step.phases_ns.get(name) for step in steps)]


def _distribution(samples: Sequence[int], step: Distribution) -> Bars:
    bins = step_times.histogram([float(ns) for ns in samples])
    width = bins[0].high - bins[0].low
    labels = [f"{milliseconds(one.low, width)} to {milliseconds(one.high, width)}" for one in bins]
    if len(set(labels)) < len(labels):
        labels = [f"{number}: {label}" for number, label in enumerate(labels, 1)]
    spread = percent((step.p90 - step.p10) / step.median) if step.median else "0 %"
    caption = f"The middle 80 % of {plural(step.num_samples, 'clean step')} span {spread} of the median."
    title, series = "distribution of the clean steps", (Series("clean steps", [float(one.num) for one in bins]),)
    return Bars("step_distribution", title, labels, series, "num_steps", caption=caption)


def _outliers(found: Sequence[Outlier], summary: Summary, recording: Recording) -> Iterator[Part]:
    if not found and summary.num_clean < step_times.FEWEST:
        few = plural(summary.num_clean, "clean step is", "clean steps are")
        yield Text(f"{few} too few to find outliers.")
        return
    if not found:
        yield Text(
            f"No outliers: no step is more than {step_times.FENCE:.0f} interquartile ranges above the third quartile "
            f"of its window and {percent(step_times.LEAST_EXCESS_SHARE)} above its median."
        )
        return
    retries = mapping(recording.facts.get("memory")).get("num_allocator_retries")
    retried = f"; the allocator retried {plural(retries, 'time')}" if isinstance(retries, int) and retries else ""
    columns = columns_of(
        found,
        "step window duration_ns excess_ns phase_that_grew:phase phase_excess_ns what_was_special",
        step=lambda outlier: outlier.step.sample.step,
        window=lambda outlier: outlier.step.sample.window,
        duration_ns=lambda outlier: outlier.step.step_ns,
        what_was_special=lambda outlier: "; ".join(_special(outlier, summary)),
    )
    note = f"excess: above the median of the same kind of steps, or of the same phase{retried}"
    yield Table("outliers", "outliers", columns, note=note)


def _special(outlier: Outlier, summary: Summary) -> list[str]:
    """Return what the sample of a slow step has that the others do not."""
    sample, found = outlier.step.sample, []
    if sample.num_compiles:
        found.append(plural(sample.num_compiles, "compile"))
    if sample.num_skipped:
        found.append(f"{plural(sample.num_skipped, 'optimizer step')} skipped")
    if sample.num_micro_batches > summary.num_micro_batches:
        found.append(f"{sample.num_micro_batches} micro-batches instead of {summary.num_micro_batches}")
    if (usual := summary.throughput) is not None:
        num = sample.num_tokens if usual.unit == "tokens" else sample.num_samples
        if num is not None and num > usual.per_step:
            found.append(f"{num:,} {usual.unit}, on average {usual.per_step:,.0f}")
    return found


def _samples(steps: Sequence[TimedStep]) -> Table:
    durations, host = [step.step_ns for step in steps], [step.sample.wall_ns for step in steps]
    samples = columns_of((step.sample for step in steps), f"step window {_SAMPLE}")
    columns: dict[str, Sequence[Any]] = {name: samples.pop(name) for name in ("step", "window")}
    columns |= {"clock": [step.clock for step in steps], "duration_ns": durations}
    columns |= {f"{name}_ns": [step.phases_ns.get(name) for step in steps] for name in _names(steps)}
    columns |= {"host_ns": host} | samples if durations != host else samples
    return Table("steps", "every step", columns, note="phases sum to the step, on its clock")


def _traced(account: RankAccount) -> Iterator[Part]:
    """Yield the steps of a trace; Unavailable if it has none."""
    if not (num := account.steps.height):
        raise Unavailable(
            "nothing in the trace marks the end of a step: call prof.step() at the end of each step, or record with "
            "`stepscope run train.py`"
        )
    durations, busy = (account.steps[name].cast(float).to_list() for name in ("duration_ns", "gpu_busy_ns"))
    numbers = account.steps["step"].to_list()
    facts = [
        Fact("steps", f"{num:,}", STEP_SOURCES[account.step_source]),
        Fact("mean", duration(sum(durations) / num, 3), "includes profiler overhead"),
        Fact("shortest to longest", f"{duration(min(durations), 3)} to {duration(max(durations), 3)}"),
    ]
    if any(busy):
        facts.append(Fact("GPU busy", percent(sum(busy) / max(1, sum(durations))), "of the steps"))
    yield Facts(tuple(facts))
    id, title, y = "traced_steps", "traced steps", "step_time_ns"
    if num <= _MOST_BARS:
        series = [Series("step", durations, color="forward")]
        if any(busy):
            idle = [ns - worked for ns, worked in zip(durations, busy)]
            series = [Series("GPU busy", busy, color="forward"), Series("GPU idle", idle, color="idle")]
        yield Bars(id, title, [f"step {number}" for number in numbers], tuple(series), y)
    else:
        series = [thinned("step", numbers, durations)]
        series += [thinned("GPU busy", numbers, busy)] if any(busy) else []
        caption = thinning(series, num * len(series)).strip()
        yield Lines(id, title, "step", y, tuple(series), style="dots", caption=caption)
    yield _traced_table(account)


def _traced_table(account: RankAccount) -> Table:
    steps = account.steps.with_columns((account.steps["start_ns"] - account.steps["start_ns"][0]).alias("begin_ns"))
    names, note = "step begin_ns duration_ns", "begin: since the first"
    if account.gpu_time.window_ns:
        names += " gpu_busy_ns num_kernels"
        note += "; GPU busy: during the step, whichever step launched the work"
    return table_of(steps, "traced_steps", "traced steps", names, note=note)

"""Every step: how long it took, in which phases, which took much longer and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stepscope.analysis.time.phases import PHASES, UNATTRIBUTED
from stepscope.analysis.time.statistics import Distribution
from stepscope.analysis.time.step_samples import (
    FENCE,
    FEWEST,
    LEAST_EXCESS_SHARE,
    Outlier,
    TimedStep,
    histogram,
    outliers,
    timed_steps,
)
from stepscope.analysis.time.summary import Summary, clean_step_ns
from stepscope.document.card import Card
from stepscope.document.model import Bars, Fact, Facts, Lines, Missing, Series, Table, Text
from stepscope.document.sections.shared import MOST_POINTS, mapping, plain, thinned, thinning
from stepscope.document.sections.traced_steps import step_table, traced_steps
from stepscope.errors import Unavailable
from stepscope.formatting import duration, milliseconds, percent, plural
from stepscope.session import Session
from stepscope.trace.recording import Recording

WINDOWS = ("warmup", "clean", "trace_warmup", "trace", "memory", "free")
_TITLES = {"warmup": "warm-up", "trace_warmup": "profiler warm-up", "trace": "traced", "memory": "memory and FLOPs"}
COMPILING = "compiling"
_DWARFS = 5.0
"""Times the median: from there on steps of other windows leave no room for the clean ones, and the axis is
logarithmic."""
_MOST_NAMED = 5


def parts(session: Session) -> tuple[Any, ...]:
    """Of a recording every sample; of a trace its steps."""
    if not session.is_recording:
        return tuple(traced_steps(session.analysis.ranks[0]))
    recording, summary = session.recording, session.summary
    if not recording.samples:
        raise Unavailable(f"no step was recorded: {Card.of(session).verdict}")
    found: list[Any] = list(_of_recording(recording, summary))
    try:
        account = session.analysis.ranks[0]
    except Unavailable as reason:
        on_gpu = summary.clock == "device"
        return (*found, Missing(f"kernels a step: {reason}")) if on_gpu else tuple(found)
    return (*found, *([step_table(account)] if account.steps.height else ()))


def _of_recording(recording: Recording, summary: Summary) -> Iterator[Any]:
    steps = timed_steps(recording, summary.clock)
    yield Facts(tuple(_figures(steps, summary)))
    yield _over_time(steps, summary)
    if summary.step_ns is None:
        yield Missing("there are no clean steps: run longer, or lower --warmup")
    else:
        yield from _phases([step for step in steps if step.sample.window == "clean"])
        yield _distribution(clean_step_ns(recording), summary.step_ns)
        yield from _outliers(outliers(steps), summary, recording)
    yield _samples(steps)


def _figures(steps: Sequence[TimedStep], summary: Summary) -> Iterator[Fact]:
    step, clock = summary.step_ns, "between CUDA events" if summary.clock == "device" else "host clock"
    if step is not None:
        noise = step.ci_high - step.ci_low
        of = f"of {plural(step.num_samples, 'clean step')}; {clock}"
        yield Fact("median", milliseconds(step.median, noise), of)
        low, high = milliseconds(step.ci_low, noise), milliseconds(step.ci_high, noise)
        yield Fact("95 % interval of the median", f"{low} to {high}", "bootstrap")
        yield Fact("p10 to p90", f"{milliseconds(step.p10, noise)} to {milliseconds(step.p90, noise)}")
        yield Fact("mean", milliseconds(step.mean, noise), f"standard deviation {duration(step.std, 2)}")
    if summary.host_step_ns is not None and summary.clock == "device":
        host = summary.host_step_ns
        yield Fact("host", milliseconds(host.median, host.ci_high - host.ci_low), "median, on the host's clock")
    if summary.warmup_ns:
        first, rest = summary.warmup_ns[0], summary.warmup_ns[1:]
        more = f", the last of {plural(len(rest) + 1, 'step')} {duration(rest[-1], 3)}" if rest else ""
        yield Fact("warm-up", f"the first step took {duration(first, 3)}{more}", "kept apart; on the host's clock")
    compiling = [step for step in steps if step.sample.num_compiles]
    if compiling:
        worst = max(compiling, key=lambda step: step.sample.wall_ns)
        longest = f"the longest, step {worst.sample.step}, took {duration(worst.sample.wall_ns, 3)}"
        yield Fact("compiling", f"{plural(len(compiling), 'step')} compiled something", longest)
    if summary.num_skipped:
        yield Fact("skipped", plural(summary.num_skipped, "optimizer step"), "by the GradScaler")
    counts = {window: sum(step.sample.window == window for step in steps) for window in _windows(steps)}
    yield Fact("steps", ", ".join(f"{_TITLES.get(window, window)} {num:,}" for window, num in counts.items()))


def _windows(steps: Sequence[TimedStep]) -> list[str]:
    """The windows that steps are in, in the order of a run."""
    seen = dict.fromkeys(step.sample.window for step in steps)
    return [*(name for name in WINDOWS if name in seen), *(name for name in seen if name not in WINDOWS)]


def _over_time(steps: Sequence[TimedStep], summary: Summary) -> Lines:
    groups = {_TITLES.get(window, window): [] for window in _windows(steps)}  # type: dict[str, list[TimedStep]]
    for step in steps:
        window = _TITLES.get(step.sample.window, step.sample.window)
        groups.setdefault(COMPILING if step.sample.num_compiles else window, []).append(step)
    series = tuple(
        thinned(name, [step.sample.step for step in group], [float(step.step_ns) for step in group])
        for name, group in groups.items()
        if group
    )
    longest = max(steps, key=lambda step: step.step_ns)
    caption = f"The longest is step {longest.sample.step} with {duration(longest.step_ns, 3)}"
    middle = summary.step_ns.median if summary.step_ns is not None else None
    if middle:
        caption += f", {longest.step_ns / middle:.1f} times the median of the clean steps ({duration(middle, 3)})"
    if summary.clock == "device" and any(step.clock == "host" for step in steps):
        caption += ". Steps without CUDA events are on the host's clock, which may run ahead of the GPU"
    dwarfed = middle is not None and longest.step_ns > _DWARFS * middle and min(step.step_ns for step in steps) > 0
    return Lines(
        id="step_times",
        title="every step by its window",
        caption=f"{caption}.{thinning(series, len(steps))}",
        x="step",
        y="step_time_ns",
        series=series,
        style="dots",
        log_y=dwarfed,
    )


def _phases(clean: Sequence[TimedStep]) -> Iterator[Lines]:
    if len(clean) < 2:
        return
    shown = clean[:: -(-len(clean) // MOST_POINTS)]
    names = [name for name in (*PHASES, UNATTRIBUTED) if any(step.phases_ns.get(name) for step in shown)]
    numbers = [float(step.sample.step) for step in shown]
    series = tuple(Series(name, [step.phases_ns.get(name, 0) for step in shown], numbers, name) for name in names)
    which = f" Every {-(-len(clean) // MOST_POINTS)}th step is drawn." if len(shown) < len(clean) else ""
    clock = "between CUDA events" if clean[0].clock == "device" else "on the host's clock"
    yield Lines(
        id="clean_step_phases",
        title="phases of the clean steps",
        caption=f"{plural(len(clean), 'clean step')}, {clock}.{which}",
        x="step",
        y="time_by_phase_ns",
        series=series,
        style="areas",
    )


def _distribution(samples: Sequence[int], step: Distribution) -> Bars:
    bins = histogram([float(ns) for ns in samples])
    width = bins[0].high - bins[0].low
    labels = [f"{milliseconds(one.low, width)} to {milliseconds(one.high, width)}" for one in bins]
    spread = percent((step.p90 - step.p10) / step.median) if step.median else "0 %"
    return Bars(
        id="step_distribution",
        title="how the clean steps are spread",
        caption=f"The middle 80 % of {plural(step.num_samples, 'clean step')} span {spread} of the median.",
        labels=labels if len(set(labels)) == len(labels) else [f"{i + 1}: {label}" for i, label in enumerate(labels)],
        series=(Series("clean steps", [float(one.num) for one in bins]),),
        unit="num_steps",
    )


def _outliers(found: Sequence[Outlier], summary: Summary, recording: Recording) -> Iterator[Any]:
    if not found and summary.num_clean < FEWEST:
        yield Text(f"{plural(summary.num_clean, 'clean step')} are too few to tell an outlier.")
        return
    if not found:
        yield Text(
            f"No step is an outlier: none is more than {FENCE:.0f} inter-quartile ranges above the third quartile of "
            f"its window, and {percent(LEAST_EXCESS_SHARE)} above its median."
        )
        return
    said = "; ".join(_sentence(outlier, summary) for outlier in found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    retries = mapping(recording.facts.get("memory")).get("num_allocator_retries")
    asked = ""
    if isinstance(retries, int) and retries:
        asked = f" The allocator gave its cache back and tried again {plural(retries, 'time')} during the run."
    yield Text(f"{plural(len(found), 'outlier')}: {said}{more}.{asked}")
    yield Table(
        "outliers",
        "outliers",
        {
            "step": [outlier.step.sample.step for outlier in found],
            "window": [outlier.step.sample.window for outlier in found],
            "duration_ns": [outlier.step.step_ns for outlier in found],
            "excess_ns": [outlier.excess_ns for outlier in found],
            "phase_that_grew": [outlier.phase for outlier in found],
            "phase_excess_ns": [outlier.phase_excess_ns for outlier in found],
            "what_was_special": ["; ".join(_special(outlier, summary)) for outlier in found],
        },
        note="excess: above the median of the clean steps, or of the free ones; a phase's above its own",
    )


def _sentence(outlier: Outlier, summary: Summary) -> str:
    text = f"step {outlier.step.sample.step} took {duration(outlier.step.step_ns, 3)}"
    text += f", {duration(outlier.excess_ns, 3)} above the median"
    if outlier.phase is not None and outlier.phase_excess_ns:
        text += f", {duration(outlier.phase_excess_ns, 3)} of it in {outlier.phase}"
    special = _special(outlier, summary)
    return f"{text} ({', '.join(special)})" if special else text


def _special(outlier: Outlier, summary: Summary) -> list[str]:
    """What else the sample of a slow step says that the others' do not."""
    sample, found = outlier.step.sample, []
    if sample.num_compiles:
        found.append(f"{plural(sample.num_compiles, 'compile')}")
    if sample.num_skipped:
        found.append(f"{plural(sample.num_skipped, 'optimizer step')} skipped")
    if sample.num_micro_batches > summary.num_micro_batches:
        found.append(f"{sample.num_micro_batches} micro-batches instead of {summary.num_micro_batches}")
    throughput = summary.throughput
    num = None if throughput is None else sample.num_tokens if throughput.unit == "tokens" else sample.num_samples
    if throughput is not None and num is not None and num > throughput.per_step:
        found.append(f"{num:,} {throughput.unit} where the mean is {throughput.per_step:,.0f}")
    return found


def _samples(steps: Sequence[TimedStep]) -> Table:
    names = [name for name in (*PHASES, UNATTRIBUTED) if any(step.phases_ns.get(name) for step in steps)]
    samples = [step.sample for step in steps]
    columns: dict[str, Sequence[Any]] = {
        "step": [sample.step for sample in samples],
        "window": [sample.window for sample in samples],
        "clock": [step.clock for step in steps],
        "duration_ns": [step.step_ns for step in steps],
        **{f"{name}_ns": [step.phases_ns.get(name) for step in steps] for name in names},
        "host_ns": [sample.wall_ns for sample in samples],
        **{
            name: [plain(getattr(sample, name)) for sample in samples]
            for name in ("num_tokens", "num_samples", "num_micro_batches", "num_skipped", "num_compiles", "loss")
        },
    }
    first = columns["duration_ns"]
    if all(ns == sample.wall_ns for ns, sample in zip(first, samples)):
        del columns["host_ns"]
    return Table("steps", "every step", columns, note="phases sum to the step, on its clock")

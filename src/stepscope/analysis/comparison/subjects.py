"""Recordings, sweep points and repeated runs as subjects of a comparison.

Steps of one run share the machine's state, so they do not show how much runs vary. With several runs a side's figure
is the geometric mean over its runs, and its test uses the runs (`significance.difference_of_runs`).
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean, median
from typing import Any

from stepscope.analysis.comparison.compare import Parts, Subject, unlike_aspects
from stepscope.analysis.comparison.metrics import METRICS, RUNS, Measure
from stepscope.analysis.comparison.sweeps import OK, PointSummary
from stepscope.analysis.memory.account import Account
from stepscope.analysis.time.phases import IDLE, rows
from stepscope.analysis.time.summary import CounterSummary, Summary, clean_step_ns
from stepscope.errors import NotComparableError
from stepscope.trace.recording import Recording

GPU_TIME, DEVICE_TIME, HOST_TIME = "a clean step, GPU busy and idle", "a clean step, device time", "a clean step"
PEAK = "peak allocated"
PEAK_COMPILED = "peak allocated, whose tensors inside compiled code have no owners"
UNKNOWN = "unknown"
# Reported elsewhere, or irrelevant for a comparison.
_NOT_CONTEXT = ("device", "rank", "variables")
_NEW_EACH_TIME = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID")  # torchrun makes them up for every start


def recording_subject(
    recording: Recording,
    summary: Summary,
    memory: Account | None,
    missing: Mapping[str, str],
    others_share: float,
) -> Subject:
    """Return a recording's subject; `missing` has the reason for a missing memory account, by table.

    `others_share` is the share of time in which training waited for CPU cores that other processes used too.
    """
    measures: dict[str, Measure] = {}
    lacks = dict(missing)
    samples = tuple(float(ns) for ns in clean_step_ns(recording))
    waits = others_share if recording.facts.get("environment", {}).get("device") == "cpu" else 0.0
    if summary.step_ns is None or summary.step_ns.median <= 0 or min(samples) <= 0:
        lacks["step_time"] = "no clean step was timed: let stepscope run --clean 20 SCRIPT run that far"
    else:
        measures["step_time"] = Measure(summary.step_ns.median, samples, others_share=waits)
        if summary.throughput is not None and summary.throughput.per_s > 0:
            rate = Measure(summary.throughput.per_s, samples, others_share=waits)
            measures[f"{summary.throughput.unit}_per_second"] = rate
        if summary.mfu is not None and summary.mfu.share > 0:
            measures["mfu"] = Measure(summary.mfu.share, samples, others_share=waits)
    facts = recording.facts.get("memory") or {}
    # On a CPU, tensor memory is not counted: the memory window's account is the peak.
    peak = facts.get("peak_allocated_bytes", None if memory is None else memory.peak_bytes)
    measures |= _single_figures(
        kernels=summary.num_kernels_per_step,
        peak_memory=peak,
        peak_reserved_memory=facts.get("peak_reserved_bytes"),
        peak_resident_memory=facts.get("peak_resident_bytes"),
    )
    tables: dict[str, tuple[Parts, ...]] = {}
    if summary.rows and summary.step_ns is not None:
        tables["phase"] = _phase_parts(summary, summary.step_ns.median)
    if memory is not None and peak is not None:
        owners = {part.name or UNKNOWN: float(part.bytes) for part in memory.live_at_peak.by_owner}
        is_compiled = (recording.facts.get("flops") or {}).get("compiled")
        tables["memory"] = (Parts(PEAK_COMPILED if is_compiled else PEAK, "bytes", peak, owners),)
    if peak is None:
        lacks["peak_memory"] = lacks.get("memory", "not recorded")
    notes = [] if recording.status == "finished" else [f"the run is {recording.status}"]
    return Subject(
        name=str(recording.folder),
        measures=measures,
        identity=_identity(recording, summary),
        context=_context(recording, summary),
        tables=tables,
        missing=lacks,
        notes=(*notes, *recording.warnings),
    )


def _single_figures(**values: float | None) -> dict[str, Measure]:
    return {name: Measure(value) for name, value in values.items() if value is not None}


def idle_ns(summary: Summary) -> float | None:
    """Return GPU idle time per clean step; None without a GPU or a trace."""
    return next((row.ns for row in summary.rows if row.name == IDLE), None)


def _phase_parts(summary: Summary, whole: float) -> tuple[Parts, ...]:
    """Return the card's rows, then coarser ones for a counterpart without a trace or GPU."""
    is_timed = all(phase.device_ns is not None for phase in summary.phases)
    coarse = rows([replace(phase, gpu_busy_ns=None) for phase in summary.phases])
    tables = [(GPU_TIME, summary.rows)] if idle_ns(summary) is not None else []
    tables.append((DEVICE_TIME if is_timed else HOST_TIME, tuple(coarse)))
    return tuple(Parts(of, "ns", whole, {row.name: row.ns for row in found}) for of, found in tables)


def _identity(recording: Recording, summary: Summary) -> dict[str, Any]:
    environment = recording.facts.get("environment") or {}
    parameters = summary.parameters or {}
    dtypes = sorted(parameters.get("bytes_by_dtype") or {})
    flops = summary.flops
    if flops is not None:
        dtypes += [f"products in {dtype}" for dtype in sorted(flops.model_flops_by_dtype)]
    return {
        "device": environment.get("device_name"),
        # A run that ended before FLOPs were counted knows only the weights' FLOPs: ignore them.
        "dtype": ", ".join(dtypes) if flops is not None and dtypes else None,
        "tokens": None if summary.throughput is None else summary.throughput.per_step,
        "parameters": parameters.get("num_total"),
        "topology": environment.get("world_size"),
        "flops": None if flops is None or flops.hidden else flops.model_flops,
    }


def _context(recording: Recording, summary: Summary) -> dict[str, Any]:
    facts = recording.facts
    config, git = facts.get("config") or {}, facts.get("git") or {}
    argv = config.get("argv") or (facts.get("command") or {}).get("argv") or []
    parameters = summary.parameters or {}
    return {
        "command": shlex.join(map(str, argv)),
        "git revision": git.get("revision"),
        "uncommitted changes": git.get("modified"),
        **environment_context(facts.get("environment") or {}),
        **_clocks(summary.counters),
        "clock": summary.clock,
        "windows": config.get("windows"),
        "tokens_per_step given": config.get("tokens_per_step"),
        "steps end with": (facts.get("steps") or {}).get("source"),
        "modules called": ", ".join(map(str, facts.get("roots") or [])) or None,
        "trainable parameters": parameters.get("num_trainable"),
        "micro-batches": summary.num_micro_batches,
        "compiled": recording.compiler is not None,
    }


def environment_context(environment: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in environment.items() if name not in _NOT_CONTEXT}
    variables = environment.get("variables")
    if isinstance(variables, dict):
        plain |= {name: value for name, value in variables.items() if name not in _NEW_EACH_TIME}
    return plain


def _clocks(counters: CounterSummary | None) -> dict[str, Any]:
    if counters is None:
        return {}
    sm, memory = counters.sm_clock_mhz, counters.memory_clock_mhz
    return {
        "SM clock, MHz": None if sm is None else sm.mean,
        "memory clock, MHz": None if memory is None else memory.mean,
        "throttled by": ", ".join(reason for reason, _ in counters.throttle_shares) or None,
    }


def point_subject(
    point: PointSummary, row: Mapping[str, Any], environment: Mapping[str, Any], missing: Mapping[str, str]
) -> Subject:
    """Return the subject of a sweep's row. Rows that are not ok have no figures, but the reason."""
    measures: dict[str, Measure] = {}
    lacks = dict(missing)
    samples = tuple(float(ns) for ns in row.get("samples_device_ns") or ())
    if point.status != OK:
        lacks["step_time"] = f"the row is {point.status}: {point.reason or 'no reason given'}"
    elif point.time is None or point.time.median <= 0 or min(samples) <= 0:
        lacks["step_time"] = "the row has no samples"
    else:
        measures["step_time"] = Measure(point.time.median, samples)
        if point.tokens_per_s:
            measures["tokens_per_second"] = Measure(point.tokens_per_s, samples)
        if point.mfu is not None and point.mfu.share > 0:
            measures["mfu"] = Measure(point.mfu.share, samples)
        measures |= _single_figures(
            kernels=point.num_kernels,
            peak_memory=point.peak_allocated_bytes,
            peak_reserved_memory=point.peak_reserved_bytes,
            peak_resident_memory=point.peak_resident_bytes,
        )
    identity = {
        "device": point.device_name,
        "dtype": point.axes.get("dtype"),
        "tokens": point.num_tokens,
        "parameters": point.num_parameters,
        "topology": environment.get("world_size"),
        "flops": point.flops_formula or (None if row.get("flops_unseen") else point.flops_counted),
    }
    return Subject(
        name=point.hash,
        measures=measures,
        # An op has no parameters and may have no tokens: unknown values are not checked.
        identity={aspect: value for aspect, value in identity.items() if value is not None},
        context={**point.axes, **environment_context(environment)},
        missing=lacks,
        notes=point.notes,
    )


def pair_points(
    base: Sequence[PointSummary], new: Sequence[PointSummary]
) -> tuple[list[tuple[int, int]], tuple[str, ...]]:
    """Return which points are compared, by position, and the knobs that the comparison is about.

    Points with the same hash first. Of the rest, those that agree in every knob except those with a single value in
    the base's rest and a single other value in the new one's.
    """
    places = {point.hash: place for place, point in enumerate(new)}
    pairs = [(place, places[point.hash]) for place, point in enumerate(base) if point.hash in places]
    rest = [
        [place for place in range(len(points)) if place not in {pair[side] for pair in pairs}]
        for side, points in enumerate((base, new))
    ]
    if not all(rest):
        return pairs, ()
    names = dict.fromkeys(name for points in (base, new) for point in points for name in point.axes)
    about = []
    for name in names:
        before, after = (
            {str(points[p].axes.get(name)) for p in rest[side]} for side, points in enumerate((base, new))
        )
        if len(before) == len(after) == 1 and before != after:
            about.append(name)

    def key(point: PointSummary) -> tuple[str, ...]:
        return tuple(str(point.axes.get(name)) for name in names if name not in about)

    before_keys, after_keys = [key(base[p]) for p in rest[0]], [key(new[p]) for p in rest[1]]
    alike = [
        (place, rest[1][after_keys.index(found)])
        for place, found in zip(rest[0], before_keys)
        if before_keys.count(found) == after_keys.count(found) == 1
    ]
    return sorted(pairs + alike), tuple(about) if alike else ()


def one_side(runs: Sequence[Subject]) -> Subject:
    """Return the runs as one subject; NotComparableError if they are not of the same thing.

    A metric that one run lacks is missing for the side.
    """
    first = runs[0]
    identity = dict(first.identity)
    for run in runs[1:]:
        unlike, unknown = unlike_aspects(first.identity, run.identity)
        if unlike:
            differences = ", ".join(f"{each.what}: {each.base} and {each.new}" for each in unlike)
            raise NotComparableError(
                f"{first.name} and {run.name} were passed as runs of the same thing but differ in {differences}"
            )
        identity |= dict.fromkeys(unknown)
    return Subject(
        name=", ".join(run.name for run in runs),
        measures={
            name: _measure(name, [run.measures[name] for run in runs])
            for name in first.measures
            if all(name in run.measures for run in runs)
        },
        identity=identity,
        context={name: _common([run.context.get(name) for run in runs]) for name in _names(r.context for r in runs)},
        tables={name: _tables([run.tables.get(name, ()) for run in runs]) for name in _names(r.tables for r in runs)},
        missing=_missing(runs),
        notes=(*_spread(runs), *(f"{run.name}: {note}" for run in runs for note in run.notes)),
    )


def _measure(name: str, measures: Sequence[Measure]) -> Measure:
    values = [measure.value for measure in measures]
    if any(measure.samples is None for measure in measures):
        return Measure(median(values))
    costs = tuple(1 / value if METRICS[name].is_rate else value for value in values)
    return Measure(geometric_mean(values), costs, RUNS)


def _tables(tables: Sequence[Sequence[Parts]]) -> tuple[Parts, ...]:
    """Return the tables that all runs have: rows are means over runs, the whole is that of the metric."""
    found = []
    for parts in tables[0]:
        runs = [other for run in tables for other in run if other.of == parts.of]
        if len(runs) == len(tables):
            rows = {name: fmean(run.rows.get(name, 0.0) for run in runs) for name in _names(r.rows for r in runs)}
            wholes = [run.whole for run in runs]
            whole = geometric_mean(wholes) if parts.unit == "ns" and min(wholes) > 0 else median(wholes)
            found.append(Parts(parts.of, parts.unit, whole, rows))
    return tuple(found)


def _missing(runs: Sequence[Subject]) -> dict[str, str]:
    """Return why something is missing, from the first run that lacks it."""
    found: dict[str, str] = {}
    for run in runs:
        lacks = {name: "not there" for other in runs for name in (*other.measures, *other.tables)}
        have = {*run.measures, *(name for name, parts in run.tables.items() if parts)}
        lacks = {name: why for name, why in {**lacks, **run.missing}.items() if name not in have}
        named = {name: why if run.name in why else f"{run.name}: {why}" for name, why in lacks.items()}
        found = {**named, **found}
    return found


def _common(values: Sequence[Any]) -> Any:
    """Return what the runs have in common; measured figures as means, other differences as one text."""
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, float) for value in values):
        return fmean(values)
    return " / ".join(dict.fromkeys(str(value) for value in values))


def _spread(runs: Sequence[Subject]) -> list[str]:
    steps = [run.measures["step_time"].value for run in runs if "step_time" in run.measures]
    if len(steps) < 2:
        return []
    times = ", ".join(f"{ns / 1e6:,.4g}" for ns in steps)
    return [f"{len(steps)} runs with {times} ms per step: up to {100 * (max(steps) / min(steps) - 1):.1f} % apart"]


def _names(mappings: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))

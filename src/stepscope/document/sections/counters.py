"""The section `counters`: clocks, power, how busy the GPU was and what throttled it, sampled during the run."""

from collections.abc import Iterator, Sequence
from typing import Any

from stepscope.document.model import Fact, Facts, Lines, Mark, Missing, Part, Series, Table, Text
from stepscope.document.tables import columns_of, mapping, plain, thinned, thinning, without_empty
from stepscope.errors import Unavailable
from stepscope.formatting import cell, percent, plural, significant
from stepscope.session import Session
from stepscope.trace.recording import CounterSample, Recording

_GAUGES = ("gpu_busy_share", "memory_controller_busy_share", "power_watts", "sm_clock_mhz", "memory_clock_mhz")
_ON_CPU = "the run was on a CPU, which has no NVML: `stepscope run train.py` on an NVIDIA GPU samples its counters"
_NO_COUNTERS = "no counters were sampled: they need an NVIDIA GPU with NVML; `stepscope doctor` checks it"
_IDLE = "gpu_idle"
_FREE = "not throttled"
_CHARTS = (
    ("power", "power", "power_watts", {"power": "power_watts"}),
    ("busy", "how busy the GPU was", "busy_share",
     {"kernel running": "gpu_busy_share", "memory controller": "memory_controller_busy_share"}),
    ("driver_memory", "memory in use by the driver", "used_bytes", {"in use": "driver_memory_bytes"}),
)  # fmt: skip


def parts(session: Session) -> tuple[Part, ...]:
    """Return lines over the run with the clean window marked, and the figures of that window."""
    if not session.is_recording:
        raise Unavailable("a trace has no counters: `stepscope run train.py` samples them on an NVIDIA GPU")
    recording = session.recording
    if not recording.counters:
        on_cpu = mapping(recording.facts.get("environment")).get("device") == "cpu"
        raise Unavailable(_ON_CPU if on_cpu else _NO_COUNTERS)
    return (*_summary(session), *_charts(recording), *_processes(recording), _samples(recording))


def _summary(session: Session) -> Iterator[Part]:
    summary, found = session.summary, session.summary.counters
    if found is None:
        yield Missing("counters of the clean steps: no sample falls into them; record more --clean steps")
        return
    limits = mapping(session.recording.facts.get("counters"))
    limit_of = {"power_watts": limits.get("power_limit_watts"), "sm_clock_mhz": limits.get("max_sm_clock_mhz")}
    num = 3 if any(isinstance(limit, (int, float)) for limit in limit_of.values()) else 2
    columns: dict[str, list[Any]] = {"figure": ["mean", "95th percentile", "limit"][:num]}
    for name in _GAUGES:
        if (gauge := getattr(found, name)) is not None:
            columns[name] = [gauge.mean, gauge.p95, plain(limit_of.get(name))][:num]
    rows = [Fact("samples", f"{found.num_samples:,}", f"during {plural(summary.num_clean, 'clean step')}")]
    if found.joules is not None and summary.num_clean:
        rows.append(Fact("energy", f"{significant(found.joules / summary.num_clean)} J per step"))
    if summary.throughput is not None and (joules := summary.throughput.joules_per_unit) is not None:
        rows.append(Fact("energy", f"{significant(joules)} J per {summary.throughput.unit.removesuffix('s')}"))
    yield Facts(tuple(rows))
    note = "busy: a kernel was running; it does not say how full the GPU was"
    yield Table("counters_summary", "counters during the clean steps", columns, note=note)
    if not found.throttle_shares:
        yield Text("The clocks were not throttled in any sample of the clean steps.")
        return
    reasons, shares = zip(*sorted(found.throttle_shares, key=lambda item: -item[1]))
    note = "share: of the samples in the clean steps; several reasons can apply at once"
    columns = {"reason": list(reasons), "share": list(shares)}
    yield Table("throttling", "what throttled the clocks", columns, note=note)


def _charts(recording: Recording) -> Iterator[Lines]:
    counters, clean = recording.counters, recording.window("clean")
    origin = min([counters[0].t_ns, *(sample.start_ns for sample in recording.samples[:1])])
    ends = {"clean": clean[0].start_ns, "end of clean": clean[-1].start_ns + clean[-1].wall_ns} if clean else {}
    marks = tuple(Mark(ns - origin, name) for name, ns in ends.items())
    if clocks := _by_reason(counters, origin):
        mhz = [one.sm_clock_mhz for one in counters if one.sm_clock_mhz is not None]
        share = percent(sum(len(one.y) for one in clocks if one.name != _FREE) / len(mhz))
        caption = f"{min(mhz):,} to {max(mhz):,} MHz; throttled in {share} of the samples."
        yield Lines("clock", "SM clock", "time_ns", "clock_mhz", clocks, marks, "dots", caption=caption)
    limit = mapping(recording.facts.get("counters")).get("power_limit_watts")
    for id, title, y, names in _CHARTS:
        series, num_points = [], 0
        for name, field in names.items():
            known = [one for one in counters if getattr(one, field) is not None]
            if known:
                times, values = [one.t_ns - origin for one in known], [float(getattr(one, field)) for one in known]
                series.append(thinned(name, times, values))
            num_points += len(known)
        values = [value for value in series[0].y if value is not None] if series else []
        if not values or (id == "driver_memory" and cell(y, min(values)) == cell(y, max(values))):
            continue
        caption = f"{series[0].name.capitalize()}: {cell(y, min(values))} to {cell(y, max(values))}."
        caption += thinning(series, num_points)
        if id == "power" and isinstance(limit, (int, float)):
            series.append(Series("limit", [float(limit)] * 2, [series[0].x[0], series[0].x[-1]], "unattributed"))
        yield Lines(id, title, "time_ns", y, tuple(series), marks, caption=caption)


def _by_reason(counters: Sequence[CounterSample], origin: int) -> tuple[Series, ...]:
    """Return the SM clock as one series per reason that throttled it."""
    groups: dict[str, list[tuple[int, float]]] = {}
    for one in counters:
        if one.sm_clock_mhz is not None:
            reason = " and ".join(reason for reason in one.throttle if reason != _IDLE) or _FREE
            groups.setdefault(reason, []).append((one.t_ns - origin, float(one.sm_clock_mhz)))
    ordered = sorted(groups.items(), key=lambda item: (item[0] != _FREE, -len(item[1])))
    return tuple(Series(name, [clock for _, clock in found], [t for t, _ in found]) for name, found in ordered)


def _processes(recording: Recording) -> Iterator[Table]:
    if others := mapping(recording.facts.get("counters")).get("other_processes"):
        columns = columns_of(others, "process:name pid used_bytes")
        yield Table("other_processes", "other processes on this GPU", columns, note="when the run ended")


def _samples(recording: Recording) -> Table:
    counters = recording.counters
    gauges = columns_of(counters, " ".join([*_GAUGES, "energy_joules driver_memory_bytes"]))
    columns: dict[str, Sequence[Any]] = {
        "time_ns": [one.t_ns - counters[0].t_ns for one in counters],
        **without_empty(gauges),
        "held_back_by": [", ".join(one.throttle) or None for one in counters],
    }
    return Table("counters", "every sample", columns, note="time: since the first sample")

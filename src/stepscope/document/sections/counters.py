"""What the GPU's own counters showed during the run: clocks, power, how busy, what held it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stepscope.document.model import Fact, Facts, Lines, Mark, Missing, Series, Table, Text
from stepscope.document.sections.shared import known, mapping, plain, thinned, thinning
from stepscope.errors import Unavailable
from stepscope.formatting import cell, percent, plural, significant
from stepscope.session import Session
from stepscope.trace.recording import CounterSample, Recording

GAUGES = ("gpu_busy_share", "memory_controller_busy_share", "power_watts", "sm_clock_mhz", "memory_clock_mhz")
_IDLE = "gpu_idle"
_FREE = "not held back"


def parts(session: Session) -> tuple[Any, ...]:
    """Lines over the run with the clean window marked, and the figures of that window."""
    if not session.is_recording:
        raise Unavailable("a trace has no counters: `stepscope run train.py` samples them on an NVIDIA GPU")
    recording = session.recording
    if not recording.counters:
        on_cpu = mapping(recording.facts.get("environment")).get("device") == "cpu"
        raise Unavailable(
            "the run was on a CPU, which has no NVML: `stepscope run train.py` on an NVIDIA GPU samples its counters"
            if on_cpu
            else "no counter was sampled: it takes an NVIDIA GPU whose driver offers NVML (`stepscope doctor` says)"
        )
    return (*_summary(session), *_charts(recording), *_processes(recording), _samples(recording))


def _summary(session: Session) -> Iterator[Any]:
    recording, summary = session.recording, session.summary
    found = summary.counters
    if found is None:
        yield Missing(
            "no sample lies in the clean steps: there are none, or they are too short; take more --clean steps"
        )
        return
    told = mapping(recording.facts.get("counters"))
    limits = {"power_watts": told.get("power_limit_watts"), "sm_clock_mhz": told.get("max_sm_clock_mhz")}
    gauges = {name: getattr(found, name) for name in GAUGES}
    num = 3 if any(isinstance(limit, (int, float)) for limit in limits.values()) else 2
    columns: dict[str, list[Any]] = {"figure": ["mean", "95th percentile", "limit"][:num]}
    columns |= {
        name: [gauge.mean, gauge.p95, plain(limits.get(name))][:num]
        for name, gauge in gauges.items()
        if gauge is not None
    }
    rows = [Fact("samples", f"{found.num_samples:,}", f"during {plural(summary.num_clean, 'clean step')}")]
    if found.joules is not None and summary.num_clean:
        rows.append(Fact("energy", f"{significant(found.joules / summary.num_clean)} J a step"))
    joules = summary.throughput.joules_per_unit if summary.throughput else None
    if joules is not None and summary.throughput is not None:
        rows.append(Fact("energy", f"{significant(joules)} J a {summary.throughput.unit.removesuffix('s')}"))
    yield Facts(known(rows))
    note = "over the clean steps; busy: some kernel ran, not how full the GPU was"
    yield Table("counters_summary", "counters over the clean steps", columns, note=note)
    if not found.throttle_shares:
        yield Text("The clocks were not held back in any sample of the clean steps.")
        return
    reasons, shares = zip(*sorted(found.throttle_shares, key=lambda item: -item[1]))
    yield Table("throttling", "what held the clocks back", {"reason": list(reasons), "share": list(shares)},
                note="of the samples in the clean steps; more than one reason can hold at a time")  # fmt: skip


def _charts(recording: Recording) -> Iterator[Lines]:
    counters = recording.counters
    origin = min([counters[0].t_ns, *(sample.start_ns for sample in recording.samples[:1])])
    marks = _marks(recording, origin)
    clocks = _by_reason(counters, origin)
    if clocks:
        values = [one.sm_clock_mhz for one in counters if one.sm_clock_mhz is not None]
        held = sum(len(one.y) for one in clocks if one.name != _FREE)
        share = percent(held / len(values))
        caption = f"From {min(values):,} to {max(values):,} MHz; something held it back in {share}"
        yield Lines(
            id="clock", title="SM clock", caption=f"{caption} of the samples.", x="time_ns", y="clock_mhz",
            series=clocks, marks=marks, style="dots",
        )  # fmt: skip
    told = mapping(recording.facts.get("counters"))
    limit = told.get("power_limit_watts")
    charts = (
        ("power", "power", "power_watts", {"power": "power_watts"}),
        ("busy", "how busy the GPU was", "busy_share",
         {"a kernel ran": "gpu_busy_share", "memory controller": "memory_controller_busy_share"}),
        ("driver_memory", "memory in use by the driver's account", "used_bytes", {"in use": "driver_memory_bytes"}),
    )  # fmt: skip
    for id, title, y, names in charts:
        series = [one for name, field in names.items() if (one := _line(counters, name, field, origin)).y]
        if not series:
            continue
        num_points = sum(getattr(one, field) is not None for one in counters for field in names.values())
        left_out = thinning(series, num_points)
        caption = _range(series[0], y)
        if id == "driver_memory" and " to " not in caption:
            continue
        if id == "power" and isinstance(limit, (int, float)):
            ends = [series[0].x[0], series[0].x[-1]]
            series.append(Series("limit", [float(limit)] * 2, ends, "unattributed"))
        caption = f"{caption}.{left_out}"
        yield Lines(id=id, title=title, caption=caption, x="time_ns", y=y, series=tuple(series), marks=marks)


def _range(series: Series, y: str) -> str:
    values = [value for value in series.y if value is not None]
    low, high = cell(y, min(values)), cell(y, max(values))
    return (
        f"{series.name.capitalize()}: from {low} to {high}" if low != high else f"{series.name.capitalize()}: {low}"
    )


def _line(counters: Sequence[CounterSample], name: str, field: str, origin: int) -> Series:
    found = [(one.t_ns - origin, float(value)) for one in counters if (value := getattr(one, field)) is not None]
    return thinned(name, [t for t, _ in found], [value for _, value in found])


def _by_reason(counters: Sequence[CounterSample], origin: int) -> tuple[Series, ...]:
    """The SM clock, its samples apart by what held it back."""
    groups: dict[str, list[tuple[int, float]]] = {}
    for one in counters:
        if one.sm_clock_mhz is not None:
            reason = " and ".join(reason for reason in one.throttle if reason != _IDLE) or _FREE
            groups.setdefault(reason, []).append((one.t_ns - origin, float(one.sm_clock_mhz)))
    ordered = sorted(groups.items(), key=lambda item: (item[0] != _FREE, -len(item[1])))
    return tuple(Series(name, [clock for _, clock in found], [t for t, _ in found]) for name, found in ordered)


def _marks(recording: Recording, origin: int) -> tuple[Mark, ...]:
    clean = recording.window("clean")
    if not clean:
        return ()
    end = clean[-1].start_ns + clean[-1].wall_ns
    return Mark(clean[0].start_ns - origin, "clean"), Mark(end - origin, "end of clean")


def _processes(recording: Recording) -> Iterator[Table]:
    others = mapping(recording.facts.get("counters")).get("other_processes")
    rows = [one for one in others if isinstance(one, dict)] if isinstance(others, list) else []
    if rows:
        yield Table(
            "other_processes",
            "other processes on this GPU",
            {
                "process": [plain(one.get("name")) for one in rows],
                "pid": [plain(one.get("pid")) for one in rows],
                "used_bytes": [plain(one.get("used_bytes")) for one in rows],
            },
            note="when the run ended",
        )


def _samples(recording: Recording) -> Table:
    counters = recording.counters
    origin = counters[0].t_ns
    fields = (*GAUGES, "energy_joules", "driver_memory_bytes")
    columns: dict[str, Sequence[Any]] = {"time_ns": [one.t_ns - origin for one in counters]}
    columns |= {
        name: [plain(getattr(one, name)) for one in counters]
        for name in fields
        if any(getattr(one, name) is not None for one in counters)
    }
    columns["held_back_by"] = [", ".join(one.throttle) or None for one in counters]
    return Table("counters", "every sample", columns, note="time: since the first sample")

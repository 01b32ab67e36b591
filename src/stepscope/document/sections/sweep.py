"""Builds the report of a sweep: the fastest points, every figure over the axes, all points, and why some failed."""

from collections.abc import Iterable, Iterator, Sequence

from stepscope.analysis.comparison.sweeps import OK, PointSummary, SweepSummary, hash_of, record_of, sweep_of
from stepscope.document import model, sweep_table
from stepscope.document.model import Document, Fact, Facts, Missing, Part, Section, Table, Text, Value
from stepscope.document.sections import sweep_charts as charts
from stepscope.document.sections.sweep_charts import TIME, Layout, Measure, axis_of, label, layout_of, time_text
from stepscope.document.sweep_table import BEST, NOISY, TIED
from stepscope.document.tables import plain, without_empty
from stepscope.formatting import cell, plural, safe
from stepscope.trace.sweep_file import Sweep
from stepscope.version import __version__

# Columns of the table, named as in results.csv; empty ones are left out.
_FIGURES = (
    "time_median_ns", "tokens_per_s", "max_batch", "speedup", "mfu_share", "peak_allocated_bytes", "is_best",
    "is_tied", "is_noisy", "differs", "before_backward_bytes", "flops_per_s", "num_kernel_launches", "compile_ns",
    "loss", "final_loss", "time_p10_ns", "time_p90_ns", "time_ci_low_ns", "time_ci_high_ns", "num_samples",
    "host_median_ns", "first_call_ns", "peak_reserved_bytes", "peak_resident_bytes", "num_parameters", "num_tokens",
    "flops_coverage", "notes",
)  # fmt: skip
_EXPLORED = (
    "time_median_ns", "tokens_per_s", "mfu_share", "peak_allocated_bytes", "before_backward_bytes",
    "peak_reserved_bytes", "flops_per_s", "num_kernel_launches", "compile_ns", "first_call_ns", "host_median_ns",
    "speedup", "max_batch", "loss", "num_parameters",
)  # fmt: skip
_MARKS = BEST + TIED + NOISY
_NO_DEVICE = (
    "MFU needs the device, which is in sweep.json. stepscope bench writes it next to results.jsonl: copy both, or "
    "report on the folder."
)


def sweep_report(sweep: Sweep) -> Document:
    summary = sweep_of(list(sweep.rows), sweep.environments)
    layout = layout_of(summary, sweep.rows)
    facts = dict.fromkeys(f"fact_{name}" for point in summary.points for name in point.facts)
    names = (*_varying(summary), "status", *_FIGURES, *facts, "hash")
    note = f"Only points with status ok have figures. Configuration of all points: {hash_of(summary)}."
    sections = [
        Section("overview", "Overview", _overview(sweep, summary, layout)),
        Section("explore", "Explore", (_explorer(summary, layout),)),
        *(_figure_section(summary, layout, measure) for measure in charts.MEASURES),
        Section("points", "Points", (Table("points", "All points", _columns(summary.points, names), 30, note),)),
        Section("statuses", "Statuses", _statuses(sweep, summary)),
    ]
    workloads = dict.fromkeys(str(row["workload"]) for row in sweep.rows)
    about: dict[str, Value] = {
        "source": str(sweep.folder),
        "stepscope": __version__,
        "configuration": hash_of(summary),
        "num_points": len(summary.points),
    }
    title = f"{safe(sweep.folder.resolve().name)}: a sweep of {safe(' and '.join(workloads), 80)}"
    return Document(title, _verdict(summary, layout), tuple(sections), about)


def _verdict(sweep: SweepSummary, layout: Layout) -> str:
    sentences = [f"{plural(len(sweep.points), 'point')}: {safe(sweep_table.statuses_text(sweep), 2000)}."]
    timed = [point for point in sweep.points if point.status == OK and point.time is not None]
    if not timed:
        return f"{sentences[0]} No point has a valid time."
    if best := [point for point in timed if point.is_best]:
        sentences.append(_winners(best, sweep, layout))
    else:
        ordered = sorted(timed, key=lambda point: point.time.median if point.time else 0.0)
        texts = [f"{time_text(point).rstrip(_MARKS)}{_where(point, layout)}" for point in (ordered[0], ordered[-1])]
        sentences.append(f"It takes {' to '.join(dict.fromkeys(texts))}.")
    heavy = max(timed, key=lambda point: point.peak_allocated_bytes or 0)
    if heavy.peak_allocated_bytes:
        peak = cell("peak_bytes", heavy.peak_allocated_bytes)
        sentences.append(f"The highest peak is {peak}{_where(heavy, layout)}.")
    if noisy := sum(point.is_noisy for point in timed):
        sentences.append(f"{noisy} of {plural(len(timed), 'point')} {'is' if noisy == 1 else 'are'} noisy.")
    return " ".join(sentences)


def _winners(best: Sequence[PointSummary], sweep: SweepSummary, layout: Layout) -> str:
    wins: dict[str, list[PointSummary]] = {}
    for point in best:
        wins.setdefault(label(point, layout.ways or layout.names, False), []).append(point)
    ranked = sorted(wins.items(), key=lambda item: -len(item[1]))
    name, won = ranked[0]
    num_tied = sum(point.is_tied for point in sweep.points)
    tied = f"; {plural(num_tied, 'row')} not measurably slower" if num_tied else ""
    if 2 * len(won) <= len(best):
        named = ", ".join(f"{name} {len(won)}" for name, won in ranked[:4])
        return f"The fastest variant differs between {plural(len(best), 'comparison')} ({named}){tied}."
    # A ratio to a different computation is not a gain.
    gains = [point.speedup for point in won if point.speedup is not None and point.differs is None]
    ends = dict.fromkeys(f"{end:.2f}" for end in (min(gains), max(gains))) if gains else {}
    gain = f", {' to '.join(ends)} times as fast as the plainest" if ends and "1.00" not in ends else ""
    if len(best) == 1:
        return f"{name} is the fastest: {time_text(best[0]).rstrip(_MARKS)}{gain}{tied}."
    return f"{name} is the fastest in {len(won)} of {plural(len(best), 'comparison')}{gain}{tied}."


def _where(point: PointSummary, layout: Layout) -> str:
    return f" ({label(point, layout.names)})" if layout.names else ""


def _overview(sweep: Sweep, summary: SweepSummary, layout: Layout) -> tuple[Part, ...]:
    parts: list[Part] = [Facts(tuple(_facts(sweep, summary)))]
    parts += [Text(safe(warning, 500)) for warning in sweep.warnings]
    if layout.follows:
        parts.append(Text("; ".join(f"{name} is determined by {of}" for name, of in layout.follows.items()) + "."))
    if best := [point for point in summary.points if point.is_best and point.status == OK]:
        names = (*_varying(summary), "time_median_ns", "tokens_per_s", "speedup", "differs", "peak_allocated_bytes")
        columns = _columns(best, names)
        note = "speedup: over the plainest variant." if "speedup" in columns else ""
        note += " differs: the plainest variant computes something else." if "differs" in columns else ""
        parts.append(Table("best", "Fastest points among those that compute the same thing", columns, 20, note))
    else:
        parts.append(Text("No two points compute the same thing in different ways, so there is no best one."))
    return tuple(parts)


def _facts(sweep: Sweep, summary: SweepSummary) -> Iterator[Fact]:
    yield Fact("points", f"{len(summary.points)}", safe(sweep_table.statuses_text(summary), 2000))
    varied = [f"{safe(name, 60)} ({len(axis_of(summary.points, name).values)})" for name in summary.varying]
    yield Fact("varied", ", ".join(varied) or "nothing")
    yield Fact("same in all", safe(", ".join(sweep_table.constants_of(summary)), 2000))
    if (parameters := sweep_table.same_parameters(summary)) is not None:
        yield Fact("parameters", f"{parameters:,}")
    if limits := sweep_table.mfu_limits(summary):
        yield Fact("MFU limit", safe(limits, 500))
    used = dict.fromkeys(str(row.get("environment_hash", "")) for row in sweep.rows)
    known = {key: sweep.environments[key] for key in used if key in sweep.environments}
    for key, environment in known.items():
        facts = [f"{name} {value}" for name, value in environment.items() if isinstance(value, (str, int, float))]
        device = str(environment.get("device_name") or "unnamed device")
        yield Fact("ran on", safe(device), safe(f"{', '.join(facts)} [{key}]", 1000))
    if not known:
        yield Fact("ran on", "unknown", "the folder has no sweep.json")
    yield Fact("configuration", hash_of(summary), "hash of all points")


def _figure_section(sweep: SweepSummary, layout: Layout, measure: Measure) -> Section:
    parts: tuple[Part, ...]
    if any(measure.of(point) is not None for point in sweep.points):
        both = charts.memory_and_time(sweep, layout) if measure.section == "memory" else None
        parts = (*charts.charts_of(sweep, layout, measure), *([both] if both else []))
        parts = parts or (Text("A single point has no chart. Its figures are in the table."),)
    else:
        none = f"No point has this figure: {measure.title}."
        parts = (Missing(_why_no_mfu(sweep) if measure.section == "mfu" else none),)
    return Section(measure.section, measure.title, parts)


def _why_no_mfu(sweep: SweepSummary) -> str:
    devices = dict.fromkeys(safe(point.device_name) for point in sweep.points if point.device_name)
    if not devices:
        return _NO_DEVICE
    return (
        f"No point has an MFU. It needs the workload's FLOPs and the peak rate of {' and '.join(devices)}: "
        "`stepscope doctor --measure` measures it on a GPU."
    )


def _columns(points: Sequence[PointSummary], names: Iterable[str]) -> dict[str, Sequence[Value]]:
    """Return the columns that are not empty; only `ok` points have figures."""
    shown = []
    for point in points:
        record = record_of(point)
        kept = {"status", "hash", *_axis_columns(point).values()}
        shown.append({name: plain(value) for name, value in record.items() if point.status == OK or name in kept})
    columns = {name: [record.get(name) for record in shown] for name in names}
    return {name: values for name, values in columns.items() if any(v is not None and v is not False for v in values)}


def _axis_columns(point: PointSummary) -> dict[str, str]:
    """Return each axis' column: a knob with the name of a figure has a prefix."""
    record = record_of(point)
    return {name: f"knob_{name}" if f"knob_{name}" in record else name for name in point.axes}


def _varying(sweep: SweepSummary) -> list[str]:
    columns: dict[str, str] = {}
    for point in sweep.points:
        columns |= _axis_columns(point)
    return [columns[name] for name in sweep.varying]


def _statuses(sweep: Sweep, summary: SweepSummary) -> tuple[Part, ...]:
    """Return why points failed; times measured of them are shown, but not ranked."""
    failed = [(row, point) for row, point in zip(sweep.rows, summary.points) if point.status != OK]
    if not failed:
        return (Text(f"All {plural(len(summary.points), 'point')} are ok: correct, verified and measured."),)
    columns: dict[str, list[Value]] = {
        column: [plain(point.axes.get(name)) for _, point in failed]
        for column, name in zip(_varying(summary), summary.varying)
    }
    columns["status"] = [point.status for _, point in failed]
    columns["reason"] = [point.reason or "no reason recorded" for _, point in failed]
    columns["stage"] = [plain(row.get("stage")) for row, _ in failed]
    columns["unranked_time_ns"] = [TIME.value(point) for _, point in failed]
    columns["hash"] = [point.hash for _, point in failed]
    return (Table("statuses", "Points without a result", without_empty(columns), num_shown=20),)


def _explorer(sweep: SweepSummary, layout: Layout) -> model.Explorer:
    axes = tuple(axis_of(sweep.points, name) for name in sweep.varying)
    interval = ("time_ci_low_ns", "time_ci_high_ns")
    figures: dict[str, list[float | None]] = {
        name: [value if isinstance(value, (int, float)) else None for value in values]
        for name, values in _columns(sweep.points, (*_EXPLORED, *interval)).items()
    }
    shown = []
    for name in (name for name in _EXPLORED if name in figures):
        values = [value for value in figures[name] if value is not None]
        is_log = min(values) > 0 and max(values) >= charts.LOG_FACTOR * min(values)
        shown.append(model.Figure(name, is_log, *(interval if name == "time_median_ns" else ())))
    order = [axis.name for axis in axes]
    return model.Explorer(
        id="explorer",
        title="Any figure over any two axes",
        axes=axes,
        places=tuple(tuple(axis.values.index(point.axes.get(axis.name)) for point in sweep.points) for axis in axes),
        figures=figures,
        shown=tuple(shown),
        statuses=tuple(point.status for point in sweep.points),
        reasons=tuple("" if point.status == OK else point.reason or "no reason recorded" for point in sweep.points),
        names=tuple(label(point, layout.names) for point in sweep.points),
        marks=tuple("best" if point.is_best else "tied" if point.is_tied else "" for point in sweep.points),
        is_noisy=tuple(point.is_noisy for point in sweep.points),
        x=order.index(layout.x.name) if layout.x else None,
        series=order.index(layout.series[0]) if layout.series else None,
    )

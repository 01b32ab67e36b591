"""Builds a sweep as a table: what varies, the figures of every point, and why some points have none."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.comparison import sweeps
from stepscope.analysis.comparison.significance import MIN_SAMPLES
from stepscope.analysis.comparison.sweeps import OK, PointSummary, SweepSummary, varying_axes
from stepscope.analysis.time.statistics import Distribution
from stepscope.document.model import Document, Fact, Facts, Section, Table, Value
from stepscope.formatting import count, milliseconds, percent, plural, safe, significant, size, whole_percent

BEST, TIED, NOISY, DIFFERENT = "*", "≈", "~", "≠"
_HIDDEN_FACTS = ("dropped_share", "dropped_flops")
"""Facts of a workload that have a column of their own, or are part of another figure."""


def sweep_document(sweep: SweepSummary, command: str | None = None) -> Document:
    facts = (*([Fact("command", command)] if command else []), *_notes(sweep))
    verdict = f"{plural(len(sweep.points), 'point')}: {statuses_text(sweep)}."
    return Document("sweep", verdict, (Section("points", "", (_points(sweep), Facts(facts))),))


def records_table(sweep: SweepSummary) -> Table:
    """Return every axis and every figure of every point: what `results.csv` has."""
    records = [sweeps.record_of(point) for point in sweep.points]
    names = dict.fromkeys(name for record in records for name in record)
    return Table("results", "Results", {name: [record.get(name) for record in records] for name in names})


def row_line(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a finished row as one line of progress: its status, the knobs named, its time or its reason."""
    samples = row.get("samples_device_ns")
    figure = milliseconds(statistics.median(samples)) if samples else ""
    if row["status"] != OK:
        figure = row.get("reason") or ""
    axes = {"preset": row.get("preset"), **row["config"], **row["run"]}
    return safe(f"{row['status']:<8} {' '.join(f'{name}={axes.get(name)}' for name in names)}  {figure}", 300)


def grid_document(points: Sequence[Mapping[str, Any]]) -> Document:
    """Return what a grid would run: axes that vary as columns, the rest below."""
    axes = [{"preset": p["preset"], **p["config"], **p["run"]} for p in points]
    varying, constants = varying_axes(axes)
    columns: dict[str, list[Value]] = {name: [str(values.get(name, "")) for values in axes] for name in varying}
    fixed = ", ".join(f"{name}={value}" for name, value in constants.items() if value is not None)
    facts = Facts((Fact("same in all", f"{points[0]['workload']}, {fixed}"),))
    table = Table("grid", "Grid", columns, num_shown=len(points))
    return Document("grid", plural(len(points), "point"), (Section("grid", "", (table, facts)),))


def digits_of(time: Distribution) -> int:
    """Return how many digits of a time mean something: one beyond where the median's interval begins."""
    noise = (time.ci_high - time.ci_low) / 2 or time.median / 1e4
    ratio = time.median / noise
    return max(2, min(5, 2 + (len(str(int(ratio))) - 1 if ratio >= 1 else 0)))


def marks_in(points: Sequence[PointSummary]) -> Iterator[tuple[str, str]]:
    """Yield the marks of the points, each with its meaning."""
    noisy = f"noisy: p90 − p10 exceeds {whole_percent(sweeps.NOISY_SHARE)} of the median"
    best = "fastest of the points that compute the same thing"
    meanings = {"is_best": (BEST, best), "is_tied": (TIED, "not measurably slower"), "is_noisy": (NOISY, noisy)}
    yield from (mark for name, mark in meanings.items() if any(getattr(point, name) for point in points))


def mark_of(point: PointSummary) -> str:
    return f"{NOISY if point.is_noisy else ''}{BEST if point.is_best else TIED if point.is_tied else ''}"


def _time(point: PointSummary) -> str | None:
    if point.time is None:
        return None
    return f"{significant(point.time.median / 1e6, digits_of(point.time))}{mark_of(point)}"


def _spread(point: PointSummary) -> str | None:
    if point.time is None:
        return None
    digits = digits_of(point.time)  # the same digits as the median, so it cannot seem to lie outside
    return f"{significant(point.time.p10 / 1e6, digits)}–{significant(point.time.p90 / 1e6, digits)}"


def _of(name: str, write: Callable[[Any], str]) -> Callable[[PointSummary], str | None]:
    return lambda point: None if (value := getattr(point, name)) is None else write(value)


def _fact(name: str) -> Callable[[PointSummary], str | None]:
    write = size if name.endswith("_bytes") else significant
    return lambda point: None if (value := point.facts.get(name)) is None else write(value)


COLUMNS: dict[str, Callable[[PointSummary], str | None]] = {
    "time ms": _time,
    "max batch": _of("max_batch", lambda value: f"{value:,}"),
    "tokens/s": _of("tokens_per_s", significant),
    "× plainest": lambda p: None if p.speedup is None else f"{p.speedup:.2f}{DIFFERENT if p.differs else ''}",
    "dropped": lambda point: percent(share) if (share := point.facts.get("dropped_share")) else None,
    "peak": _of("peak_allocated_bytes", size),
    "MFU": _of("mfu", lambda value: percent(value.share) + (" m" if value.is_measured else "")),
    "GPU busy": _of("gpu_busy_share", percent),
    "p10–p90 ms": _spread,
    "loss": _of("loss", lambda value: f"{value:.5g}"),
    "before backward": _of("before_backward_bytes", size),
    "TFLOP/s": _of("flops_per_s", lambda value: significant(value / 1e12)),
    "launches": _of("num_kernel_launches", lambda value: f"{value:,}"),
    "first call s": _of("first_call_ns", lambda value: significant(value / 1e9)),
    "compile s": _of("compile_ns", lambda value: significant(value / 1e9)),
    "pays after": _of("break_even_steps", lambda value: f"{count(math.ceil(value))} steps"),
    "reserved": _of("peak_reserved_bytes", size),
    "parameters": _of("num_parameters", count),
    "coverage": _of("flops_coverage", percent),
}
"""Figures by their column's title, most important first: a narrow terminal drops the last."""


def _points(sweep: SweepSummary) -> Table:
    """Return the points with every column that says something; a point that is not ok has its reason below it."""
    facts = dict.fromkeys(name for point in sweep.points for name in point.facts)
    shown = {name: _fact(name) for name in facts if name not in _HIDDEN_FACTS and not name.startswith("tensor_")}
    columns: dict[str, list[Value]] = {
        name: [safe(point.axes.get(name, ""), 40) for point in sweep.points] for name in sweep.varying
    }
    has_failed = any(point.status != OK for point in sweep.points)
    for title, write in {**COLUMNS, **shown}.items():
        texts = [write(point) if point.status == OK else None for point in sweep.points]
        known = {text for text, point in zip(texts, sweep.points) if point.time is not None and point.status == OK}
        is_constant = (title in ("parameters", "coverage") or title in shown) and len(known) == 1
        if any(text is not None for text in texts) and not is_constant:
            columns[title] = [text or "" for text in texts]
        if title == "time ms" and has_failed:
            columns["status"] = [point.status for point in sweep.points]
    if has_failed:
        columns["reason"] = [None if p.status == OK else p.reason or "no reason recorded" for p in sweep.points]
    columns = columns or {"status": [point.status for point in sweep.points]}
    return Table("points", "Points", columns, num_shown=len(sweep.points), below=("reason",))


def _notes(sweep: SweepSummary) -> Iterator[Fact]:
    points = sweep.points
    differs = "; ".join(dict.fromkeys(p.differs for p in points if p.differs and p.speedup is not None))
    for sign, meaning in marks_in(points):
        yield Fact(sign, f"{meaning}{': the 95 % intervals of the medians overlap' * (sign == TIED)}")
    names = dict.fromkeys(point.device_name for point in points if point.device_name is not None)
    if len(names) > 1:
        yield Fact("devices", f"{', '.join(names)}: points on unlike devices are not compared with each other")
    if differs:
        yield Fact(DIFFERENT, f"not the same computation: {differs}")
    if any(p.is_best for p in points) and any(p.time and p.time.num_samples < MIN_SAMPLES for p in points):
        yield Fact("note", f"Fewer than {MIN_SAMPLES} samples give no interval, so ties are not marked.")
    if any(point.facts.get("dropped_share") for point in points):
        yield Fact("dropped", "share of the routed work that was left out; TFLOP/s and MFU do not count it")
    for text in dict.fromkeys(text for point in points for text in point.notes):
        rows = [str(number) for number, point in enumerate(points, 1) if text in point.notes]
        yield Fact(f"row {', '.join(rows)}", text)
    if limits := mfu_limits(sweep):
        measured = any(p.mfu.is_measured for p in points if p.mfu is not None)
        yield Fact("MFU", f"of {limits}{' (m: measured)' if measured else ''}")
    parameters = same_parameters(sweep)
    devices = dict.fromkeys(str(point.device_name) for point in points if point.device_name)
    fixed = [*constants_of(sweep), *([] if parameters is None else [f"{parameters:,} parameters"]), *devices]
    yield Fact("same in all", f"{', '.join(fixed)} [{sweeps.hash_of(sweep)}]")


def statuses_text(sweep: SweepSummary) -> str:
    return ", ".join(f"{number} {status}" for status, number in sweep.num_by_status.items())


def constants_of(sweep: SweepSummary) -> list[str]:
    """Return the knobs that are the same in all points, as they are typed."""
    return [f"{name}={value}" for name, value in sweep.constants.items() if value is not None]


def same_parameters(sweep: SweepSummary) -> int | None:
    """Return how many parameters every point has; None if they differ, or are unknown."""
    numbers = {point.num_parameters for point in sweep.points if point.num_parameters is not None}
    return numbers.pop() if len(numbers) == 1 else None


def mfu_limits(sweep: SweepSummary) -> str:
    """Return what the MFU of the points is of; "" if none has one."""
    return "; ".join(dict.fromkeys(point.mfu.limit for point in sweep.points if point.mfu is not None))

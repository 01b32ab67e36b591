"""A sweep as a table: for the terminal, as Markdown, as CSV."""

from __future__ import annotations

import hashlib
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.analysis.comparison.sweeps import (
    MIN_INTERVAL_SAMPLES,
    NOISY_SHARE,
    OK,
    PointSummary,
    SweepSummary,
    summarize,
    varying_axes,
)
from stepscope.analysis.time.statistics import Distribution
from stepscope.devices import Ceilings, Device, find_device, load_ceilings
from stepscope.formatting import count, milliseconds, percent, plural, safe, significant, size
from stepscope.render.csv import csv_text
from stepscope.render.markdown.text import escaped
from stepscope.render.notebook import with_html

CSV_FILE = "results.csv"
MARKDOWN_FILE = "results.md"
BEST, TIED, NOISY, DIFFERENT, NOT_A_NUMBER = "*", "≈", "~", "≠", "!"
# Facts that have a column of their own, or that are in another figure.
NO_FACT_COLUMN = ("dropped_share", "dropped_flops")


@dataclass(frozen=True)
class Column:
    """A column of figures: its title with the unit, its text for a point, or None where there is nothing to say."""

    title: str
    text: Callable[[PointSummary], str | None]


def _time(point: PointSummary) -> str | None:
    if point.time is None:
        return None
    mark = BEST if point.is_best else TIED if point.is_tied else ""
    return f"{significant(point.time.median / 1e6, digits_of(point.time))}{NOISY if point.is_noisy else ''}{mark}"


def digits_of(time: Distribution) -> int:
    """They follow the noise: one beyond where the interval of the median begins."""
    noise = (time.ci_high - time.ci_low) / 2 or time.median / 1e4
    return max(2, min(5, 2 + _decades(time.median / noise)))


def _decades(ratio: float) -> int:
    return len(str(int(ratio))) - 1 if ratio >= 1 else 0


def _spread(point: PointSummary) -> str | None:
    if point.time is None:
        return None
    digits = digits_of(point.time)  # the median's: rounded otherwise, it could lie outside
    return f"{significant(point.time.p10 / 1e6, digits)}–{significant(point.time.p90 / 1e6, digits)}"


def _speedup(point: PointSummary) -> str | None:
    if point.speedup is None:
        return None
    return f"{point.speedup:.2f}{DIFFERENT if point.differs else ''}"


def _dropped(point: PointSummary) -> str | None:
    share = point.facts.get("dropped_share", 0)
    return percent(share) if share else None


def _loss(point: PointSummary) -> str | None:
    odd = [note for note in point.notes if "loss is" in note]
    if point.loss is None and not odd:
        return None
    return f"{odd[0].split()[-1] if point.loss is None else f'{point.loss:.5g}'}{NOT_A_NUMBER if odd else ''}"


def _of(name: str, text: Callable[[Any], str]) -> Callable[[PointSummary], str | None]:
    def read(point: PointSummary) -> str | None:
        value = getattr(point, name)
        return None if value is None else text(value)

    return read


def _is_hidden(name: str) -> bool:
    """Facts that have no column: some have one of another name, those of single tensors would be too many."""
    return name in NO_FACT_COLUMN or name.startswith("tensor_")


def _fact(name: str) -> Column:
    """A column of what the workload counted itself."""

    def read(point: PointSummary) -> str | None:
        if name not in point.facts:
            return None
        return size(point.facts[name]) if name.endswith("_bytes") else significant(point.facts[name])

    return Column(safe(name, 30), read)


WRAPPED = 120
"""Longer lines of text are hard to read."""

# In the order in which they are given up when the terminal is narrow, last first.
COLUMNS = (
    Column("time ms", _time),
    Column("max batch", _of("max_batch", lambda value: f"{value:,}")),
    Column("tokens/s", _of("tokens_per_s", significant)),
    Column("× plainest", _speedup),
    Column("dropped", _dropped),
    Column("peak", _of("peak_allocated_bytes", size)),
    Column("MFU", _of("mfu", lambda value: percent(value.share) + (" m" if value.is_measured else ""))),
    Column("GPU busy", _of("gpu_busy_share", percent)),
    Column("p10–p90 ms", _spread),
    Column("loss", _loss),
    Column("before backward", _of("before_backward_bytes", size)),
    Column("TFLOP/s", _of("flops_per_s", lambda value: significant(value / 1e12))),
    Column("launches", _of("num_kernel_launches", lambda value: f"{value:,}")),
    Column("first call s", _of("first_call_ns", lambda value: significant(value / 1e9))),
    Column("compile s", _of("compile_ns", lambda value: significant(value / 1e9))),
    Column("pays after", _of("break_even_steps", lambda value: f"{count(math.ceil(value))} steps")),
    Column("reserved", _of("peak_reserved_bytes", size)),
    Column("parameters", _of("num_parameters", count)),
    Column("coverage", _of("flops_coverage", percent)),
)


def sweep_of(rows: list[dict[str, Any]], environments: Mapping[str, Any]) -> SweepSummary:
    """The summary of rows, held against what is known of their devices."""
    return with_html(summarize(rows, environments, _limits))


def _limits(name: str) -> tuple[Device | None, Ceilings | None]:
    return find_device(name), load_ceilings(name)


def sweep_text(sweep: SweepSummary, width: int = 100) -> str:
    """The table for a terminal of that width, the best of each group marked, with what it leaves out said below."""
    columns, left_out = _fitting(sweep, width)
    lines = [_line(cells, columns, sweep).rstrip() for cells in [_titles(columns, sweep)]]
    for point in sweep.points:
        lines.append(_row_text(point, columns, sweep, width))
    lines.append("")
    for note in _notes(sweep, left_out):
        lines += textwrap.wrap(note, min(width, WRAPPED), subsequent_indent="  ")
    return "\n".join(lines)


def sweep_markdown(sweep: SweepSummary, command: str | None = None) -> str:
    """The whole table as Markdown, with the command that made it."""
    columns = _shown(sweep)
    titles = [*map(escaped, sweep.varying), *(column.title for column in columns), "status", "hash"]
    lines = [f"`{safe(command, 2000)}`", ""] if command else []
    lines += [f"| {' | '.join(titles)} |", f"|{'---|' * len(sweep.varying)}{'--:|' * len(columns)}---|---|"]
    for point in sweep.points:
        cells = [escaped(point.axes.get(name, "")) for name in sweep.varying]
        cells += [(column.text(point) or "").replace(BEST, f"\\{BEST}") for column in columns]
        status = point.status if point.status == OK else f"{point.status}: {point.reason or ''}"
        cells += [escaped(status), f"`{point.hash}`"]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    lines += [f"- {escaped(note, 2000)}" for note in _notes(sweep, [])]
    return "\n".join(lines) + "\n"


def sweep_csv(sweep: SweepSummary) -> str:
    """Every axis and every figure of every row; times in nanoseconds, sizes in bytes."""
    records = [record_of(point) for point in sweep.points]
    names = dict.fromkeys(name for record in records for name in record)
    return csv_text({name: [record.get(name) for record in records] for name in names})


def record_of(point: PointSummary) -> dict[str, Any]:
    """A point as one flat record: what the CSV and `--json` have."""
    figures: dict[str, Any] = {"status": point.status, "reason": point.reason}
    for prefix, distribution in (("time", point.time), ("host", point.host)):
        for name in ("median", "p10", "p90", "mean", "std", "ci_low", "ci_high"):
            figures[f"{prefix}_{name}_ns"] = None if distribution is None else round(getattr(distribution, name))
    figures["num_samples"] = None if point.time is None else point.time.num_samples
    for name in (
        "first_call_ns", "compile_ns", "tokens_per_s", "flops_counted", "flops_formula", "flops_coverage",
        "flops_per_s", "peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes",
        "before_backward_bytes", "loss", "final_loss", "num_parameters", "num_active_parameters", "num_tokens",
        "num_kernels", "num_kernel_launches", "gpu_busy_share", "max_batch", "speedup", "break_even_steps",
        "loss_deviation", "differs", "is_best", "is_tied", "is_noisy",
    ):  # fmt: skip
        figures[name] = getattr(point, name)
    figures["notes"] = "; ".join(point.notes) or None
    figures["mfu_share"] = None if point.mfu is None else point.mfu.share
    figures["mfu_limit"] = None if point.mfu is None else point.mfu.limit
    figures["device_name"] = point.device_name
    figures.update({f"fact_{name}": value for name, value in point.facts.items()})
    figures.update({name.replace(".", "_"): value for name, value in point.compiler.items()})
    # A knob may be called like a figure: the hydra's `loss` is one.
    axes = {f"knob_{name}" if name in figures else name: value for name, value in point.axes.items()}
    return {"hash": point.hash, **axes, **figures}


def to_json(sweep: SweepSummary) -> dict[str, Any]:
    """The sweep for machines: docs/bench.md has every field."""
    return {
        "num_by_status": dict(sweep.num_by_status),
        "varying": list(sweep.varying),
        "constants": dict(sweep.constants),
        "points": [record_of(point) for point in sweep.points],
    }


def write_tables(folder: Path, sweep: SweepSummary, command: str) -> None:
    """Write results.csv and results.md beside the rows."""
    (folder / CSV_FILE).write_text(sweep_csv(sweep), encoding="utf-8")
    (folder / MARKDOWN_FILE).write_text(sweep_markdown(sweep, command), encoding="utf-8")


def row_line(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """A finished row in one line, for who watches: its status, its time or its reason, and the knobs named."""
    samples = row.get("samples_device_ns")
    figure = milliseconds(statistics.median(samples)) if samples else ""
    if row["status"] != OK:
        figure = row.get("reason") or ""
    axes = {"preset": row.get("preset"), **row["config"], **row["run"]}
    return safe(f"{row['status']:<8} {' '.join(f'{name}={axes.get(name)}' for name in names)}  {figure}", 300)


def points_text(points: Sequence[Mapping[str, Any]], width: int) -> str:
    """What a grid would run: the axes that vary as columns, the rest below."""
    axes = [{"preset": p["preset"], **p["config"], **p["run"]} for p in points]
    varying, constants = varying_axes(axes)
    rows = [list(varying), *([str(values.get(name, "")) for name in varying] for values in axes)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(varying))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows] if varying else []
    said = ", ".join(f"{name}={value}" for name, value in constants.items() if value is not None)
    notes = [plural(len(points), "point"), f"all: {points[0]['workload']}, {said}"]
    return "\n".join([*lines, "", *(line for note in notes for line in textwrap.wrap(note, width))]).lstrip("\n")


def _shown(sweep: SweepSummary) -> list[Column]:
    """The columns that say something: some row has a value, and it is not one number for all."""
    facts = dict.fromkeys(name for point in sweep.points for name in point.facts if not _is_hidden(name))
    shown = []
    for column in (*COLUMNS, *map(_fact, facts)):
        texts = [column.text(point) for point in sweep.points if point.time is not None]
        constant = column.title in ("parameters", "coverage", *facts) and len(set(texts)) == 1
        if any(text is not None for text in texts) and not constant:
            shown.append(column)
    return shown


def _fitting(sweep: SweepSummary, width: int) -> tuple[list[Column], list[str]]:
    columns = _shown(sweep)
    left_out: list[str] = []
    while len(columns) > 1 and len(_line(_titles(columns, sweep), columns, sweep)) > width:
        left_out.insert(0, columns.pop().title)
    return columns, left_out


def _titles(columns: list[Column], sweep: SweepSummary) -> list[str]:
    return [*sweep.varying, *(column.title for column in columns)]


def _widths(columns: list[Column], sweep: SweepSummary) -> list[int]:
    axes = [max(len(name), *(len(_axis(p, name)) for p in sweep.points)) for name in sweep.varying]
    figures = [max(len(c.title), *(len(c.text(p) or "") for p in sweep.points)) for c in columns]
    return axes + figures


def _axis(point: PointSummary, name: str) -> str:
    return safe(point.axes.get(name, ""), 40)


def _line(cells: list[str], columns: list[Column], sweep: SweepSummary) -> str:
    widths = _widths(columns, sweep)
    num_axes = len(sweep.varying)
    padded = [c.ljust(w) if i < num_axes else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths))]
    return "  ".join(padded)


def _row_text(point: PointSummary, columns: list[Column], sweep: SweepSummary, width: int) -> str:
    axes = [_axis(point, name) for name in sweep.varying]
    if point.status == OK:
        return _line([*axes, *(column.text(point) or "" for column in columns)], columns, sweep).rstrip()
    begin = _line(axes, columns, sweep)
    text = f"{begin}  {point.status}: {safe(point.reason or 'no reason was given', 1000)}".lstrip()
    return text if len(text) <= width else text[: width - 1] + "…"


def _notes(sweep: SweepSummary, left_out: list[str]) -> list[str]:
    points = sweep.points
    notes = []
    marks = []
    if any(point.is_best for point in points):
        marks.append(f"{BEST} fastest of the rows that compute the same thing")
    if any(point.is_tied for point in points):
        marks.append(f"{TIED} cannot be told from it: the 95 % intervals of the medians meet")
    if any(point.is_noisy for point in points):
        marks.append(f"{NOISY} noisy: p90 − p10 is over {NOISY_SHARE:.0%} of the median")
    if any(NOT_A_NUMBER in (_loss(point) or "") for point in points):
        marks.append(f"{NOT_A_NUMBER} a loss that is no number")
    if marks:
        notes.append("; ".join(marks))
    if any(p.is_best for p in points) and any(p.time and p.time.num_samples < MIN_INTERVAL_SAMPLES for p in points):
        notes.append(f"fewer than {MIN_INTERVAL_SAMPLES} samples: too few for an interval, ties are not marked")
    different = dict.fromkeys(p.differs for p in points if p.differs and p.speedup is not None)
    if different:
        notes.append(f"{DIFFERENT} does not compute the same as the plainest: {'; '.join(different)}")
    if any(_dropped(point) for point in points):
        notes.append("dropped: share of the routed work that was left out; TFLOP/s and MFU do not count it")
    for text in dict.fromkeys(text for point in points for text in point.notes):
        rows = [str(number) for number, point in enumerate(points, 1) if text in point.notes]
        notes.append(f"row {', '.join(rows)}: {text}")
    limits = dict.fromkeys(p.mfu.limit for p in points if p.mfu is not None)
    if limits:
        measured = any(p.mfu.is_measured for p in points if p.mfu is not None)
        notes.append(f"MFU of {'; '.join(limits)}{' (m: measured)' if measured else ''}")
    if left_out:
        notes.append(f"no room for {', '.join(left_out)}: see {CSV_FILE}")
    counts = ", ".join(f"{number} {status}" for status, number in sweep.num_by_status.items())
    notes.append(f"{plural(len(points), 'row')}: {counts}")
    constants = [f"{name}={value}" for name, value in sweep.constants.items() if value is not None]
    parameters = {point.num_parameters for point in points if point.num_parameters is not None}
    if len(parameters) == 1:
        constants.append(f"{next(iter(parameters)):,} parameters")
    devices = dict.fromkeys(point.device_name for point in points if point.device_name)
    notes.append(f"all rows: {', '.join([*constants, *map(str, devices)])} [{hash_of(sweep)}]")
    return [safe(note, 2000) for note in notes]


def hash_of(sweep: SweepSummary) -> str:
    """One hash for all rows of the table."""
    return hashlib.sha256("".join(point.hash for point in sweep.points).encode("utf-8", "replace")).hexdigest()[:12]

"""The tables of a trace and of its analysis as files: CSV or Parquet, a folder of each."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import polars as pl
import polars.selectors as cs

from stepscope.analysis.ranks.rank_account import RankAccount, account_of
from stepscope.analysis.structure.links import link
from stepscope.exporters.perfetto import mapped
from stepscope.exporters.selection import Selection
from stepscope.findings.finding import Finding
from stepscope.render.csv import guarded
from stepscope.render.files import writing
from stepscope.trace.tables import TABLES

TRACE, ANALYSIS = "trace", "analysis"
_LINKS = {"host": ("step", "phase", "module"), "memory": ("step", "phase", "module")}
_DEVICE_LINKS = ("step", "phase", "module", "class", "op_name")
_FINDING = (
    "id", "sentence", "saving_ns", "saving_low_ns", "saving_high_ns", "saving_bytes", "upper_bound", "confidence",
    "group", "fix", "derived",
)  # fmt: skip
_ROWS_A_CHUNK = 50_000


def write_tables(selection: Selection, rank: int, findings: Sequence[Finding], target: Path, form: str) -> list[Path]:
    """Write every table that has rows: `trace/` as `analyze --sql` has them, `analysis/` as `stepscope analyze`."""
    written = []
    with writing(target):
        target.mkdir(exist_ok=True)
        every = {TRACE: trace_tables(selection), ANALYSIS: analysis_tables(selection, rank, findings)}
        for folder, tables in every.items():
            (target / folder).mkdir(exist_ok=True)
            for name, table in tables:
                path = target / folder / f"{name}.{form}"
                path.unlink(missing_ok=True)
                if table.height:
                    _write(table, path, form)
                    written.append(path)
    return written


def trace_tables(selection: Selection) -> Iterator[tuple[str, pl.DataFrame]]:
    """The tables of docs/tables.md; those of events also with the step, the phase and the module they belong to."""
    trace = selection.trace
    for table in TABLES:
        frame: pl.DataFrame = getattr(trace, table.name)
        links = _DEVICE_LINKS if table.name == "device" else _LINKS.get(table.name)
        if links:
            linked = getattr(selection, table.name).select("event", *links)
            frame = frame.join(linked, on="event", how="left", maintain_order="left")
        yield table.name, frame


def analysis_tables(
    selection: Selection, rank: int, findings: Sequence[Finding]
) -> Iterator[tuple[str, pl.DataFrame]]:
    """Every table of a rank's account of the selection, and the findings."""
    linked = selection.linked
    account = account_of(linked if selection.is_whole else link(selection.trace, selection.steps), rank)
    yield from account_tables(account)
    rows = [{name: getattr(finding, name) for name in _FINDING} for finding in findings]
    yield "findings", pl.DataFrame(rows, infer_schema_length=None)


def account_tables(account: RankAccount) -> Iterator[tuple[str, pl.DataFrame]]:
    """The account's own tables, its figures as tables of one row, what is alive at a peak as one."""
    for field in fields(account):
        value = getattr(account, field.name)
        if isinstance(value, pl.DataFrame) and field.name != "counts":  # those are the trace's
            yield field.name, value
    yield "gpu_time", pl.DataFrame([account.gpu_time.to_json()])
    yield "launches", pl.DataFrame([account.launches], infer_schema_length=None)
    peaks = [
        summary.at_peak.with_columns(device_type=pl.lit(summary.device_type), device=pl.lit(summary.device))
        for summary in account.memory
    ]
    yield "memory_at_peak", pl.concat(peaks, how="diagonal_relaxed") if peaks else pl.DataFrame()


def _write(table: pl.DataFrame, path: Path, form: str) -> None:
    plain = table.lazy().with_columns((cs.categorical() | cs.enum()).cast(pl.String))
    if form == "parquet":
        plain.sink_parquet(path, compression="zstd")
        return
    with path.open("wb") as stream:
        for number, part in enumerate(table.iter_slices(_ROWS_A_CHUNK)):
            for_spreadsheets(part).write_csv(stream, include_header=number == 0)


def for_spreadsheets(table: pl.DataFrame) -> pl.DataFrame:
    """A table whose texts no spreadsheet takes for a formula, lists written as JSON."""
    texts, lists = cs.string() | cs.categorical() | cs.enum(), cs.nested()
    columns = [mapped(column, guarded) for column in table.select(texts).iter_columns()]
    for column in table.select(lists).iter_columns():
        columns.append(pl.Series(column.name, [_as_json(value) for value in column], dtype=pl.String))
    return table.with_columns(columns)


def _as_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value.to_list() if isinstance(value, pl.Series) else value)

"""`stepscope export … csv|parquet`: the tables of `sql` and `analyze` as files, safe for a spreadsheet."""

from __future__ import annotations

import csv
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from stepscope.analysis.ranks.rank_account import account
from stepscope.exporters.selection import select
from stepscope.exporters.tables import write_tables
from stepscope.findings.finding import Finding
from trace_builder import TraceBuilder

FORMULA = '=HYPERLINK("http://x";"y")'
FINDING = Finding(sentence="@SUM(1)", fix="f", evidence=(), falsified_by="", saving_ns=3.5, id="launch_bound")
TEXT = pl.selectors.categorical() | pl.selectors.enum()


def trace() -> TraceBuilder:
    made = TraceBuilder()
    for step in (1, 2):
        at = 100 * step
        made.step(step, at, 90).annotation("stepscope.module/a", at + 1, 40)
        made.op(FORMULA, at + 2, 20, id=step, **{"Input Dims": [[2, 3]]}).launch(
            "gemm", at + 3, (at + 10, 5), id=step
        )
        made.op("aten::add", at + 50, 10, id=step + 10).launch("add", at + 51, (at + 60, 5), id=step + 10)
        made.memory(at + 5, 512)
    return made


def tables(target: Path) -> set[str]:
    return {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_every_table_that_has_rows_is_a_file(tmp_path, form):
    linked = trace().linked()
    written = write_tables(select(linked), 0, [FINDING], tmp_path / "out", form)

    found = tables(tmp_path / "out")
    assert found == {str(path.relative_to(tmp_path / "out")) for path in written}
    trace_names = {"host", "device", "memory", "threads", "counts"}
    assert {name for name in found if name.startswith("trace/")} == {f"trace/{name}.{form}" for name in trace_names}
    assert {f"analysis/{name}.{form}" for name in ("steps", "ops", "modules", "top_kernels", "findings")} <= found
    assert f"trace/collectives.{form}" not in found


def test_parquet_has_what_the_tables_have(tmp_path):
    linked = trace().linked()
    write_tables(select(linked), 0, [], tmp_path / "out", "parquet")

    host = pl.read_parquet(tmp_path / "out" / "trace" / "host.parquet")
    same = linked.trace.host.with_columns(TEXT.cast(pl.String))
    assert_frame_equal(host.select(same.columns), same)
    assert host["module"].drop_nulls().unique().to_list() == ["a"]
    device = pl.read_parquet(tmp_path / "out" / "trace" / "device.parquet")
    assert device.sort("start_ns").select("name", "step", "module", "op_name").rows() == [
        ("gemm", 1, "a", FORMULA), ("add", 1, None, "aten::add"),
        ("gemm", 2, "a", FORMULA), ("add", 2, None, "aten::add"),
    ]  # fmt: skip
    ops = pl.read_parquet(tmp_path / "out" / "analysis" / "ops.parquet")
    assert_frame_equal(ops, account(linked.trace, 0).ops.with_columns(TEXT.cast(pl.String)))


def test_csv_is_no_formula_and_has_units_in_its_names(tmp_path):
    write_tables(select(trace().linked()), 0, [FINDING], tmp_path / "out", "csv")

    for path in (tmp_path / "out").rglob("*.csv"):
        rows = rows_of(path)
        assert rows
        for row in rows:
            for cell in row.values():
                assert not cell.startswith(("=", "+", "@")) and (cell[:1] != "-" or float(cell) < 0), (path, cell)
    host = rows_of(tmp_path / "out" / "trace" / "host.csv")
    row = next(row for row in host if "HYPERLINK" in row["name"])
    assert row["name"].startswith("'=") and (row["start_ns"], row["duration_ns"]) == ("102000", "20000")
    assert row["shapes"] == "[[2, 3]]"
    findings = rows_of(tmp_path / "out" / "analysis" / "findings.csv")
    assert findings[0]["sentence"] == "'@SUM(1)"
    assert float(findings[0]["saving_ns"]) == 3.5


def test_a_step_and_a_module_are_tables_of_their_own(tmp_path):
    write_tables(select(trace().linked(), 2, "a"), 0, [], tmp_path / "out", "parquet")

    host = pl.read_parquet(tmp_path / "out" / "trace" / "host.parquet")
    assert host["name"].to_list() == ["ProfilerStep#2", "stepscope.module/a", FORMULA, "cudaLaunchKernel"]
    assert host["parent"].to_list() == [None, 0, 1, 2]  # rows of this table, not of the whole
    steps = pl.read_parquet(tmp_path / "out" / "analysis" / "steps.parquet")
    assert steps.select("step", "duration_ns", "num_kernels").rows() == [(2, 90_000, 1)]


def test_a_second_export_leaves_nothing_of_the_first(tmp_path):
    linked = trace().linked()
    write_tables(select(linked), 0, [FINDING], tmp_path / "out", "csv")
    write_tables(select(linked, 1), 0, [], tmp_path / "out", "csv")

    assert "analysis/findings.csv" not in tables(tmp_path / "out")

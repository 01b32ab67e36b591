"""CSV: raw figures, every row whole, no cell that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile_names import NAMES
from stepscope.analysis.comparison.sweeps import sweep_of
from stepscope.document.model import Table
from stepscope.document.sweep_table import records_table
from stepscope.render.csv import csv_of, csv_text

RUNS = re.compile(r"""[\s"'`]*[=+\-@＝＋－＠]""")


def read(text):
    return list(csv.reader(io.StringIO(text, newline="")))


def is_harmless(cell):
    return RUNS.match(cell) is None or cell.startswith("'")


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_a_formula_and_every_row_is_whole(name):
    rows = read(csv_text({"total_ns": [1, -2], name: [name, name]}))

    assert [len(row) for row in rows] == [2, 2, 2]
    assert all(is_harmless(cell) for cell in (rows[0][1], rows[1][1], rows[2][1]))
    assert all(is_harmless(part) for part in rows[1][1].split(";"))
    assert all(sign.isprintable() for sign in rows[1][1])


def test_a_guard_that_is_not_there_would_be_seen():
    assert not is_harmless("=1+1") and not is_harmless(' "@x') and not is_harmless("＝1")


def test_figures_are_as_they_were():
    text = csv_of(
        Table("t", "T", {"a_ns": [-5, 1.5, None], "b": ["-5", "1e-3", "+2.5E+7"], "ok": [True, False, None]})
    )

    assert text == "a_ns,b,ok\n-5,-5,True\n1.5,1e-3,False\n,+2.5E+7,\n"


def test_what_is_no_number_is_an_empty_cell_and_a_row_of_nothing_is_a_row():
    assert csv_text({"a": [float("nan"), float("inf"), None]}) == 'a\n""\n""\n""\n'
    assert csv_text({}) == "\n"


@given(st.lists(st.text(max_size=30), min_size=1, max_size=5))
def test_any_text_comes_back_as_one_harmless_cell(texts):
    rows = read(csv_text({"name": texts, "end": [0] * len(texts)}))

    assert len(rows) == len(texts) + 1 and all(len(row) == 2 for row in rows)
    numbers = [re.fullmatch(r"[+-]?[\d.]+([eE][+-]?\d+)?", row[0], re.ASCII) for row in rows]
    assert all(number or is_harmless(row[0]) for row, number in zip(rows, numbers))


def test_the_csv_of_a_sweep_has_the_guard_too():
    row = {"hash": "h", "workload": "=w", "status": "crashed", "reason": "=cmd|'/C calc'!A0", "config": {"@k": "-x"},
           "run": {}}  # fmt: skip
    (head, cells) = read(csv_of(records_table(sweep_of([row], {}))))

    assert all(map(is_harmless, [*head, *cells])) and "'=w" in cells and "'@k" in head


def test_a_knob_that_is_called_like_a_figure_keeps_its_column():
    row = {"hash": "h", "workload": "w", "status": "ok", "config": {"loss": "full"}, "run": {}, "loss": 2.5}
    (record,) = csv.DictReader(io.StringIO(csv_of(records_table(sweep_of([row], {})))))

    assert record["knob_loss"] == "full" and record["loss"] == "2.5"

"""JSON: plain values, all rows, nothing that a reader would refuse."""

from __future__ import annotations

import json
from pathlib import Path

from hostile_names import NAMES, report
from stepscope.document.model import Axis, Document, Explorer, Figure, Section, Table, Timeline
from stepscope.render.write import plain_of, write_report

DOCUMENTED = Path(__file__).parents[2] / "docs" / "report.md"


def explorer() -> Explorer:
    return Explorer(
        id="explorer", title="T", axes=(Axis("seq_len", (128, 256), True, False),), places=((0, 1),),
        figures={"time_ns": [1.0, None]}, shown=(Figure("time_ns", False),), statuses=("ok", "oom"),
        reasons=("", "why"), names=("a", "b"), marks=("best", ""), is_noisy=(False, False), x=0, series=None,
    )  # fmt: skip


def test_every_name_comes_back_as_it_was(tmp_path):
    write_report(report(), tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_bytes())

    table = next(part for part in found["sections"][0]["parts"] if part["kind"] == "table")
    names = table["columns"][NAMES[0]]
    assert names == [name.replace("\ud800", "\ufffd") for name in NAMES]
    written = (tmp_path / "report.json").read_text(encoding="ascii")
    assert all(sign.isprintable() or sign == "\n" for sign in written)


def test_what_is_no_number_is_null():
    table = Table("t", "T", {"a_ns": [float("nan"), float("inf"), 1.5, 2, None, True]})
    plain = plain_of(Document("r", "v", (Section("s", "S", (table,)),), {"x": float("-inf")}))

    assert plain["facts"] == {"x": None}
    assert plain["sections"][0]["parts"][0]["columns"]["a_ns"] == [None, None, 1.5, 2, None, True]
    json.dumps(plain, allow_nan=False)


def test_every_kind_of_part_is_there_and_documented():
    whole = report()
    more = Section("more", "More", (explorer(), Timeline({}, b"")))
    plain = plain_of(Document("r", "v", (*whole.sections, more)))
    kinds = {part["kind"]: part for section in plain["sections"] for part in section["parts"]}

    assert set(kinds) == {
        "facts", "text", "missing", "findings", "table", "bars", "lines", "scatter", "tree", "heat", "explorer",
        "timeline",
    }  # fmt: skip
    text = DOCUMENTED.read_text(encoding="utf-8")
    assert all(f"| `{kind}` |" in text for kind in kinds)
    assert kinds["explorer"]["places"] == [[0, 1]] and kinds["explorer"]["statuses"] == ["ok", "oom"]
    assert kinds["findings"]["diagnosis"]["findings"][0]["id"] == "host_stall"
    assert kinds["table"]["num_rows"] == len(NAMES) and kinds["bars"]["is_chart"]

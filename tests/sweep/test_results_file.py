"""results.jsonl: append-only, healed after a kill, one writer."""

from __future__ import annotations

import json

import pytest

from stepscope.errors import UsageError
from stepscope.sweep.results import Results, heal

ROW = {"hash": "a", "status": "ok", "environment": {"torch": "2"}}


def opened(folder, resume=False):
    return Results(folder, {"command": "stepscope bench x"}, resume, "stepscope bench x --resume")


def test_rows_are_there_when_append_returns(tmp_path):
    with opened(tmp_path) as results:
        results.append(dict(ROW))
        text = (tmp_path / "results.jsonl").read_text()
        facts = json.loads((tmp_path / "sweep.json").read_text())

    row = json.loads(text)
    assert text.endswith("\n") and row["hash"] == "a" and "environment" not in row
    assert facts["environments"] == {row["environment_hash"]: {"torch": "2"}}
    assert facts["commands"] == ["stepscope bench x"] and facts["schema_version"] == 1


@pytest.mark.parametrize("length", range(1, 60, 7))
def test_a_half_written_last_line_is_cut_off(tmp_path, length):
    with opened(tmp_path) as results:
        results.append({"hash": "a"})
        results.append({"hash": "b", "samples": list(range(20))})
    path = tmp_path / "results.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-length])

    with opened(tmp_path, resume=True) as results:
        assert results.hashes == {"a"}
        results.append({"hash": "c"})

    assert [row["hash"] for row in heal(path)] == ["a", "c"]


def test_a_damaged_line_in_the_middle_is_not_passed_over(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"hash": "a"}\n{"ha\n{"hash": "b"}\n')
    with pytest.raises(UsageError, match="line 2"):
        opened(tmp_path, resume=True)


def test_a_folder_with_rows_is_refused_with_the_command_to_type(tmp_path):
    with opened(tmp_path) as results:
        results.append(dict(ROW))
    with pytest.raises(UsageError, match="holds 1 rows: go on with  stepscope bench x --resume"):
        opened(tmp_path)
    with opened(tmp_path, resume=True) as results:  # the refused one has left no lock
        assert results.hashes == {"a"}


def test_two_sweeps_in_one_folder_are_refused(tmp_path):
    with opened(tmp_path):
        with pytest.raises(UsageError, match="another sweep is writing"):
            opened(tmp_path, resume=True)


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        opened(tmp_path / "file" / "below")

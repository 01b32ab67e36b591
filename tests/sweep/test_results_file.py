"""results.jsonl: append-only, healed after a kill, one writer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stepscope.errors import RecordingError, UsageError
from stepscope.sweep.results import Results, heal
from stepscope.trace.sweep_file import read_sweep


def row_of(name, **more):
    return {"hash": name, "workload": "x", "status": "ok", "config": {}, "run": {}, **more}


ROW = row_of("a", environment={"torch": "2"})


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
        results.append(row_of("a"))
        results.append(row_of("b", samples=list(range(20))))
    path = tmp_path / "results.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-length])

    with opened(tmp_path, resume=True) as results:
        assert results.hashes == {"a"}
        results.append(row_of("c"))

    assert [row["hash"] for row in heal(path)] == ["a", "c"]


OF_WORDS = json.dumps(row_of("b", samples_host_ns="x"))
OF_NO_VERSION = json.dumps(row_of("b", schema_version="2"))


@pytest.mark.parametrize(
    "damaged", ['{"ha', "[]", '{"hash": "b"}', '{"hash": 1, "status": "ok"}', OF_WORDS, OF_NO_VERSION]
)
def test_a_damaged_line_in_the_middle_is_not_passed_over(tmp_path, damaged):
    with opened(tmp_path):
        pass
    (tmp_path / "results.jsonl").write_text(f"{json.dumps(ROW)}\n{damaged}\n{json.dumps(ROW)}\n")
    with pytest.raises(UsageError, match=r"line 2"):
        opened(tmp_path, resume=True)


@pytest.mark.parametrize("name", ["results.jsonl", "sweep.json"])
def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path, name):
    with opened(tmp_path) as results:
        results.append(dict(ROW))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)

    with pytest.raises(UsageError, match="is a pipe or a device"):
        opened(tmp_path, resume=True)
    if name == "results.jsonl":
        with pytest.raises(RecordingError, match="is a pipe or a device"):
            read_sweep(tmp_path / name)


@pytest.mark.parametrize("name", ["results.jsonl", ".lock"])
def test_a_link_in_the_folder_leads_nowhere(tmp_path, name):
    with opened(tmp_path / "sweep"):
        pass
    (tmp_path / "sweep" / name).unlink()
    (tmp_path / "mine").touch()
    (tmp_path / "sweep" / name).symlink_to(tmp_path / "mine")

    with pytest.raises((RecordingError, UsageError), match="Cannot write"):
        opened(tmp_path / "sweep", resume=True)
    assert (tmp_path / "mine").read_bytes() == b""


def test_a_point_that_was_killed_from_outside_is_tried_again_but_not_forever(tmp_path):
    """GIVEN a killed point and a crashed one THEN only the former has no final row, until its third try."""
    killed = row_of("a", killed=True)
    with opened(tmp_path) as results:
        results.append(dict(killed))
        results.append(row_of("b", status="crashed", signal="SIGSEGV"))
        assert results.hashes == {"a", "b"}  # this sweep does not try again by itself
    for attempt in (2, 3):
        with opened(tmp_path, resume=True) as results:
            assert results.hashes == {"b"}
            results.append(dict(killed))
            assert results.hashes == {"a", "b"}
        rows = heal(tmp_path / "results.jsonl")
        assert [row["hash"] for row in rows] == ["a", "b"] and rows[0]["attempts"] == attempt

    with opened(tmp_path, resume=True) as results:
        assert results.hashes == {"a", "b"}


def test_a_second_try_that_succeeds_is_the_row(tmp_path):
    with opened(tmp_path) as results:
        results.append(row_of("a", status="crashed", killed=True))
    with opened(tmp_path, resume=True) as results:
        results.append(row_of("a"))
        results.append(row_of("b"))  # and appending goes on in the new file

    assert [(row["hash"], row["status"]) for row in heal(tmp_path / "results.jsonl")] == [("a", "ok"), ("b", "ok")]
    with opened(tmp_path, resume=True) as results:
        assert results.hashes == {"a", "b"}


def test_rows_of_a_newer_stepscope_are_left_to_it(tmp_path):
    with opened(tmp_path) as results:
        results.append(row_of("a", schema_version=99))
    with pytest.raises(UsageError, match="line 1 was written by a newer"):
        opened(tmp_path, resume=True)


def test_a_folder_with_rows_is_refused_with_the_command_to_type(tmp_path):
    with opened(tmp_path) as results:
        results.append(dict(ROW))
    with pytest.raises(UsageError, match=r"1 row.*stepscope bench x --resume"):
        opened(tmp_path)
    with opened(tmp_path, resume=True) as results:  # the refused one has left no lock
        assert results.hashes == {"a"}


def test_two_sweeps_in_one_folder_are_refused(tmp_path):
    with opened(tmp_path):
        with pytest.raises(UsageError, match="Another sweep is writing"):
            opened(tmp_path, resume=True)


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Cannot write"):
        opened(tmp_path / "file" / "below")


FOREIGN = {
    "results.jsonl": '{"a": 1}\n{"unfinished',
    "results.csv": "mine",
    "results.md": "mine",
    "notes.txt": "mine",
}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_of_somebody_else_is_refused_and_left_as_it_was(tmp_path, name, resume):
    (tmp_path / name).write_text(FOREIGN[name])

    with pytest.raises(UsageError, match="is not empty"):
        opened(tmp_path, resume)

    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == {name: FOREIGN[name]}


@pytest.mark.parametrize("text", ['{"sweep": "of mine"}', "[]", "no JSON"])
def test_a_sweep_json_of_somebody_else_is_refused_and_left_as_it_was(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)

    with pytest.raises(UsageError, match=r"sweep\.json"):
        opened(tmp_path, resume=True)

    assert [entry.name for entry in tmp_path.iterdir()] == ["sweep.json"]
    assert (tmp_path / "sweep.json").read_text() == text


def test_a_half_written_first_row_is_cut_off_by_resume_alone(tmp_path):
    with opened(tmp_path):
        (tmp_path / "results.jsonl").write_text('{"hash": "a"')

    with pytest.raises(UsageError, match="1 row"):
        opened(tmp_path)
    assert (tmp_path / "results.jsonl").read_text() == '{"hash": "a"'
    with opened(tmp_path, resume=True) as results:
        assert results.rows == []


def test_a_sweep_killed_in_its_first_moment_has_left_nothing_to_refuse(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / ".lock").touch()

    with opened(tmp_path) as results:
        assert results.rows == []


def test_a_row_is_written_to_its_last_byte(tmp_path, monkeypatch):
    write = os.write
    with opened(tmp_path) as results:
        monkeypatch.setattr(os, "write", lambda descriptor, text: write(descriptor, text[:7]))
        results.append(dict(ROW))

    assert [row["hash"] for row in heal(tmp_path / "results.jsonl")] == ["a"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_full_disk_is_one_line_with_the_command_that_goes_on(tmp_path):
    with opened(tmp_path) as results:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, results._descriptor)
        os.close(full)
        with pytest.raises(RecordingError) as caught:
            results.append(row_of("a"))

    text = str(caught.value)
    assert str(tmp_path) in text and "No space left" in text and text.endswith("stepscope bench x --resume")

"""The recording's folder: what is refused, what is replaced, and writes that are whole or not there."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import stepscope
from stepscope.recorder import files
from stepscope.recorder.files import LineFile, prepare_folder, write_json, write_json_gz
from stepscope.recorder.run_facts import now
from stepscope.recorder.wall import identity
from stepscope.recorder.windows import Windows


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def recorded(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "recording.json").write_text('{"schema_version": 1, "status": "finished"}')
    (folder / "samples.jsonl").write_text("old")
    (folder / "trace").mkdir()
    (folder / "trace" / "rank0.json.gz").write_text("old")
    return folder


@pytest.mark.parametrize("force", [False, True])
def test_a_new_folder_is_made_with_its_parents_and_left_empty(tmp_path, force):
    prepare_folder(tmp_path / "a" / "b", force)

    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("force", [False, True])
def test_an_empty_folder_is_used(tmp_path, force):
    prepare_folder(tmp_path, force)

    assert list(tmp_path.iterdir()) == []


def test_a_recording_is_only_replaced_with_force(tmp_path):
    folder = recorded(tmp_path / "run")
    before = content(folder)

    with pytest.raises(ValueError, match=r"already holds a recording: add --force \(in Python, force=True\)"):
        prepare_folder(folder, force=False)
    assert content(folder) == before

    prepare_folder(folder, force=True)
    assert list(folder.iterdir()) == []


def test_a_recording_without_a_step_gives_way(tmp_path):
    folder = recorded(tmp_path / "run")
    (folder / "trace" / "rank0.json.gz").unlink()
    (folder / "samples.jsonl").write_text("")
    (folder / "rank1").mkdir(exist_ok=True)
    (folder / "rank1" / "samples.jsonl").write_text("{}\n")

    with pytest.raises(ValueError, match="already holds a recording"):
        prepare_folder(folder, force=False)
    (folder / "rank1" / "samples.jsonl").write_text("")
    prepare_folder(folder, force=False)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_somebody_elses_is_refused_and_untouched(tmp_path, force):
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "key").write_text("secret")
    before = content(tmp_path)

    with pytest.raises(ValueError, match="is not empty and holds no recording"):
        prepare_folder(tmp_path, force)
    assert content(tmp_path) == before


def test_a_recording_json_of_somebody_elses_does_not_make_their_folder_ours(tmp_path):
    """GIVEN a folder of another program that calls its file the same WHEN forced THEN nothing of it is lost."""
    (tmp_path / "recording.json").write_text('{"artist": "somebody", "tracks": []}')
    (tmp_path / "take1.wav").write_text("music")
    before = content(tmp_path)

    with pytest.raises(ValueError, match="holds no recording"):
        prepare_folder(tmp_path, force=True)
    assert content(tmp_path) == before


def test_the_first_rank_leaves_the_other_ranks_folders_alone(tmp_path):
    folder = recorded(tmp_path / "run")
    recorded(folder / "rank1")
    prepare_folder(folder, force=True, keep_ranks=True)

    assert [entry.name for entry in folder.iterdir()] == ["rank1"]
    assert (folder / "rank1" / "samples.jsonl").read_text() == "old"
    prepare_folder(folder, force=False, keep_ranks=True)  # and they do not make it a folder of somebody else's


def test_force_never_follows_a_link_out_of_the_recording(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    folder = recorded(tmp_path / "run")
    (folder / "rank1").symlink_to(outside)
    (folder / "compile.json").symlink_to(outside / "precious")
    (folder / "trace" / "deeper").symlink_to(outside)
    (folder / "counters.jsonl").symlink_to(tmp_path / "nowhere")

    prepare_folder(folder, force=True)

    assert list(folder.iterdir()) == []
    assert content(outside) == {"precious": "mine"}


def test_force_leaves_what_is_not_the_recordings(tmp_path):
    folder = recorded(tmp_path / "run")
    (folder / "notes.md").write_text("mine")
    prepare_folder(folder, force=True)

    assert content(folder) == {"notes.md": "mine"}


@pytest.mark.parametrize("where", ["file", "file/below", "file/far/below"])
def test_a_path_that_cannot_be_a_folder_is_one_clear_line(tmp_path, where):
    (tmp_path / "file").write_text("a file")

    with pytest.raises(ValueError, match=r"cannot write to .*; name another folder") as caught:
        prepare_folder(tmp_path / where, force=True)
    assert "\n" not in str(caught.value) and "`-o" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "a file"
    with pytest.raises(ValueError, match="-o FOLDER"):
        prepare_folder(tmp_path / where, force=True, option=": `-o FOLDER`")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_one_clear_line(tmp_path):
    (tmp_path / "run").mkdir(mode=0o555)

    with pytest.raises(ValueError, match="Permission denied"):
        prepare_folder(tmp_path / "run", force=False)


def test_json_is_written_whole_and_leaves_nothing_beside_it(tmp_path):
    write_json(tmp_path / "x.json", {"a": [1, None, True], "path": Path("p")})
    write_json_gz(tmp_path / "x.json.gz", {"b": 2})

    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [1, None, True], "path": "p"}
    assert json.loads(gzip.decompress((tmp_path / "x.json.gz").read_bytes())) == {"b": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.json", "x.json.gz"]


@pytest.mark.parametrize("write", [write_json, write_json_gz])
def test_a_kill_before_the_rename_leaves_the_old_file(tmp_path, monkeypatch, write):
    path = tmp_path / "x"
    path.write_text("old")

    def killed(_self: Path, _target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write(path, {"new": 1})

    assert path.read_text() == "old"


def test_a_value_that_is_not_json_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"old": 1})

    with pytest.raises(ValueError):
        write_json(path, {"loss": float("nan")})

    assert json.loads(path.read_text()) == {"old": 1}


def test_each_line_is_on_disk_when_append_returns(tmp_path):
    path = tmp_path / "lines"
    lines = LineFile(path)
    seen = []
    for number in range(3):
        lines.append(f'{{"n": {number}}}')
        seen.append(path.read_text().count("\n"))
    lines.close()
    lines.close()  # twice does no harm

    assert seen == [1, 2, 3]
    assert path.read_text() == '{"n": 0}\n{"n": 1}\n{"n": 2}\n'


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_folder_that_is_being_recorded_is_not_replaced(tmp_path, is_ended):
    """GIVEN a recording of a process that still runs, or of one whose number another process has now."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started_at = "2000-01-01T00:00:00Z" if is_ended else now()
        facts = {"schema_version": 1, "status": "interrupted", "pid": process.pid, "started_at": started_at}
        write_json(tmp_path / files.RECORDING_FILE, facts)
        with nullcontext() if is_ended else pytest.raises(ValueError, match=f"by process {process.pid}: wait"):
            prepare_folder(tmp_path, force=True)
        assert (tmp_path / files.RECORDING_FILE).exists() != is_ended
        process.communicate(b"")
    write_json(tmp_path / files.RECORDING_FILE, facts)
    prepare_folder(tmp_path, force=True)


def test_lines_past_the_limit_are_counted_and_go_to_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_SAMPLE_LINES", 2)
    lines = files.SampleFile(tmp_path / "lines")
    for _ in range(5):
        lines.append("{}")
    lines.close()
    assert (tmp_path / "recent.jsonl").read_text() == "{}\n{}\n{}\n"

    assert (tmp_path / "lines").read_text() == "{}\n{}\n"
    assert (lines.num_lines, lines.num_dropped) == (2, 3)


def test_lines_are_utf_8_whatever_the_locale(tmp_path):
    lines = LineFile(tmp_path / "lines")
    lines.append('{"name": "Schrödinger"}')
    lines.close()

    assert (tmp_path / "lines").read_bytes() == '{"name": "Schrödinger"}\n'.encode()


def test_a_descriptor_that_the_script_reuses_is_the_scripts(tmp_path):
    """GIVEN a script that closes every descriptor and gets ours for a file of its own WHEN lines are appended."""
    lines = LineFile(tmp_path / "lines")
    lines.append("1")
    theirs = os.open(tmp_path / "theirs", os.O_CREAT | os.O_WRONLY)
    os.dup2(theirs, lines._file._descriptor)  # closes ours
    lines.append("2")
    os.dup2(theirs, lines._file._descriptor)
    lines.close()

    assert (tmp_path / "theirs").read_bytes() == b""
    assert (tmp_path / "lines").read_text() == "1\n2\n"
    os.write(theirs, b"still open")
    os.close(theirs)


def test_lines_do_not_follow_a_folder_that_was_replaced(tmp_path):
    lines = LineFile(tmp_path / "lines")
    os.close(lines._file._descriptor)
    (tmp_path / "lines").replace(tmp_path / "old")
    (tmp_path / "lines").write_text("of another run")
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            lines.append("1")
    lines.close()

    assert (tmp_path / "lines").read_text() == "of another run"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_never_ends_the_training(tmp_path):
    """GIVEN a disk that fills up during the run WHEN steps end THEN the loop goes on as if nobody looked."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_steps = 0
    with stepscope.record(tmp_path / "run", model=model, windows=Windows(warmup=1, clean=2, trace=0)) as rec:
        full = os.open("/dev/full", os.O_WRONLY)
        file = rec._session._samples._file._file
        os.dup2(full, file._descriptor)
        file._identity = identity(full)
        os.close(full)
        for _ in range(5):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            num_steps += 1

    assert num_steps == 5

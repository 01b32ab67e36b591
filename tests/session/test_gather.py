"""Folders of several hosts become one recording: repeated, with newer copies, in any order, and of one job only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from handmade import MS, cpu_facts, sample, write_recording
from stepscope.cli.support import output
from stepscope.document.card import Card
from stepscope.document.sections.ranks import parts
from stepscope.errors import StepscopeError, UsageError
from stepscope.recorder.files import default_folder
from stepscope.recorder.processes.child import session_of
from stepscope.recorder.processes.options import Options
from stepscope.recorder.windows import Windows
from stepscope.session import open_session
from stepscope.session.gather import gather
from stepscope.session.job_clocks import clocks_of
from verbs import run_verb

SHIFT_NS, DAY_S = 7_300_000_000, 2.5
LATE = {"data": 4 * MS, "forward": 3 * MS, "backward": 2 * MS, "optimizer": MS}


def record(folder: Path, rank: int, num_steps: int = 40, world_size: int = 4, **facts: Any) -> Path:
    """A rank's recording; ranks 2 and 3 are on another host with other clocks, and rank 3 is late."""
    is_far = rank > 1
    lines = [sample(step, **({"host_ns": LATE} if rank == 3 else {})) for step in range(num_steps)]
    for line in lines:
        line["start_ns"] += 10**9 + is_far * SHIFT_NS
    own = cpu_facts() | {"pid": 100 + rank, "started_at": "2026-01-01T00:00:00Z", "config_hash": "a", **facts}
    own["environment"] = {**(own.get("environment") or {}), "rank": rank, "world_size": world_size}
    write_recording(folder, own, lines)
    began = {"began": 1.79e9 + is_far * DAY_S, "start_ns": is_far * SHIFT_NS, "pid": 100 + rank}
    (folder / "history.jsonl").write_text(json.dumps(began | {"host": f"node{rank // 2}"}) + "\n")
    return folder


@pytest.fixture
def hosts(tmp_path) -> list[Path]:
    record(tmp_path / "a", 0)
    record(tmp_path / "a" / "rank1", 1)
    record(tmp_path / "b" / "rank2", 2)
    record(tmp_path / "b" / "rank3", 3)
    return [tmp_path / "a", tmp_path / "b"]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_ranks_are_in_one_folder_and_a_repetition_changes_nothing(hosts, tmp_path):
    record(hosts[1] / "rank3" / "window1", 3)  # a trace that was triggered
    found = gather(hosts, tmp_path / "job")
    before = content(tmp_path / "job")

    assert (found.ranks, found.missing, found.copied) == ((0, 1, 2, 3), (), (0, 1, 2, 3))
    assert found.hosts == ("node0", "node1") and len(before) == 15 and "rank3/window1/samples.jsonl" in before
    assert gather(hosts, tmp_path / "job").copied == () and content(tmp_path / "job") == before
    assert sorted(open_session(tmp_path / "job").rank_recordings) == [1, 2, 3]
    assert content(hosts[0])["rank1/samples.jsonl"] == before["rank1/samples.jsonl"], "the sources stay"


def test_a_newer_copy_replaces_an_older_one_and_never_the_other_way(hosts, tmp_path):
    gather(hosts, tmp_path / "job")
    record(hosts[1] / "rank2", 2, num_steps=50)
    record(hosts[0] / "rank1", 1, num_steps=30)

    assert gather(hosts, tmp_path / "job").copied == (2,)
    lines = [len((tmp_path / "job" / f"rank{r}" / "samples.jsonl").read_text().splitlines()) for r in (1, 2)]
    assert lines == [40, 50]


def test_one_of_the_folders_may_be_the_target_whichever_has_the_first_rank(hosts, tmp_path):
    assert gather([hosts[1]], tmp_path / "job").missing == (0, 1)
    assert json.loads((tmp_path / "job" / "recording.json").read_text())["environment"]["rank"] == 2
    assert gather([hosts[0]], tmp_path / "job").copied == (0, 1)
    ranks = [tmp_path / "job", *(tmp_path / "job" / f"rank{rank}" for rank in (1, 2, 3))]
    assert [json.loads((each / "recording.json").read_text())["pid"] for each in ranks] == [100, 101, 102, 103]
    assert gather([hosts[1], hosts[0]], hosts[0]).copied == (2, 3)


@pytest.mark.parametrize("fact", [{"job": "SLURM_JOB_ID=2"}, {"config_hash": "b"}])
def test_folders_of_different_jobs_are_refused(fact, hosts, tmp_path):
    record(hosts[0], 0, **({"job": "SLURM_JOB_ID=1"} if "job" in fact else {}))
    record(hosts[1] / "rank2", 2, **fact)
    with pytest.raises(UsageError, match="different"):
        gather(hosts, tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_what_is_no_job_of_ours_is_refused_in_a_sentence(hosts, tmp_path):
    record(tmp_path / "c" / "rank2", 2, pid=7)
    with pytest.raises(UsageError, match="different recordings of rank 2"):
        gather([*hosts, tmp_path / "c"], tmp_path / "job")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="not empty and holds no recording"):
        gather(hosts, tmp_path / "mine")
    with pytest.raises(UsageError, match="holds no recording"):
        gather([tmp_path / "nothing"], tmp_path / "job")


def test_links_are_not_followed_and_a_full_disk_leaves_nothing_half(hosts, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("x")
    (hosts[1] / "rank2" / "link.json").symlink_to(tmp_path / "secret")
    (hosts[1] / "rank9").symlink_to(hosts[0])
    gather(hosts, tmp_path / "job")
    assert not any("link" in name or "rank9" in name for name in content(tmp_path / "job"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copytree", full)
    with pytest.raises(StepscopeError, match="No space left"):
        gather(hosts, tmp_path / "other")
    assert content(tmp_path / "other") == {}


def test_shifted_clocks_are_found_and_who_is_late_in_which_phase(hosts, tmp_path):
    gather(hosts, tmp_path / "job")
    session = open_session(tmp_path / "job")
    found = clocks_of(session)
    rows = {row["rank"]: row for row in found.clocks.iter_rows(named=True)}

    assert [rows[rank]["offset_ns"] for rank in range(4)] == [0, 0, SHIFT_NS, SHIFT_NS]
    assert all(abs(rows[rank]["skew_ns"] - DAY_S * 1e9) <= rows[rank]["skew_uncertainty_ns"] for rank in (2, 3))
    (late,) = found.late
    assert (late.rank, late.host, late.num_last, late.phase, late.excess_ns) == (3, "node1", 40, "data", 3 * MS)
    assert late.where == "host" and late.caused_wait_ns == 3 * 40 * 3 * MS
    made = {getattr(part, "id", ""): part for part in parts(session)}
    assert made["late_ranks"].columns["rank"] == [3] and made["rank_clocks"].columns["host"][2] == "node1"


def test_all_hosts_of_a_job_give_its_folder_the_same_name(monkeypatch):
    for name in ("RANK", "SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "STEPSCOPE_JOB"):
        monkeypatch.delenv(name, raising=False)
    assert default_folder("train").name.count("-") == 3, "one process: by time and process"
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert str(os.getppid()) in default_folder("train").name, "nothing is shared but the parent"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "my/job")
    assert default_folder("train") == Path("runs/train-my_job")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    assert default_folder("train") == Path("runs/train-slurm4711.2")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert default_folder("train") == Path("runs/train-slurm4711.2-restart1")


def test_the_steps_of_one_rank_are_in_memory_at_a_time(hosts, tmp_path):
    gather(hosts, tmp_path / "job")
    session = open_session(tmp_path / "job")
    Card.of(session), parts(session)

    assert not [rank for rank, each in session.rank_recordings.items() if "recording" in vars(each)]


def test_only_some_ranks_trace(tmp_path, monkeypatch):
    options = Options(folder=tmp_path, windows=Windows(trace=2, repeat=3), pid=1, trace_ranks=(0, 8))
    assert Options.from_json(options.to_json()) == options
    for rank, num_traced in (("0", 2), ("3", 0), ("8", 2)):
        monkeypatch.setenv("RANK", rank)
        windows = vars(session_of(options, {}, None, None))["_windows"]
        assert (windows.trace, windows.clean) == (num_traced, options.windows.clean)
    done = run_verb("run", "--trace-ranks", "0,x", "train.py")
    assert done.returncode == 2 and "--trace-ranks 0,x: name ranks" in done.stderr


def test_a_very_long_answer_is_written_and_not_kept(capsys, monkeypatch):
    monkeypatch.setattr(output, "_MOST_COPIED", 100)
    for num, num_kept in ((9, 9), (11, 0)):
        with output.copied() as parts:
            output.write(["0123456789"] * num)
        assert len(parts) == num_kept and capsys.readouterr().out == "0123456789" * num


def test_the_verb_says_what_is_missing(hosts, tmp_path):
    done = run_verb("gather", hosts[1], "-o", tmp_path / "job")

    assert "has 2 ranks of 1 host; 2 ranks copied" in done.stderr and "no recording of rank 0, 1" in done.stderr

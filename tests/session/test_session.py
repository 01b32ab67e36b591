"""The one door: every kind of path, paths that are nothing, the latest run, views that are lazy and computed once."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from pathlib import Path

import pytest

from handmade import cpu_recording
from memories import a_step, snapshot, write_memory
from stepscope.errors import RecordingError, TraceError, Unavailable, UsageError
from stepscope.session import Kind, Session, latest_run, open_session
from stepscope.session import session as session_module
from stepscope.trace import find
from trace_builder import TraceBuilder

ROW = {"hash": "a", "workload": "w", "status": "failed", "config": {}, "run": {}}
VIEWS = ("recording", "summary", "case", "analysis", "linked", "attention", "copies", "memory", "sweep", "snapshot")


def trace(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20).write(path)


def ranks(folder: Path) -> Path:
    for rank in (0, 1):
        trace(folder / f"rank{rank}.json")
    return folder


def file(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def every_kind(folder: Path) -> dict[Kind, list[Path]]:
    """Paths of each kind."""
    rows = (json.dumps(ROW) + "\n").encode()
    memory = write_memory(folder / "memory.json.gz", a_step())
    return {
        Kind.RECORDING: [cpu_recording(folder / "run")],
        Kind.TRACE: [trace(folder / "trace.json"), trace(folder / "trace.json.gz")],
        Kind.RANKS: [ranks(folder / "ranks")],
        Kind.SWEEP: [file(folder / "sweep/results.jsonl", rows), folder / "sweep"],
        Kind.STUDY: [file(folder / "study/study.json", b"{}").parent],
        Kind.SNAPSHOT: [file(folder / "snapshot.pickle", pickle.dumps(snapshot()))],
        Kind.MEMORY: [memory, write_memory(folder / "renamed.json", a_step())],
    }


@pytest.fixture
def calls(monkeypatch):
    """The functions that were called, of those named with `calls.of(module, name)`."""

    class Calls(list):
        def of(self, module, name):
            function = getattr(module, name)

            def counted(path, **options):
                self.append((name, path.name))
                return function(path, **options)

            monkeypatch.setattr(module, name, counted)

    return Calls()


@pytest.fixture
def paths(tmp_path):
    return every_kind(tmp_path)


def test_every_path_has_its_kind(paths):
    assert {kind: {open_session(path).kind for path in each} for kind, each in paths.items()} == {
        kind: {kind} for kind in Kind
    }


def test_a_view_works_or_says_what_to_run(paths):
    for path in (path for each in paths.values() for path in each):
        session = open_session(path, use_cache=False)
        for view in VIEWS:
            try:
                assert getattr(session, view) is not None
            except (Unavailable, UsageError) as error:
                assert len(str(error)) > 20 and "\n" not in str(error)


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        (Kind.RECORDING, {"recording", "summary", "case"}),
        (Kind.TRACE, {"case", "analysis", "linked", "attention", "copies"}),
        (Kind.RANKS, {"case", "analysis", "linked", "attention", "copies"}),
        (Kind.SWEEP, {"sweep"}),
        (Kind.STUDY, set()),
        (Kind.SNAPSHOT, {"memory", "snapshot"}),
        (Kind.MEMORY, {"memory"}),
    ],
)
def test_each_kind_has_its_views(paths, kind, has):
    session, found = open_session(paths[kind][0], use_cache=False), set()
    for view in VIEWS:
        try:
            getattr(session, view)
            found.add(view)
        except (Unavailable, UsageError):
            pass

    assert found == has


def test_what_is_nothing_is_a_usage_error_that_names_it(tmp_path):
    (tmp_path / "empty").mkdir()
    file(tmp_path / "other/config.json", b"{}")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")

    for name in ("missing", "empty", "other", "link", "loop", "pipe"):
        with pytest.raises(UsageError, match=name) as caught:
            open_session(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"import torch\n", b"\x1f\x8b garbage", b"\xff\xfe", b"[1, 2"])
def test_garbage_is_refused_by_the_first_view(tmp_path, data):
    session = open_session(file(tmp_path / "garbage.json", data), use_cache=False)

    for view in ("analysis", "memory"):
        with pytest.raises(TraceError, match=r"garbage\.json"):
            getattr(session, view)


def test_what_may_not_be_read_says_so():
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are for one user only
        path = trace(Path(name) / "trace.json")
        path.chmod(0)
        Path(name).chmod(0o755)
        os.seteuid(65534 if user == 0 else user)
        try:
            with pytest.raises(UsageError, match=r"trace\.json cannot be read: Permission denied"):
                open_session(path)
        finally:
            os.seteuid(user)


def test_a_damaged_recording_is_refused_when_it_is_read(tmp_path):
    session = open_session(file(tmp_path / "run/recording.json", b"{").parent)

    assert session.is_recording
    with pytest.raises(RecordingError, match=r"recording\.json"):
        _ = session.recording


def test_a_damaged_memory_window_leaves_the_rest(tmp_path):
    folder = cpu_recording(tmp_path / "run")
    file(folder / "memory.json.gz", b"nothing")
    session = open_session(folder)

    assert session.has_memory_window and session.summary.num_clean == 4
    with pytest.raises(Unavailable, match=r"memory\.json\.gz"):
        _ = session.memory


def test_without_a_path_the_latest_run_is_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="stepscope run"):
        open_session()
    for age, name in enumerate(("new", "old", "oldest")):
        os.utime(cpu_recording(tmp_path / "runs" / name) / "recording.json", (1e9 - age, 1e9 - age))
    cpu_recording(tmp_path / "runs" / "old" / "rank1")  # of a rank, not a run

    assert latest_run() == Path("runs/new")
    assert open_session().path == open_session([]).path == Path("runs/new")


def test_several_traces_are_the_ranks_of_one_run(tmp_path):
    session = open_session([trace(tmp_path / "a/rank0.json"), trace(tmp_path / "b/rank1.json")], use_cache=False)

    assert session.kind is Kind.RANKS and [rank.rank for rank in session.analyze().ranks] == [0, 1]
    assert [rank.rank for rank in session.analyze(rank=1).ranks] == [1]


def test_opening_reads_no_trace_and_a_view_reads_it_once(tmp_path, calls):
    calls.of(find, "open_trace")
    session = open_session(ranks(tmp_path / "ranks"), use_cache=False)

    assert session.kind is Kind.RANKS and len(session.trace_files) == 2 and calls == []
    assert session.analysis is session.analysis and session.case is session.case
    assert session.copies is session.copies and session.linked is session.case.linked
    assert calls == [("open_trace", "rank0.json"), ("open_trace", "rank1.json")]


def test_memory_of_a_folder_reads_one_rank_only(tmp_path, calls):
    calls.of(find, "open_trace")
    session = open_session(ranks(tmp_path / "ranks"), use_cache=False)

    with pytest.raises(Unavailable, match="profile_memory=True"):
        _ = session.memory
    assert calls == [("open_trace", "rank0.json")]


def test_analyze_keeps_no_trace(tmp_path):
    session = open_session(trace(tmp_path / "trace.json"), use_cache=False)

    assert session.analyze().ranks[0].num_events
    assert not {"case", "linked"} & vars(session).keys()


def test_a_recording_is_read_once_and_so_is_its_memory(tmp_path, calls):
    folder = cpu_recording(tmp_path / "run")
    write_memory(folder / "memory.json.gz", a_step())
    calls.of(session_module, "read_recording")
    calls.of(session_module, "read_memory")
    session = open_session(folder)

    assert calls == []
    assert session.memory.account.peak_bytes == session.case.memory.peak_bytes
    assert session.recording is session.case.recording and session.memory is session.memory
    assert sorted(calls) == [("read_memory", "memory.json.gz"), ("read_recording", "run")]


def test_the_memory_of_another_rank(tmp_path):
    folder = cpu_recording(tmp_path / "run")
    write_memory(cpu_recording(folder / "rank1") / "memory.json.gz", a_step())

    assert list(open_session(folder).rank_folders) == [1]
    assert open_session(folder, rank=1).memory.account.peak_bytes
    with pytest.raises(UsageError, match="no rank 2: the ranks are 0, 1"):
        _ = open_session(folder, rank=2).memory


def test_a_session_says_what_it_is():
    assert repr(Session([Path("run")], Kind.RECORDING)) == "<Session recording: run>"

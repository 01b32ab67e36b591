"""Which traces a path means, and what is said when it means none."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from pathlib import Path

import pytest

from stepscope.errors import StepscopeError, Unavailable, UsageError
from stepscope.recorder import files
from stepscope.trace import find
from stepscope.trace.find import TraceFile, find_traces, ranks_of
from stepscope.trace.source import Source

EVENTS = '{"schemaVersion": 1, "traceEvents": [{"ph": "X", "ts": 1, "dur": 1}]}'


def put(path: Path, text: str = EVENTS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def found(*paths: Path) -> list[tuple[str, int | None]]:
    return [(trace.path.name, trace.rank) for trace in find_traces(paths)]


def test_a_file_is_itself_whatever_its_name(tmp_path):
    trace = put(tmp_path / "trace")

    assert find_traces([trace]) == [TraceFile(trace, None)]


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["rank0.json.gz"], [0]),
        (["rank0.json", "rank1.json", "rank10.json"], [0, 1, 10]),
        (["rank_0.json", "rank-1.json", "Rank2.pt.trace.json.gz"], [0, 1, 2]),
        (["job_rank0_trace.json", "job_rank1_trace.json"], [0, 1]),
        (["rank00.json", "rank01.json"], [0, 1]),
        (
            ["worker0_step_12.1694128201545.pt.trace.json.gz", "worker1_step_12.1694128201556.pt.trace.json.gz"],
            [0, 1],
        ),
        # A process id, a step, an index of anything: no ranks.
        (["node7_1234.1694128201545.pt.trace.json"], [None]),
        (["trace_0.json", "trace_1.json"], [None, None]),
        (["step10.json", "step9.json"], [None, None]),
        # Not unambiguous.
        (["rank0.json", "trace.json"], [None, None]),
        (["rank0.json", "worker1.json"], [None, None]),
        (["rank0_step5.json", "rank0_step9.json"], [None, None]),
        (["dp_rank0_tp_rank1.json"], [None]),
        (["frank2.json"], [None]),
        (["rank1234567890.json"], [None]),
        ([], []),
    ],
)
def test_ranks_come_from_names_only_where_these_are_clear(names, ranks):
    assert ranks_of(names) == ranks


def test_a_folder_of_ranks_is_sorted_by_rank(tmp_path):
    for name in ("rank10.json", "rank2.json.gz", "rank0.pt.trace.json.gz"):
        put(tmp_path / name)

    assert found(tmp_path) == [("rank0.pt.trace.json.gz", 0), ("rank2.json.gz", 2), ("rank10.json", 10)]


def test_a_folder_without_ranks_is_sorted_by_name_as_people_count(tmp_path):
    for name in ("step10.json", "step9.json", "a.json"):
        put(tmp_path / name)

    assert found(tmp_path) == [("a.json", None), ("step9.json", None), ("step10.json", None)]


def test_what_lies_beside_traces_is_passed_over(tmp_path):
    put(tmp_path / "rank0.json")
    put(tmp_path / "rank0.json.stepscope" / "trace.json")
    put(tmp_path / "notes.txt")
    put(tmp_path / ".hidden.json")
    put(tmp_path / "memory.json.gz")
    put(tmp_path / "compile.json")
    put(tmp_path / "config.json", '{"lr": 3e-4}')
    put(tmp_path / "packed.json.gz", '{"lr": 3e-4}')
    put(tmp_path / "results.json", '[{"loss": 1}]')
    put(tmp_path / "large.json", json.dumps({"values": ["x" * 100] * 2_000}))
    (tmp_path / "folder.json").mkdir()

    assert found(tmp_path) == [("rank0.json", 0)]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("empty.json", b""),
        ("text.json", b"Killed"),
        ("damaged.json.gz", b"\x1f\x8b\x08" + b"\xff" * 50),
        (
            "cut.json.gz",
            gzip.compress(json.dumps({"x": ["y" * 50] * 10_000, "traceEvents": []}).encode(), mtime=0)[:900],
        ),
        ("late.json", json.dumps({"x": ["y" * 50] * 10_000, "traceEvents": []}).encode()),
        ("list.json", b' \n[{"ph": "X"}]'),
        ("marked.json", b"\xef\xbb\xbf" + EVENTS.encode()),
    ],
)
def test_what_may_be_a_trace_is_left_to_the_reader(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)

    assert found(tmp_path) == [(name, None)]


def test_a_recording_means_its_trace(tmp_path):
    put(tmp_path / "run" / "recording.json", "{}")
    put(tmp_path / "run" / "memory.json.gz")
    put(tmp_path / "run" / "trace" / "rank0.json.gz")

    assert found(tmp_path / "run") == [("rank0.json.gz", 0)]


def test_a_recording_of_several_ranks_means_all_of_their_traces(tmp_path):
    for folder, rank in (("run", 0), ("run/rank1", 1), ("run/rank10", 10)):
        put(tmp_path / folder / "recording.json", "{}")
        put(tmp_path / folder / "trace" / f"rank{rank}.json.gz")
    put(tmp_path / "run" / "ranking" / "trace" / "rank7.json.gz")

    assert found(tmp_path / "run") == [("rank0.json.gz", 0), ("rank1.json.gz", 1), ("rank10.json.gz", 10)]


def test_several_paths_are_one_list_with_each_file_once(tmp_path):
    put(tmp_path / "a" / "rank1.json")
    put(tmp_path / "a" / "rank0.json")
    other = put(tmp_path / "rank2.json")

    assert found(tmp_path / "a", other, tmp_path / "a" / ".." / "a" / "rank0.json") == [
        ("rank0.json", 0),
        ("rank1.json", 1),
        ("rank2.json", 2),
    ]
    assert found() == []


def test_two_runs_have_no_ranks_between_them(tmp_path):
    put(tmp_path / "a" / "rank0.json")
    put(tmp_path / "b" / "rank0.json")

    assert found(tmp_path / "b", tmp_path / "a") == [("rank0.json", None), ("rank0.json", None)]
    assert [trace.path.parent.name for trace in find_traces([tmp_path / "b", tmp_path / "a"])] == ["a", "b"]


def test_a_rank_is_what_the_trace_says_before_its_events(tmp_path):
    """GIVEN names and traces that disagree THEN the traces are believed, and names where a trace says nothing."""
    said = '{"distributedInfo": {"rank": %d}, "traceEvents": [{"ph": "M"}]}'
    put(tmp_path / "rank0.json", said % 1)
    put(tmp_path / "rank1.json.gz", said % 0)
    put(tmp_path / "rank2.json")

    assert found(tmp_path) == [("rank1.json.gz", 0), ("rank0.json", 1), ("rank2.json", 2)]
    assert [file.is_said_by_trace for file in find_traces([tmp_path])] == [True, True, False]


def test_a_rank_costs_the_beginning_of_a_file_and_no_more(tmp_path, monkeypatch):
    num_read = 0
    original = Source.read

    def read(self: Source, num_bytes: int) -> bytes:
        nonlocal num_read
        data = original(self, num_bytes)
        num_read += len(data)
        return data

    monkeypatch.setattr(Source, "read", read)
    events = ",".join(['{"ph": "M"}'] * 100_000)
    put(tmp_path / "rank0.json", '{"distributedInfo": {"rank": 7}, "traceEvents": [' + events + "]}")

    assert found(tmp_path) == [("rank0.json", 7)]
    assert num_read <= 1 << 16


def test_a_link_that_leads_nowhere_is_told_as_what_it_is(tmp_path):
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    with pytest.raises(UsageError, match=r"loop\.json is a link that leads in a circle$"):
        find_traces([tmp_path / "loop.json"])

    (tmp_path / "loop.json").unlink()
    (tmp_path / "rank0.json").symlink_to("gone.json")
    with pytest.raises(UsageError, match=r"rank0\.json is a link to gone\.json, which is not there$"):
        find_traces([tmp_path / "rank0.json"])

    # AND a rank of a folder is not missing in silence
    put(tmp_path / "rank1.json")
    with pytest.raises(UsageError, match=r"which is not there: remove the link, or name the other files$"):
        find_traces([tmp_path])


@pytest.fixture
def nobody(tmp_path):
    """A folder that everybody reaches, and this process as one who is not root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        put(folder / "rank0.json")
        put(folder / "rank1.json")
        user = os.geteuid()
        yield folder, lambda: os.seteuid(65534) if user == 0 else None
        os.seteuid(user)
        folder.chmod(0o755)


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_folder_one_may_not_read_is_named_itself(nobody, mode):
    folder, become_nobody = nobody
    folder.chmod(mode)
    become_nobody()

    with pytest.raises(StepscopeError, match="Permission denied") as caught:
        find_traces([folder])
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_one_may_not_read_is_left_to_the_reader(nobody):
    folder, become_nobody = nobody
    (folder / "rank1.json").chmod(0)
    become_nobody()

    assert found(folder) == [("rank0.json", 0), ("rank1.json", 1)]


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere.* does not exist"):
        find_traces([tmp_path / "nowhere"])


def test_an_empty_folder(tmp_path):
    with pytest.raises(UsageError, match="is empty"):
        find_traces([tmp_path])


def test_a_folder_without_traces_names_what_was_looked_for(tmp_path):
    put(tmp_path / "config.json", "{}")

    with pytest.raises(UsageError, match=r"holds no trace: \*\.json and \*\.json\.gz"):
        find_traces([tmp_path])


def test_a_recording_without_a_trace_says_how_to_make_one(tmp_path):
    put(tmp_path / "recording.json", "{}")
    (tmp_path / "trace").mkdir()

    with pytest.raises(Unavailable, match=r"without a trace.*stepscope run --trace 2") as caught:
        find_traces([tmp_path])
    assert "\n" not in str(caught.value)


def test_names_are_those_the_record_side_writes():
    assert (find.TRACE_FOLDER, find.MEMORY_FILE) == (files.TRACE_FOLDER, files.MEMORY_FILE)
    assert all(name in find.NOT_TRACES for name in files.OWN_NAMES if name.endswith((".json", ".json.gz")))

"""The traces of several ranks: the one asked for is read and no other, and two of one rank are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.errors import TraceError, UsageError
from stepscope.trace import find
from stepscope.trace.cache import open_trace
from stepscope.trace.find import find_traces, open_ranks, refuse_two_of_one_rank

EVENTS = [{"ph": "X", "cat": "cpu_op", "name": "op", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]


def put(path: Path, rank: int | None = None, is_last: bool = False) -> Path:
    fields = {} if rank is None else {"distributedInfo": {"rank": rank}}
    document = {"traceEvents": EVENTS, **fields} if is_last else {**fields, "traceEvents": EVENTS}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The names of the files that were read."""
    names: list[str] = []

    def read(path, **options):
        names.append(path.name)
        return open_trace(path, **options)

    monkeypatch.setattr(find, "open_trace", read)
    return names


def ranks(folder: Path, rank: int | None = None) -> list[tuple[str, int, bool]]:
    traces = open_ranks(find_traces([folder]), rank, use_cache=False)
    return [(trace.path.name, trace.rank, trace.is_known) for trace in traces]


def test_one_rank_is_read_alone(tmp_path, opened):
    for rank in range(4):
        put(tmp_path / f"rank{rank}.json")

    assert ranks(tmp_path, 2) == [("rank2.json", 2, True)]
    assert opened == ["rank2.json"]


def test_the_trace_is_believed_and_not_its_name(tmp_path, opened):
    put(tmp_path / "rank0.json", rank=1)
    put(tmp_path / "rank1.json", rank=0)

    assert ranks(tmp_path, 0) == [("rank1.json", 0, True)]
    assert ranks(tmp_path, 1) == [("rank0.json", 1, True)]
    assert opened == ["rank1.json", "rank0.json"]
    assert [rank for _, rank, _ in ranks(tmp_path)] == [0, 1]


def test_a_rank_that_is_told_after_the_events_is_found_too(tmp_path, opened):
    put(tmp_path / "rank0.json", rank=1, is_last=True)
    put(tmp_path / "rank1.json", rank=0, is_last=True)

    assert ranks(tmp_path, 0) == [("rank1.json", 0, True)]
    assert opened == ["rank0.json", "rank1.json"]


def test_a_rank_that_is_not_there_is_told_without_reading(tmp_path, opened):
    put(tmp_path / "a.json", rank=4)
    put(tmp_path / "b.json", rank=0)

    with pytest.raises(UsageError, match=r"^no rank 3: the ranks are 0, 4$"):
        ranks(tmp_path, 3)
    assert opened == []


def test_a_file_without_a_rank_takes_a_number_that_is_free(tmp_path):
    put(tmp_path / "a.json", rank=1)
    put(tmp_path / "b.json")
    put(tmp_path / "c.json")

    assert sorted(ranks(tmp_path)) == [("a.json", 1, True), ("b.json", 0, False), ("c.json", 2, False)]


@pytest.mark.parametrize(
    "files",
    [
        {"one.json": 3, "two.json": 3},
        {"rank3_step10.json": None, "rank3_step20.json": None},
        {"a/rank3.json": None, "b/rank3.json": None},
        {"rank3.json": None, "x.json": 3},
    ],
)
def test_two_files_of_one_rank_are_told_by_name(tmp_path, files):
    for name, rank in files.items():
        put(tmp_path / name, rank)
    found = find_traces([tmp_path / name for name in files])

    with pytest.raises(UsageError) as caught:
        refuse_two_of_one_rank(found)
    assert "both of rank 3" in str(caught.value) and all(str(tmp_path / name) in str(caught.value) for name in files)

    # AND are nobody's trouble who asks for another rank
    refuse_two_of_one_rank(found, rank=0)


def test_different_ranks_are_no_trouble(tmp_path):
    put(tmp_path / "node0" / "rank0.json", rank=0)
    put(tmp_path / "node1" / "rank0.json", rank=8)
    put(tmp_path / "c.json")

    refuse_two_of_one_rank(find_traces([tmp_path / "node0", tmp_path / "node1", tmp_path / "c.json"]))


def test_a_file_that_cannot_be_read_is_told_with_what_to_do(tmp_path):
    put(tmp_path / "rank0.json")
    (tmp_path / "rank1.json").write_text("")

    with pytest.raises(TraceError) as caught:
        ranks(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'rank1.json'} is empty (byte 0); to go on without it, move it elsewhere or name the other files"
    )
    assert ranks(tmp_path, 0) == [("rank0.json", 0, True)]


def test_progress_goes_from_nothing_to_all(tmp_path):
    for rank in range(3):
        put(tmp_path / f"rank{rank}.json")
    told: list[float] = []

    list(open_ranks(find_traces([tmp_path]), use_cache=False, progress=told.append))
    assert told == sorted(told) and told[-1] == 1.0

    told.clear()
    list(open_ranks(find_traces([tmp_path]), 1, use_cache=False, progress=told.append))
    assert told[-1] == 1.0

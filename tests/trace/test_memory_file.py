"""A memory file is read, or refused in one line that says what is wrong with it."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memories import a_step, tensor, write_memory
from stepscope.analysis.memory.account import account
from stepscope.errors import RecordingError
from stepscope.trace.memory_file import read_memory


def test_what_was_written_is_read(tmp_path):
    assert read_memory(write_memory(tmp_path / "memory.json.gz", a_step())) == a_step()


def test_a_file_that_is_not_compressed_is_read_too(tmp_path):
    path = tmp_path / "memory.json"
    path.write_text(json.dumps(a_step()))

    assert read_memory(path) == a_step()


def test_version_1_is_put_in_order_by_its_times(tmp_path):
    # GIVEN a file of version 1: times, no order, no device
    old = [
        {name: value for name, value in each.items() if name not in ("born", "died", "caller")}
        for each in a_step()["allocations"]
    ]
    path = write_memory(tmp_path / "memory.json.gz", {"num_dropped": 3, "allocations": old})

    # WHEN it is read and accounted for
    memory = read_memory(path)
    found = account(memory)

    # THEN the account is that of version 2, without what the old file did not know
    assert (memory["device"], memory["num_dropped"], memory["schema_version"]) == ("cuda:0", 3, 2)
    assert (found.peak_tracked_bytes, found.peak_bytes) == (3300, 3300)
    assert [stage.name for stage in found.stages] == ["start", "data", "forward", "backward"]


def bad(**fields: Any) -> dict[str, Any]:
    return a_step(**fields)


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ([], "no list of allocations"),
        ({"allocations": {}}, "no list of allocations"),
        (bad(schema_version=3), "pip install --upgrade"),
        (bad(schema_version="2"), "pip install --upgrade"),
        (bad(device=None), "device is not a text"),
        (bad(num_dropped=-1), "num_dropped is not a count"),
        (bad(allocations=[7]), r"allocations\[0\] is not an object"),
        (bad(allocations=[tensor(4), tensor(-4)]), r"allocations\[1\].bytes is not a count"),
        (bad(allocations=[tensor(4) | {"bytes": 1.5}]), "bytes is not a count"),
        (bad(allocations=[tensor(4) | {"bytes": True}]), "bytes is not a count"),
        (bad(allocations=[tensor(4) | {"bytes": 2**63}]), "bytes is not a count"),
        (bad(allocations=[tensor(4, born=3, died=2)]), "was freed before it was allocated"),
        (bad(allocations=[tensor(4) | {"module": ["a"]}]), "module is not a text"),
        (bad(allocations=[tensor(4) | {"shape": "4"}]), "shape is not a list"),
        (bad(allocations=[tensor(4) | {"shape": [-1]}]), r"shape\[0\] is not a count"),
        (bad(stages=[{"name": "forward"}]), r"stages\[0\].event is not a count"),
        (bad(stages=[{"name": 3, "event": 3}]), r"stages\[0\].name is not a text"),
        (bad(saved=[{"bytes": 3}]), "num_tensors is not a count"),
        (bad(left_alive=[{"bytes": 3, "num_tensors": 1, "frame": 5}]), "frame is not a text"),
        (bad(allocator={"peak_allocated_bytes": "many"}), "peak_allocated_bytes is not a count"),
        (bad(allocator=[]), "allocator is not an object"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(memory, words, tmp_path):
    path = write_memory(tmp_path / "memory.json.gz", memory)

    with pytest.raises(RecordingError, match=words) as caught:
        read_memory(path)

    assert "memory.json.gz" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x1f\x8b", gzip.compress(b"{}", mtime=0)[:-9], b"\x1f\x8b\x08" + b"x" * 40, b"not json", b"[" * 100_000],
    ids=["empty", "magic", "cut", "broken", "text", "deep"],
)
def test_damage_is_one_line(data, tmp_path):
    path = tmp_path / "memory.json.gz"
    path.write_bytes(data)

    with pytest.raises(RecordingError):
        read_memory(path)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(RecordingError, match="No such file"):
        read_memory(tmp_path / "memory.json.gz")


def test_a_file_that_expands_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_MAX_FILE_MIB", "1")
    path = tmp_path / "memory.json.gz"
    path.write_bytes(gzip.compress(b" " * (1 << 26)))

    tracemalloc.start()
    with pytest.raises(RecordingError, match="more than"):
        read_memory(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 1 << 23


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**64) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data())
def test_whatever_a_field_holds_it_is_accounted_for_or_refused(data, tmp_path_factory):
    memory = a_step()
    target = data.draw(st.sampled_from([memory, memory["allocations"][2], memory["stages"][1], memory["saved"][0]]))
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(VALUES)
    path = write_memory(tmp_path_factory.getbasetemp() / "any" / "memory.json.gz", memory)

    try:
        found = account(read_memory(path))
    except RecordingError:
        return
    json.dumps(found.to_json(8))

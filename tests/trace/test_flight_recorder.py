"""Dumps are decoded without Python's unpickler: plain values pass, everything else is refused in bounded memory."""

from __future__ import annotations

import json
import pickle
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dump_maker import calls, dump, write
from stepscope.errors import UsageError
from stepscope.trace.dumps.flight_recorder import read_dumps
from stepscope.trace.dumps.plain_pickle import decoded

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_out_as_they_went_in(value):
    assert decoded(pickle.dumps(value, protocol=2)) == value


class Canary:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pickle.dumps(Canary(), 2), "opcode GLOBAL at byte"),
        (pickle.dumps({"a": {1, 2}}, 2), "opcode GLOBAL"),
        (b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R.", "opcode GLOBAL"),
        (b"\x80\x02])R.", "opcode REDUCE"),
        (b"\x80\x02X\x02\0\0\0idQ.", "opcode BINPERSID"),
        (b"\x80\x02\x82\x01.", "opcode EXT1"),
        (b"\x80\x02K\x012.", "opcode DUP"),
        (pickle.dumps([], 4), "protocol 2"),
        (pickle.dumps({(1, 2): 3}, 2), "not a text"),
        (pickle.dumps({2**60: 3}, 2), "not a text"),
        (b"\x80\x02" + b"]" * 100_000 + b".", "more lists and dicts"),
        (b"\x80\x02" + b"(" * 100_000 + b".", "more lists and dicts"),
        (b"\x80\x02X\xff\xff\xff\xff.", "claims 4,294,967,295 bytes"),
        (b"\x80\x02\x8a\xff" + bytes(255) + b".", "number of 255 bytes"),
        (b"\x80\x02h\x05.", "damaged"),
        (b"\x80\x02a.", "damaged"),
        (b"\x80\x02\x86.", "damaged"),
        (b"\x80\x02.", "damaged"),
        (b"\x80\x02}K\x01a.", "damaged"),
        (b"\x80\x02](K\x01u.", "not a text"),
        (b"", "protocol 2"),
    ],
)
def test_everything_else_is_refused(data, said, capsys):
    with pytest.raises(ValueError, match=said):
        decoded(data)
    assert capsys.readouterr().out == ""


@given(st.binary(max_size=60), st.integers(0, 3000), st.integers(0, 255))
def test_on_any_bytes_it_answers_or_refuses(data, place, byte):
    whole = bytearray(pickle.dumps(dump(calls("all_reduce 8 train.py:5")), 2))
    whole[place % len(whole)] = byte
    for content in (b"\x80\x02" + data + b".", bytes(whole)):
        try:
            decoded(content)
        except ValueError:
            pass


def test_one_call_that_is_meant_a_million_times_is_refused(tmp_path):
    folder = write(tmp_path / "dumps", {0: dump(calls("all_reduce") * 100_000)})

    tracemalloc.start()
    with pytest.raises(UsageError, match="100,000 calls, too many for its size"):
        read_dumps(folder)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 1 << 23


@pytest.mark.parametrize(
    "content",
    [
        {"version": "9.0", "entries": []},
        {"entries": []},
        {"version": "2.1", "entries": 3},
        {"version": "2.1", "entries": [3]},
        {"version": "2.1", "entries": [{"collective_seq_id": -1}]},
        {"version": "2.1", "entries": [{"collective_seq_id": 2**70}]},
        {"version": "2.1", "entries": [{"time_created_ns": "soon"}]},
        [1],
    ],
)
def test_what_is_plain_and_no_dump_is_refused(content, tmp_path):
    (tmp_path / "rank_0.json").write_text(json.dumps(content))

    with pytest.raises(UsageError, match=r"rank_0.json could not be read|has no flight-recorder dump"):
        read_dumps(tmp_path)


def test_odd_fields_are_left_out_and_never_followed(tmp_path):
    names = ("frames", "process_group", "profiling_name", "input_sizes", "input_dtypes", "state")
    odd: dict[str, object] = {name: [[]] for name in names}
    groups = {"0": 3, "1": {"ranks": "[0, __import__('os')]"}, "2": {"ranks": "[0, 1]", "desc": 3}}
    write(tmp_path / "dumps", {0: dump([odd], groups, pg_status={"0": {"last_enqueued_collective": "x"}})})
    (found,) = read_dumps(tmp_path / "dumps").ranks.values()

    assert found.calls[0].signature.collective == "" and found.calls[0].stack == ()
    assert found.groups["1"] == ("", ()) and found.groups["2"] == ("", (0, 1)) and found.last_numbers == {}


def test_a_file_larger_than_any_is_refused_unread(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPSCOPE_MAX_DUMP_MIB", "1")
    (tmp_path / "trace_rank_0").write_bytes(b"\x80\x02" + bytes(1 << 21))

    with pytest.raises(UsageError, match="more than 1 MiB: set STEPSCOPE_MAX_DUMP_MIB"):
        read_dumps(tmp_path)


def test_a_pickle_has_stacks_and_is_read_rather_than_json(tmp_path):
    folder = write(tmp_path / "dumps", {0: calls("all_reduce 8 train.py:5")})
    (folder / "rank_0.json").write_text(json.dumps(dump([])))
    dumps = read_dumps(folder)

    assert dumps.ranks[0].calls[0].stack == ("train.py:5 step",)
    assert dumps.problems == ["rank_0.json was not read: nccl_trace_rank_0 is also of rank 0"]

"""A CUDA memory snapshot is read without running it: plain values pass, everything else is refused."""

from __future__ import annotations

import io
import pickle
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memories import BASE, MIB, snapshot
from stepscope.errors import TraceError
from stepscope.trace.snapshot import _PlainUnpickler, plain_values, read_snapshot

NAMES = (
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("builtins", "getattr"),
    ("subprocess", "Popen"),
    ("torch.storage", "_load_from_bytes"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("copyreg", "_reconstructor"),
    ("copyreg", "__newobj__"),
    ("collections", "OrderedDict"),
    ("stepscope.trace.snapshot", "read_snapshot"),
)


class Canary:
    """An object whose unpickling writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def write(path, data: bytes):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_torch_writes_is_read(protocol, tmp_path):
    read = read_snapshot(write(tmp_path / "s.pickle", pickle.dumps(snapshot(), protocol)))

    first, second = read.segments
    assert [block.bytes // MIB for block in first.blocks] == [8, 4, 2, 1, 5]
    assert (first.blocks[0].address, first.blocks[0].requested_bytes) == (BASE, 8 * MIB - 12)
    assert [len(entries) for entries in read.entries] == [13, 0]
    assert read.entries[0][8].free_bytes == 32 * MIB and second.bytes == 2 * MIB


@pytest.mark.parametrize("protocol", [2, 4])
def test_plain_values_come_out_as_they_went_in(protocol):
    assert plain_values(pickle.dumps(snapshot(), protocol)) == snapshot()
    many = {"segments": [], "device_traces": [[{"a": i, "b": 2**40 + i, "c": (i, i)} for i in range(70_000)]]}
    assert plain_values(pickle.dumps(many, protocol)) == many


def test_the_caller_is_the_innermost_frame_of_the_users_own_code(tmp_path):
    read = read_snapshot(write(tmp_path / "s.pickle", pickle.dumps(snapshot())))

    callers = [entry.caller for entry in read.entries[0]]
    assert callers[0] == "model.py:31 forward"  # below C++ and PyTorch
    assert callers[5] == "train.py:10 step" and callers[6] is None
    assert read.segments[0].blocks[2].caller == "linear.py:125 forward"  # nothing else is there


def test_the_segments_alone_are_a_snapshot_too(tmp_path):
    path = write(tmp_path / "s.pickle", pickle.dumps(snapshot()["segments"]))

    assert len(read_snapshot(path).segments) == 2 and read_snapshot(path).entries == []


def test_blocks_of_an_old_pytorch_have_their_history(tmp_path):
    frames = [{"filename": "old.py", "line": 3, "name": "f"}]
    block = {"size": 1024, "state": "active_allocated", "history": [{"real_size": 1000, "frames": frames}]}
    old = {"segments": [{"address": 4096, "total_size": 1024, "blocks": [block]}]}

    (segment,) = read_snapshot(write(tmp_path / "s.pickle", pickle.dumps(old))).segments

    assert segment.blocks == [(4096, 1024, 1000, "active_allocated", "old.py:3 f")]


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_executed(protocol, tmp_path):
    # GIVEN snapshots in which an object writes a file when it is unpickled, as a frame, as a key's value, at the end
    canary = tmp_path / "canary"
    for place in ("frames", "settings", "root"):
        data = snapshot()
        if place == "frames":
            data["segments"][0]["blocks"][0]["frames"] = [Canary(str(canary))]
        elif place == "settings":
            data["allocator_settings"]["x"] = Canary(str(canary))
        else:
            data = Canary(str(canary))

        # WHEN one is read
        with pytest.raises(TraceError, match="not a memory snapshot") as caught:
            read_snapshot(write(tmp_path / "s.pickle", pickle.dumps(data, protocol)))

        # THEN the file is not there, and the complaint is one line
        assert not canary.exists() and "\n" not in str(caught.value)
    with pickle.loads(pickle.dumps(Canary(str(canary)))):
        assert canary.exists()  # it would have been


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_no_name_is_looked_up(module, name, tmp_path):
    argument = text("touch canary") + b"\x85R."
    as_global = b"\x80\x02c" + f"{module}\n{name}\n".encode() + argument
    from_stack = b"\x80\x04" + text(module) + text(name) + b"\x93" + argument
    as_instance = b"\x80\x02(" + text("x") + b"i" + f"{module}\n{name}\n".encode() + b"."
    for data, opcode in ((as_global, "GLOBAL"), (from_stack, "STACK_GLOBAL"), (as_instance, "INST")):
        with pytest.raises(TraceError, match=f"opcode {opcode} at byte"):
            read_snapshot(write(tmp_path / "s.pickle", data))
        # The second wall: the unpickler itself finds nothing either.
        with pytest.raises(ValueError, match=r"refers to .*contains no code"):
            _PlainUnpickler(io.BytesIO(data)).load()


@pytest.mark.parametrize(
    ("data", "opcode"),
    [
        (b"\x80\x02]" + b"\x82\x01.", "EXT1"),
        (b"\x80\x02" + text("id") + b"Q.", "BINPERSID"),
        (b"\x80\x02Pid\n.", "PERSID"),
        (b"\x80\x02}" + b"}b.", "BUILD"),
        (b"\x80\x02])R.", "REDUCE"),
        (b"\x80\x02])\x81.", "NEWOBJ"),
        (b"\x80\x02(]o.", "OBJ"),
        (b"\x80\x04\x8f.", "EMPTY_SET"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
        (b"\x80\x02I1\n.", "INT"),
        (b"\x80\x02K\x01\x85.", "TUPLE1"),
        (b"\x80\x02]K\x01\x86.", "TUPLE2"),
        (b"\x80\x02(K\x01t.", "TUPLE"),
        (b"\x80\x02K\x012.", "DUP"),
    ],
)
def test_no_opcode_beyond_plain_values(data, opcode, tmp_path):
    with pytest.raises(TraceError, match=f"opcode {opcode} at byte"):
        read_snapshot(write(tmp_path / "s.pickle", data))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02]r\xff\xff\xff\x7f.",  # a place in the memo that makes room for two billion others
        b"\x80\x02]r\x00\x00\x00\x01.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x02X\xff\xff\xff\xff.",
        b"\x80\x03B\xff\xff\xff\x7f.",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"].",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
        b"\x80\x02" + b"]" * 2_000_000 + b".",
        b"\x80\x02" + b"(" * 1_000_000 + b".",
        b"\x80\x02" + b"]" * 1_000 + b"a" * 999 + b".",
        b"\x80\x02" + b"]\x94" * 1_000_000 + b"a" * 999_999 + b".",
        b"\x80\x02}" + b")" + b"\x85" * 1_000_000 + b"K\x01s.",  # hashing such a key overflows the C stack
        b"\x80\x02}" + b"]K\x01s.",  # a list as a key
        b"\x80\x02h\x05.",
        b"\x80\x02a.",
        b"\x80\x02.",
        b"\x80\x02N.",
        b"\x80\x06].",
        b"",
        b"\x80",
        b"PK\x03\x04",
        b"{}",
    ],
)
def test_claims_depth_and_damage_are_refused(data, tmp_path):
    with pytest.raises(TraceError, match="not a memory snapshot"):
        read_snapshot(write(tmp_path / "s.pickle", data))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_cut_anywhere_is_refused(protocol, tmp_path):
    whole = pickle.dumps(snapshot(), protocol)
    for end in [*range(0, len(whole), 17), len(whole) - 1]:
        with pytest.raises(TraceError):
            read_snapshot(write(tmp_path / "s.pickle", whole[:end]))


def test_a_list_that_is_meant_many_times_is_bounded(tmp_path):
    blocks = [{"size": 1, "requested_size": 1, "state": "inactive", "frames": []}] * 1000
    bomb = {"segments": [{"address": 1, "total_size": 1000, "blocks": blocks}] * 1000}

    tracemalloc.start()
    with pytest.raises(TraceError, match="entries, too many for its size"):
        read_snapshot(write(tmp_path / "s.pickle", pickle.dumps(bomb)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 1 << 22


def test_a_text_longer_than_any_is_refused(tmp_path):
    with pytest.raises(TraceError, match="2,097,152 bytes"):
        read_snapshot(write(tmp_path / "s.pickle", pickle.dumps(snapshot() | {"text": "x" * (2 << 20)})))


def test_a_file_larger_than_any_is_refused_unread(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPSCOPE_MAX_SNAPSHOT_MIB", "1")

    with pytest.raises(TraceError, match="more than 1 MiB: set STEPSCOPE_MAX_SNAPSHOT_MIB"):
        read_snapshot(write(tmp_path / "s.pickle", bytes(1 << 21)))


@pytest.mark.parametrize(
    "value",
    [
        {"segments": 3},
        {"segments": [3]},
        {"segments": [{}]},
        {"segments": [{"total_size": -1, "blocks": []}]},
        {},
        [1],
        {"segments": [[]]},
        {"segments": [{"total_size": 1, "blocks": [[]]}]},
        {"segments": [], "device_traces": [[[]]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "size": 2**70}]]},
        {"segments": [], "device_traces": [[{"action": [], "size": 1}]]},
    ],
)
def test_what_is_plain_and_no_snapshot_is_refused(value, tmp_path):
    with pytest.raises(TraceError, match="not a memory snapshot"):
        read_snapshot(write(tmp_path / "s.pickle", pickle.dumps(value)))


@given(st.binary(max_size=60), st.integers(0, 3000), st.integers(0, 255))
def test_on_any_bytes_it_answers_or_refuses(data, place, byte):
    whole = bytearray(pickle.dumps(snapshot(), 2))
    whole[place % len(whole)] = byte
    for content in (b"\x80\x02" + data + b".", bytes(whole)):
        try:
            plain_values(content)
        except ValueError:
            pass

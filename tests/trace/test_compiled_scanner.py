"""The compiled scanner: the same tables as without it, of real traces and of damaged ones, and none needed."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from written_traces import SEED, TRACES, assert_same_tables, edge, instant, label, needs_traces, slice_of, text_of

import stepscope
from parametrized import parametrized
from stepscope.trace import decode, fast, reader, source
from stepscope.trace.assemble import nest
from stepscope.trace.reader import read_trace
from stepscope.trace.tables import HOST

PART = 400_000  # bytes of a real trace: one to two pieces
needs_scanner = pytest.mark.skipif(not fast.is_built(), reason="Stepscope was installed without a C compiler")
FILES = sorted(TRACES.rglob("*.json.gz"))


def decoded(data: bytes, monkeypatch, is_compiled: bool):
    with monkeypatch.context() as patch:
        if not is_compiled:
            patch.setattr(fast, "_scan", None)
        return decode.decode_slice(data, 1000)


def assert_same(data: bytes, monkeypatch) -> int:
    """Both ways through a slice find the same rows, counts, labels and problems, and end at the same byte."""
    one, other = (decoded(data, monkeypatch, is_compiled) for is_compiled in (True, False))
    tables = [rows(found) for found in (one, other)]
    assert tables[0].keys() == tables[1].keys()
    for name, frame in tables[0].items():
        assert_frame_equal(frame, tables[1][name])
    for found in (one, other):
        found.columns.frames, found.columns.threads = {}, sorted(map(str, found.columns.threads))
    assert one == other
    return one.columns.num_events


def rows(found) -> dict[str, pl.DataFrame]:
    """The tables of a slice: every column, and threads that do not depend on the order in which they were met."""
    tables = {}
    for name, frame in found.columns.frames.items():
        if "thread" in frame.columns:
            threads = pl.Series([str(thread) for thread in found.columns.threads])
            frame = frame.with_columns(thread=threads.gather(frame["thread"]))
        known = [column for column, values in frame.to_dict().items() if values.null_count() < frame.height]
        tables[name] = frame.select(sorted(known))
    return tables


def part_of(path: Path) -> bytes:
    """The first events of a trace, as they are written; the last is cut off."""
    with gzip.open(path) as stream:
        text = stream.read(PART)
    begin = text.find(b'"traceEvents"')
    return text[text.index(b"{", max(begin, 0)) :]


def whole_events(data: bytes) -> bytes:
    return data[: [match.start() for match in decode._BETWEEN.finditer(data)][-1] + 1]


@needs_scanner
@needs_traces
@parametrized("path", FILES, quick=10, ids=lambda path: path.name)
def test_real_traces_are_read_the_same(path, monkeypatch):
    data = part_of(path)
    assert assert_same(whole_events(data), monkeypatch) > 50
    assert_same(data, monkeypatch)


@needs_scanner
@needs_traces
def test_nearly_every_event_of_a_real_trace_is_scanned(monkeypatch):
    """WHEN a trace of the profiler is decoded THEN no event but names of threads becomes a Python object."""
    data = part_of(TRACES / "h200" / "gpt2_eager.json.gz")
    letters = []
    original = fast.decode_events
    monkeypatch.setattr(fast, "decode_events", lambda text: letters.extend(found := original(text)) or found)

    found = decoded(whole_events(data), monkeypatch, True)

    assert found.columns.num_events > 1000
    assert not [event for event in letters if event.ph != "M"]


# Values that JSON has, where a key may have one: some are regular, most are not.
VALUES = [
    "null", "true", "0", "-0", "-1", "7", "12345678901234567", "9223372036854775807", "9223372036854775808", "-0.5",
    "1.5", "1.2345", "1e3", "1E400", '""', '"7"', '"stream 7"', '"stream x"', '"\\u00e9"', '"é"', '"a\\"b"', "[]",
    "[[1, 2], []]", '["", {"a": [1]}]', "{}", '{"a": {}}', "99999999999999999.5", "9223372036854774.999",
    "9223372036854775.807", "9223372036854776", "0.1234567890123456789", "33.333333333333336", "[" * 70 + "]" * 70,
    '"[0, 1]"', '"' + "a" * 5000 + '"', "9" * 400,
]  # fmt: skip
BROKEN = [
    "01", "1.", "-", ".5", "NaN", "[1,]", "[1", '"', "\x00", "tru", "1 2", "[" * 1200 + "]" * 1200, "[1}", '{"a"}',
    '{1: 2}', '"\x1f"', '"\\', "1e", "--1", "",
]  # fmt: skip
KEYS = ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id"]
KINDS = [("X", "cpu_op"), ("X", "Kernel"), ("X", "cuda_sync"), ("i", "cpu_instant_event"), ("X", "new"), ("B", "x")]


def event_with(where: str, value: str, letter: str, category: str) -> str:
    parts = {"ph": f'"{letter}"', "cat": f'"{category}"', "name": '"[memory]"', "pid": "0", "tid": '"stream 3"'}
    parts |= {"ts": "5.25", "dur": "1"}
    args = {"Collective name": '"allreduce"'} if category == "Kernel" else {}
    (parts if where in KEYS else args)[where] = value
    parts.setdefault("args", f"{{{', '.join(f'{json.dumps(key)}: {args[key]}' for key in args)}}}")
    return f"{{{', '.join(f'{json.dumps(key)}: {parts[key]}' for key in parts)}}}"


@needs_scanner
@pytest.mark.parametrize("size", [1, decode._PIECE], ids=["alone", "together"])
def test_any_value_anywhere_is_read_the_same(size, monkeypatch):
    """GIVEN events of each kind with one odd value THEN both ways agree on each, alone in its piece and not."""
    monkeypatch.setattr(decode, "_PIECE", size)
    for where in [*KEYS, *(field.encode_name for field in fast.msgspec.structs.fields(fast.Args))]:
        events = [event_with(where, value, *kind) for value in VALUES for kind in KINDS]
        assert assert_same(", ".join(events).encode(), monkeypatch) == len(events)


@needs_scanner
@parametrized("where", ["name", "ts", "id", "device", "Input Dims"], quick=3)
def test_broken_values_are_read_the_same(where, monkeypatch):
    for value in BROKEN:
        events = [event_with(where, each, *kind) for kind in KINDS[:2] for each in ("7", value)]
        assert_same(", ".join(events).encode(), monkeypatch)


@needs_scanner
def test_keys_twice_and_odd_layouts_are_read_the_same(monkeypatch):
    texts = [
        '{"ph":"X","ts":1,"ts":2,"name":"a","args":{"correlation":1,"correlation":null}}',
        '{"ph":"X","ts":1,"name":"a","args":{"correlation":null,"correlation":3,"Ev Idx":1,"Ev Idx":2}}',
        '{"ph":"X","ts":1,"name":"a","args":{},"args":{"correlation":3}}',
        '{"ph":"X","ts":1,"args":{"correlation":3,}}', '{"ph":"X",}', "{}", "{ }", '{"ph":"X"', '{"ph":"X"}}',
        '{"ph":"X"]', "}{",
        '{"ph" : "X" , "ts" : 1 , "args" : { "device" : 1 } }',
        '{"ts":1,"ph":"X","args":{"a":{"b":[{}, {"c":1}, {}]}}}',
        '{"ph":"XX","ts":1}', '{"ph":"","ts":1}', '{"ph":"X","ts":1,"cat":null}', "7", "[]", '"text"', "",
        '{"ph":"X","ts":1,"name":"a\\\\"}', '{"ph":"X","ts":1,"name":"}, {"}', '{"ph":"X","ts":1,"cat":"CPU_OP"}',
    ]  # fmt: skip
    for text in texts:
        for around in (" {} ", "{},{}", '{{"ph":"M"}}, {} ,\n{{"ph":"X","ts":3}}', "{}\n], 7"):
            assert_same(around.format(*[text] * around.count("{}")).encode(), monkeypatch)


@needs_scanner
@pytest.mark.parametrize("num", [20, pytest.param(5_000, marks=pytest.mark.long)])
def test_damage_is_read_the_same(num, monkeypatch):
    """GIVEN a trace of one of everything, in pieces of some events WHEN it is damaged THEN both ways agree."""
    monkeypatch.setattr(decode, "_PIECE", 900)
    events = [
        *SEED,
        edge("B", "b", 5),
        edge("E", "b", 6),
        instant("[memory]", 7, Bytes=1),
        label("thread_name", 1, 2, name="t"),
    ]
    whole = ", ".join(json.dumps(event) for event in events * 2).encode()
    dice = random.Random(num)
    for _ in range(num):
        data = bytearray(whole)
        for _ in range(dice.choice([1, 1, 2, 8])):
            at = dice.randrange(len(data))
            match dice.randrange(4):
                case 0:
                    data[at] ^= 1 << dice.randrange(8)
                case 1:
                    del data[at : at + dice.randrange(1, 60)]
                case 2:
                    data[at:at] = dice.choice(
                        [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"\0", b"\xff", b"9" * 30, b"}, {"]
                    )
                case 3:
                    data[at:] = data[at : at + dice.randrange(200)] + data[at:]
        assert_same(bytes(data), monkeypatch)


@needs_scanner
def test_more_categories_and_threads_than_there_is_room_for(monkeypatch):
    events = [slice_of(f"op{i}", f"category {i % 200}", ts=i, tid=i % 300) for i in range(2_000)]
    events += [slice_of("op", tid="t" * 500), slice_of("op", "c" * 100)]
    assert_same(", ".join(map(json.dumps, events)).encode(), monkeypatch)


@needs_scanner
def test_any_tree_is_the_same(monkeypatch):
    """GIVEN events of some threads that nest, overlap in part, or have no length THEN both ways agree on the tree."""
    dice = random.Random(7)
    for num in [0, 1, 5, 60, 700] * 6:
        longest = dice.choice([4, 50, 5_000])
        columns = {
            "event": range(num),
            "thread": [dice.randrange(2) for _ in range(num)],
            "start_ns": [dice.randrange(-longest, longest) for _ in range(num)],
            "duration_ns": [dice.choice([0, 1, dice.randrange(longest), 2**53]) for _ in range(num)],
        }
        if dice.random() < 0.5:  # one inside the other
            columns["start_ns"] = sorted(columns["start_ns"])
            columns["duration_ns"] = [10 * longest - 2 * start for start in columns["start_ns"]]
        host = pl.DataFrame(columns, schema_overrides={name: HOST.schema[name] for name in columns})
        host = pl.concat([HOST.empty(), host[: num // 3], host[num // 3 :]], how="diagonal", rechunk=False)
        compiled = nest(host)
        with monkeypatch.context() as patch:
            patch.setattr(fast, "_scan", None)
            assert_frame_equal(compiled, nest(host))


@needs_scanner
def test_threads_change_nothing(tmp_path, monkeypatch):
    """WHEN many slices are scanned by threads THEN the trace is that of one thread, or of no scanner."""
    monkeypatch.setattr(source, "SLICE", 1 << 14)
    monkeypatch.setattr(reader, "SLICE", 1 << 14)
    path = tmp_path / "trace.json"
    path.write_text(
        text_of([slice_of(f"op{i % 50}", ts=i, tid=i % 3, args={"External id": i}) for i in range(4_000)])
    )
    started = []
    original = reader.Threads
    monkeypatch.setattr(reader, "Threads", lambda *args: started.append(args) or original(*args))

    together, alone = read_trace(path, workers=3), read_trace(path, workers=1)
    monkeypatch.setattr(fast, "_scan", None)
    pure = read_trace(path, workers=1)

    assert [size for _, size in started] == [3, 1]
    assert_same_tables(together, alone)
    assert_same_tables(together, pure)


READ = """
import sys
from pathlib import Path
from stepscope.trace import fast
from stepscope.trace.assemble import nest
from stepscope.trace.reader import read_trace
from stepscope.trace.tables import HOST
trace = read_trace(Path(sys.argv[1]))
print(fast.is_built(), trace.num_events, trace.host["duration_ns"].sum())
"""


@pytest.mark.parametrize("instead", [None, b"", b"\x7fELF of another machine"], ids=["missing", "empty", "foreign"])
def test_without_it_the_same_is_read(tmp_path, instead):
    """GIVEN an installation without the compiled file, or with one of another system THEN nothing is said of it."""
    copy = tmp_path / "stepscope"
    skip = shutil.ignore_patterns("_scan.*", "__pycache__", "render", "integrations", "planner", "studies")
    shutil.copytree(Path(stepscope.__file__).parent, copy, ignore=skip)
    if instead is not None:
        (copy / "trace" / "fast" / "_scan.abi3.so").write_bytes(instead)
    trace = tmp_path / "trace.json"
    trace.write_text(text_of([slice_of(f"op{i}", ts=i) for i in range(100)]))

    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    said = subprocess.run([sys.executable, "-c", READ, str(trace)], env=environment, capture_output=True, text=True)

    assert (said.stdout, said.stderr) == ("False 100 500000\n", "")

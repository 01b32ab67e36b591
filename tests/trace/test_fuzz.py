"""Whatever a file holds: a sound trace, or one line that says why not. Never anything else.

More than 5,000 inputs: values of every type in every place, and real and hand-written traces with bytes changed. They
are the same in every run.
"""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written_traces import FIELDS, SEED, TRACES, assert_same_tables, assert_sound, label, real_trace, text_of

from stepscope.errors import TraceError
from stepscope.trace import source
from stepscope.trace.events import Args, Event
from stepscope.trace.reader import read_trace
from stepscope.trace.tables import Trace

pytestmark = pytest.mark.long

NUM_VALUES = 1_000
NUM_MUTATIONS = 3_200
NUM_SHUFFLES = 800
NUM_GARBAGE = 600


@pytest.fixture(scope="module")
def path():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "fuzz.json"


def read_anything(path: Path, data: bytes) -> Trace | None:
    """The trace, whatever is in it sound; None when the reader says, in one line, that there is none."""
    path.write_bytes(data)
    try:
        trace = read_trace(path, workers=1)
    except TraceError as error:
        message = str(error)
        assert message and "\n" not in message and "Traceback" not in message
        return None
    assert_sound(trace)
    return trace


# Values of every type in every place.

KEYS = [field for struct in (Event, Args) for field in struct.__struct_encode_fields__]
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(0, 100),
    st.floats(allow_nan=True, allow_infinity=True),
    st.decimals(0, 10**15, places=3, allow_nan=False).map(str),
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=[]), max_size=8),  # half surrogate pairs too
    st.sampled_from(["", "X", "}, {", '"ph"', "[memory]", "stream 7", "0", "1e3", "\0", "process_name", "],[", "\\"]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
PHASES = st.sampled_from(["X", "X", "X", "B", "E", "i", "I", "M", "s", "f", "", "C"])
CATEGORY = st.sampled_from(["cpu_op", "kernel", "gpu_memcpy", "cuda_runtime", "cuda_sync", "new", "", None])
EVENTS = st.one_of(
    st.fixed_dictionaries(
        {"ph": PHASES, "cat": CATEGORY, "ts": NUMBERS},
        optional={
            "name": TEXTS,
            "dur": NUMBERS,
            "pid": VALUES,
            "tid": VALUES,
            "args": st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
        },
    ),
    st.dictionaries(st.one_of(st.sampled_from(KEYS), TEXTS), VALUES, max_size=5),
    VALUES,
)
TOP_FIELDS = st.dictionaries(
    st.one_of(st.sampled_from([*FIELDS, "traceEvents", "cuda_version", "with_stack"]), TEXTS), VALUES, max_size=3
)


@settings(max_examples=NUM_VALUES, suppress_health_check=list(HealthCheck))
@given(st.lists(EVENTS, max_size=4), TOP_FIELDS, st.sampled_from([None, 1]), st.sampled_from([1, 30, 1 << 22]))
def test_any_value_in_any_place(path, events, fields, indent, slice_bytes):
    """GIVEN valid JSON (and NaN) THEN every object is an event, if one is sound, however the file is cut."""
    fields.pop("traceEvents", None)
    data = json.dumps({**fields, "traceEvents": events}, indent=indent).encode("utf-8", "surrogatepass")
    trace = read_anything(path, data)

    objects = [event for event in events if isinstance(event, dict)]
    if trace is None:
        assert not any(event.get("ph") in (*"MsftbenO",) for event in objects)  # nothing can be wrong with these
    else:
        assert trace.num_events == len(objects)
    if trace and slice_bytes < 1000:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source, "SLICE", slice_bytes)
            again = read_anything(path, data)
        assert again is not None
        assert_same_tables(trace, again)
        assert trace.problems == again.problems and trace.warnings == again.warnings


# Traces with bytes changed.

TOKENS = [
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b":",
        b"\\",
        b"}, {",
        b"},{",
        b"]}",
        b"null",
        b"NaN",
        b"-Infinity",
        b"true",
    ),
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b"\n", b" " * 50, b"1e999", b"18446744073709551615"),
    *(b'{"ph": "X"', b'"ts": ', b'"traceEvents": [', b'{"a":' * 30, b"[" * 2000, b"-", b"0" * 5000, b"/*", b"'"),
]
REAL = [
    ("public/event_sync_multi_stream_a100.json.gz", 0),
    ("public/triton_mi300.json.gz", 30_000),
    ("public/resnet50_v100_torch1.9.json.gz", 500_000),
    ("public/dlrm_8ranks_v100/worker0_step_12.1694128201545.pt.trace.json.gz", 300_000),
    ("h200/contiguous_copies.json.gz", 100_000),
]


def some_events(text: bytes, near: int, num: int = 6) -> bytes:
    """A few neighboring events of a trace, as they stand in it."""
    start = text.rindex(b"{", 0, text.index(b'"ph"', near))
    end = start
    for _ in range(num):
        end = text.find(b'"ph"', end + 1)
    return text[start : text.rindex(b"}", start, text.index(b'"ph"', end + 1)) + 1]


def seeds() -> list[bytes]:
    """Small traces to change: written by hand and, where there are any, from real ones."""
    chosen = [text_of(SEED[i : i + 5]).encode() for i in range(0, len(SEED), 5)]
    chosen += [text_of(SEED[7:10], indent=1).encode(), json.dumps([label("process_name", 1, 2, name="x")]).encode()]
    if TRACES.is_dir():
        for name, near in REAL:
            events = some_events(real_trace(name), near)
            chosen.append(b'{"schemaVersion": 1, "traceEvents": [\n  ' + events + b'\n], "traceName": "x"}')
    return chosen


def mutated(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 1, 2, 4, 12))):
        at = chance.randrange(len(data) + 1)
        span = chance.choice((1, 1, 3, 20, 200))
        match chance.randrange(6):
            case 0:  # a bit flips
                data = (
                    data[:at] + bytes(byte ^ 1 << chance.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]
                )
            case 1:  # something is lost
                data = data[:at] + data[at + span :]
            case 2:  # something comes twice
                data = data[: at + span] + data[at:]
            case 3:  # something comes in between
                data = data[:at] + chance.choice(TOKENS) + data[at:]
            case 4:  # something comes instead
                data = data[:at] + chance.choice(TOKENS) + data[at + span :]
            case 5:  # the rest is lost
                data = data[:at] if chance.random() < 0.2 else data
    return data


@pytest.mark.parametrize("part", range(8))
def test_any_bytes_changed(path, monkeypatch, part):
    chance = random.Random(part)
    originals = seeds()
    num_read = 0
    for _ in range(NUM_MUTATIONS // 8):
        data = mutated(chance.choice(originals), chance)
        monkeypatch.setattr(source, "SLICE", chance.choice((1 << 22, 1 << 22, 700, 100)))
        if chance.random() < 0.1:
            data = gzip.compress(data, 1)
            if chance.random() < 0.5:
                data = mutated(data, chance)
        num_read += read_anything(path, data) is not None

    assert num_read > NUM_MUTATIONS // 8 // 2  # most of a damaged trace can be read, or the test tests nothing


def test_pieces_of_traces_in_any_order(path, monkeypatch):
    chance = random.Random(8)
    originals = seeds()
    for _ in range(NUM_SHUFFLES):
        pieces = []
        for _ in range(chance.randrange(1, 5)):
            original = chance.choice(originals)
            at = chance.randrange(len(original))
            pieces.append(original[at : at + chance.randrange(300)])
        monkeypatch.setattr(source, "SLICE", chance.choice((1 << 22, 200)))
        read_anything(path, chance.choice((b"", b"[", b'{"traceEvents": [')) + b"".join(pieces))


def test_garbage(path):
    chance = random.Random(9)
    for _ in range(NUM_GARBAGE):
        start = chance.choice(
            (b"", b"[", b"{", b'{"traceEvents": [{"ph": "X", "ts": 1}, ', b"\x1f\x8b", b'[{"ph":"X"},')
        )
        tokens: list[Any] = [chance.choice(TOKENS) for _ in range(chance.randrange(20))]
        noise = chance.randbytes(chance.randrange(40)) if chance.random() < 0.5 else b""
        read_anything(path, start + b"".join(tokens) + noise)


def test_there_are_enough_of_them():
    assert NUM_VALUES + NUM_MUTATIONS + NUM_SHUFFLES + NUM_GARBAGE >= 5_000

"""One trace in every layout is one trace: identical tables, on one core and on several."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written_traces import (
    FIELDS,
    SEED,
    assert_same_tables,
    assert_sound,
    in_file_order,
    needs_traces,
    real_trace,
    slice_of,
    text_of,
)

from parametrized import parametrized
from stepscope.trace import reader, source
from stepscope.trace.reader import read_trace
from stepscope.trace.tables import Trace

REAL = [
    "public/event_sync_multi_stream_a100.json.gz",
    "public/gpu_user_annotation_gp100.json.gz",
    "public/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "public/triton_mi300.json.gz",
    "public/rank_non_gpu.json.gz",
    "public/cpu_only_gloo.json.gz",
    "public/dlrm_8ranks_v100/worker0_step_12.1694128201545.pt.trace.json.gz",
    "h200/contiguous_copies.json.gz",
    "h200/mask_blocks_flash.json.gz",
]
_NUMBER = re.compile(r'"\\u0001([^"]*)\\u0001"')


def loaded(text: bytes) -> dict[str, Any]:
    """A document whose numbers keep every digit through `dumped`."""
    return json.loads(text, parse_float=lambda digits: f"\x01{digits}\x01")


def dumped(value: Any, **options: Any) -> str:
    return _NUMBER.sub(r"\1", json.dumps(value, **options))


def split(document: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    return {key: value for key, value in document.items() if key != "traceEvents"}, document["traceEvents"]


def fields_first(document: dict[str, Any]) -> str:
    fields, events = split(document)
    return dumped({**fields, "traceEvents": events})


def fields_last(document: dict[str, Any]) -> str:
    fields, events = split(document)
    return dumped({"traceEvents": events, **fields})


def one_event_a_line(document: dict[str, Any]) -> str:
    fields, events = split(document)
    lines = ",\n".join(dumped(event) for event in events)
    return f'{dumped(fields)[:-1]}, "traceEvents" : \n [\n{lines}\n]\n}}\n'


def backwards(document: dict[str, Any]) -> str:
    """Every event's keys in the other order."""
    fields, events = split(document)
    return dumped({**fields, "traceEvents": [dict(reversed(event.items())) for event in events]})


LAYOUTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "minified": lambda document: dumped(document, separators=(",", ":")),
    "indented by 4": lambda document: dumped(document, indent=4),
    "indented by tabs, CRLF": lambda document: dumped(document, indent="\t").replace("\n", "\r\n"),
    "keys sorted": lambda document: dumped(document, sort_keys=True),
    "keys backwards": backwards,
    "fields first": fields_first,
    "fields last": fields_last,
    "one event a line": one_event_a_line,
    "bare list": lambda document: dumped(document["traceEvents"]),
    "bare list, never closed": lambda document: dumped(document["traceEvents"], indent=1).rstrip("\n]"),
    "byte order mark": lambda document: "\ufeff" + dumped(document),
    "no ASCII": lambda document: dumped(document, ensure_ascii=False),
}


@pytest.fixture
def small_slices(monkeypatch):
    """Slices of 64 KiB, and workers for any file."""
    monkeypatch.setattr(source, "SLICE", 1 << 16)
    monkeypatch.setattr(reader, "WORTH_WORKERS", 0)


def read_text(
    folder: Path, text: str | bytes, workers: int = 1, compress: Callable[[bytes], bytes] | None = None
) -> Trace:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    path = folder / "layout.json"
    path.write_bytes(compress(data) if compress else data)
    return read_trace(path, workers=workers)


@pytest.mark.long
@needs_traces
@pytest.mark.parametrize("name", REAL)
def test_a_real_trace_in_every_layout(tmp_path, monkeypatch, name):
    """GIVEN a real trace as it was recorded WHEN it is written in other ways THEN its tables do not change."""
    monkeypatch.setattr(source, "SLICE", 1 << 18)
    text = real_trace(name)
    expected = read_text(tmp_path, text)
    assert_sound(expected)
    assert expected.problems == () and expected.warnings == ()
    document = loaded(text)
    assert expected.num_events == len(document["traceEvents"])

    for layout, written in LAYOUTS.items():
        trace = read_text(tmp_path, written(document))
        assert_same_tables(expected, trace)
        assert trace.problems == (), layout
        assert bool(trace.warnings) == (layout == "bare list, never closed")
        if "bare list" not in layout:
            assert trace.facts == expected.facts


@needs_traces
@parametrized(
    ("layout", "compress"),
    [
        ("minified", None),
        ("indented by 4", gzip.compress),
        ("bare list, never closed", None),
        pytest.param("minified", gzip.compress, marks=pytest.mark.long),
        pytest.param("indented by 4", None, marks=pytest.mark.long),
        pytest.param("bare list, never closed", gzip.compress, marks=pytest.mark.long),
    ],
    quick=2,
)
def test_two_workers_read_what_one_does(tmp_path, small_slices, layout, compress):
    text = LAYOUTS[layout](loaded(real_trace(REAL[6])))
    assert len(text) > 8 * source.SLICE

    one = read_text(tmp_path, text, 1, compress)
    two = read_text(tmp_path, text, 2, compress)

    assert_same_tables(one, two)
    assert (one.facts, one.problems, one.warnings) == (two.facts, two.problems, two.warnings)


def members(data: bytes, size: int) -> bytes:
    """As parallel compressors write: many files in one."""
    return b"".join(gzip.compress(data[i : i + size]) for i in range(0, len(data), size))


@pytest.mark.parametrize(
    "compress",
    [
        gzip.compress,
        lambda data: gzip.compress(data, 0),
        lambda data: members(data, 1000),
        lambda data: members(data, 7) + gzip.compress(b"") * 3,
        lambda data: gzip.compress(data) + b"\0" * 200_000,
    ],
    ids=["one member", "stored", "many members", "tiny and empty members", "padded"],
)
def test_compressed_is_the_same(tmp_path, compress):
    events = [slice_of(f"op{i % 7}", ts=i) for i in range(500)]
    plain, compressed = read_text(tmp_path, text_of(events)), read_text(tmp_path, text_of(events), 1, compress)

    assert_same_tables(plain, compressed)
    assert compressed.warnings == () and compressed.facts == plain.facts


@pytest.mark.parametrize(
    "slice_bytes", [1, 64, 1 << 22, *(pytest.param(each, marks=pytest.mark.long) for each in (7, 1000))]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wherever_the_slices_fall(tmp_path, monkeypatch, layout, slice_bytes):
    text = LAYOUTS[layout]({**FIELDS, "traceEvents": SEED})
    expected = read_text(tmp_path, text)
    monkeypatch.setattr(source, "SLICE", slice_bytes)

    assert_same_tables(expected, read_text(tmp_path, text))


NESTED = [
    [{"ph": "X", "ts": 1, "name": "no event"}, {"ph": "X", "ts": 2, "name": "nor this"}],
    {"traceEvents": [{"ph": "X"}, {"ph": "X"}]},
    "}, {",
    '"}, {"ph": "X", "ts": 1}, {"',
    [[], [[]], {}, [{}], "]"],
    [{"a": [{"b": [{"c": 1}, {"c": 2}]}, {"b": []}]}, {"a": []}] * 60,
]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@parametrized("nested", NESTED, quick=3, ids=range(len(NESTED)))
def test_what_looks_like_an_event_inside_one_is_none(tmp_path, monkeypatch, nested, separators):
    """GIVEN arguments that hold what looks like events WHEN slices end in the midst of them THEN none is taken."""
    events = [slice_of(f"op{i}", ts=i, args={"before": nested, "External id": i, "after": nested}) for i in range(40)]
    text = text_of(events, separators=separators)
    for slice_bytes in (50, 333, 1 << 22):
        monkeypatch.setattr(source, "SLICE", slice_bytes)
        trace = read_text(tmp_path, text)

        assert in_file_order(trace.host)["name"].to_list() == [f"op{i}" for i in range(40)]
        assert in_file_order(trace.host)["external_id"].to_list() == list(range(40))
        assert trace.problems == () and trace.warnings == ()


def test_a_large_event_is_read_and_one_beyond_all_reason_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_MAX_NAME", str(1 << 30))
    large, absurd = "x" * (3 << 20), "y" * (21 << 20)
    text = text_of([slice_of("first"), slice_of(large), slice_of(absurd), slice_of("last", ts=11)])
    trace = read_text(tmp_path, text)

    assert in_file_order(trace.host)["name"].to_list() == ["first", large, "last"]
    assert [(p.what, p.num) for p in trace.problems] == [("larger than 4 MiB", 1)]
    start = trace.problems[0].offset
    assert text[start:].startswith('{"ph": "X"') and text.index(absurd) - 100 < start < text.index(absurd)
    num_bytes = len(json.dumps(slice_of(absurd)))
    (said,) = trace.warnings
    assert num_bytes <= int(said.split()[0].replace(",", "")) <= num_bytes + 2


@parametrized("slice_bytes", [1 << 16, 1 << 22], quick=1)
@pytest.mark.parametrize(
    "size",
    [(4 << 20) - 100, 4 << 20, *(pytest.param(mebibytes << 20, marks=pytest.mark.long) for mebibytes in (5, 13))],
)
@pytest.mark.parametrize("is_misleading", [False, True])
def test_the_limit_is_the_same_wherever_slices_fall(tmp_path, monkeypatch, size, slice_bytes, is_misleading):
    monkeypatch.setattr(source, "SLICE", slice_bytes)
    content = "}, {" * (size // 4) if is_misleading else "x" * size
    big = slice_of("big", args={"list": [1, 2, {"a": content}]})
    trace = read_text(tmp_path, text_of([slice_of("a"), big, slice_of("b", ts=11), slice_of("c", ts=12)]))

    is_kept = len(json.dumps(big)) <= 4 << 20
    assert in_file_order(trace.host)["name"].to_list() == ["a", *["big"] * is_kept, "b", "c"]
    assert [p.what for p in trace.problems] == ["larger than 4 MiB"] * (not is_kept)


def test_fields_before_and_after_the_events(tmp_path):
    text = (
        '{"schemaVersion": 1, "traceEvents": null, "deviceProperties": [{"name": "GPU \\u00e9 é"}], "traceEvents": '
        '[{"ph": "X", "ts": 1, "name": "a"}], "distributedInfo": {"rank": 5, "world_size": 8}, '
        '"baseTimeNanoseconds": 12}'
    )
    trace = read_text(tmp_path, text)

    assert trace.facts.devices == ("GPU é é",)
    assert (trace.facts.rank, trace.facts.base_time_ns) == (5, 12)
    assert trace.warnings == ()


@pytest.mark.parametrize("slice_bytes", [1, 2, 3])
def test_numbers_in_fields_are_not_cut(tmp_path, monkeypatch, slice_bytes):
    """GIVEN a file read byte by byte THEN `0.` is not taken for `0`, nor `1e+` for `1`."""
    monkeypatch.setattr(source, "SLICE", slice_bytes)
    fields = '"a": 0.5, "b": -1.5e+10, "c": [1.25], "x_version": 12.5, "baseTimeNanoseconds": 1700000000000000000'
    trace = read_text(tmp_path, f'{{{fields}, "traceEvents": [{{"ph": "X", "ts": 1}}], "y_version": 0.25E-1}}')

    assert trace.facts.versions == {"x_version": "12.5", "y_version": "0.25E-1"}
    assert trace.facts.base_time_ns == 1_700_000_000_000_000_000


@pytest.mark.parametrize(
    ("after", "warning"),
    [
        ("", "the data after the events is cut off or damaged"),
        (', "a', "the data after the events is cut off or damaged"),
        (', "a": tru', "the data after the events is cut off or damaged"),
        (', "a": oops}', "the data after the events is cut off or damaged"),
        (', "a": 1', "the data after the events is cut off or damaged"),
        ("} {}", "data after the trace was not read"),
        (', "traceEvents": [{"ph": "X"}]}', 'a second list "traceEvents" was not read'),
    ],
)
def test_what_is_wrong_after_the_events_is_told(tmp_path, after, warning):
    trace = read_text(tmp_path, '{"traceEvents": [{"ph": "X", "ts": 1}]' + after)

    assert trace.host.height == 1
    assert [w.partition(" (byte ")[0] for w in trace.warnings] == [warning]


def test_a_second_document_after_a_list_is_told(tmp_path):
    trace = read_text(tmp_path, '[{"ph": "X", "ts": 1}]\n[{"ph": "X", "ts": 2}]')

    assert trace.warnings == ("data after the trace was not read (byte 23)",)


def test_progress_rises_to_the_whole(tmp_path, small_slices):
    path = tmp_path / "trace.json"
    path.write_text(text_of([slice_of("op", ts=i) for i in range(5000)]))
    shares: list[float] = []
    read_trace(path, shares.append, workers=1)

    assert shares == sorted(shares) and len(shares) > 3 and shares[-1] == 1.0

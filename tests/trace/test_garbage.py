"""What is no trace, or hardly one: one clear line with the place, or the sound part with a word about the rest."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import sys
from pathlib import Path

import pytest
from written_traces import TRACES, assert_sound, in_file_order, needs_traces, read, slice_of, text_of

from stepscope.errors import TraceError
from stepscope.trace import fields
from stepscope.trace.reader import read_trace

EVENT = '{"ph": "X", "ts": 1, "name": "a"}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty (byte 0)"),
        (" \n\t ", "has only white space (byte 4)"),
        ("\ufeff", "has only white space (byte 3)"),
        ("hello", "is not a trace: expected { or [, found 'h' (byte 0)"),
        ("<!DOCTYPE html><html></html>", "is not a trace: expected { or [, found '<' (byte 0)"),
        ("null", "is not a trace: expected { or [, found 'n' (byte 0)"),
        ("  42", "is not a trace: expected { or [, found '4' (byte 2)"),
        (b"\xff\xfe[\0]\0", "is UTF-16: a trace is UTF-8 (byte 0)"),
        (b"\0" * 100, "is not a trace: expected { or [, found '\\x00' (byte 0)"),
        ('[{"ph": "M"}]'.encode("utf-16-le"), "is UTF-16: a trace is UTF-8 (byte 0)"),
        ('{"traceEvents": []}'.encode("utf-16"), "is UTF-16: a trace is UTF-8 (byte 0)"),
        (
            b"PK\x03\x04",
            "is a zip archive (like files of torch.save): unpack it first if it contains a trace (byte 0)",
        ),
        (bz2.compress(b"[]"), "is compressed with bzip2: decompress it with bunzip2 (byte 0)"),
        (lzma.compress(b"[]"), "is compressed with xz: decompress it with unxz (byte 0)"),
        (b"(\xb5/\xfd\x04\0", "is compressed with Zstandard: decompress it with unzstd (byte 0)"),
        (
            gzip.compress(gzip.compress(b"[]", mtime=0), mtime=0),
            "is compressed twice with gzip: decompress it with gunzip (byte 0)",
        ),
        (
            b"SQLite format 3\0",
            "cannot be read as an SQLite database: file is not a database",
        ),
        ("{}", 'is JSON but not a trace: it has no list "traceEvents" (byte 2)'),
        ('{"a": {"traceEvents": [1]}}', 'is JSON but not a trace: it has no list "traceEvents" (byte 27)'),
        ('{"traceEvents": {"a": 1}}', 'is JSON but not a trace: it has no list "traceEvents" (byte 25)'),
        ('{"traceEvents": "many"}', 'is JSON but not a trace: it has no list "traceEvents" (byte 23)'),
        ('{"traceEvents": null, "b": 1}', 'is JSON but not a trace: it has no list "traceEvents" (byte 29)'),
        ("{", "ends before its first event (byte 1)"),
        ('{"a', "ends before its first event (byte 1)"),
        ('{"a"', "ends before its first event (byte 4)"),
        ('{"a": ', "ends before its first event (byte 6)"),
        ('{"a": [1, 2', "ends before its first event (byte 6)"),
        ('{"a": 12', "ends before its first event (byte 8)"),
        ('{"traceEvents"', "ends before its first event (byte 14)"),
        ("{a: 1}", "is not a trace: expected a name in quotes (byte 1)"),
        ('{"a" 1}', "is not a trace: expected a colon (byte 5)"),
        ('{"a": oops, "traceEvents": []}', "is not a trace: expecting value (byte 6)"),
        ('{"a": [1, 2, oops, and much more], "b": 1}', "is not a trace: expecting value (byte 13)"),
        ("[]", "has no events that can be read"),
        ('{"traceEvents": []}', "has no events that can be read"),
        ("[1, null, [2]]", "has no events that can be read; not an event (byte 1)"),
        ("[{}]", "has no events that can be read; with no phase (byte 1)"),
        (
            '[1, 2, "a", null, [1], {}]',
            "has no events that can be read; not an event (byte 1); with no phase (byte 23)",
        ),
        (
            '[{"ph": "X"}, {"ph": "i", "name": "[memory]", "ts": "now"}]',
            "has no events that can be read; with no usable start time (byte 1)",
        ),
        ("[oops]", "has no events that can be read; not valid JSON (byte 1)"),
        ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", "is not a trace: nested too deeply (byte 6)"),
        ("[" * 10_000, "has no events that can be read; nested too deeply (byte 1); the file ends at byte 10,000"),
        ('{"a":' * 10_000, "is not a trace: nested too deeply (byte 5)"),
    ],
)
def test_no_trace_is_one_line_with_the_place(tmp_path, content, message):
    with pytest.raises(TraceError) as caught:
        read(tmp_path, content)

    said = str(caught.value).removeprefix(str(tmp_path / "trace.json")).strip()
    assert said == message or (said.startswith(message) and message.endswith("10,000"))
    assert "\n" not in said


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere\.json: No such file or directory$"):
        read_trace(tmp_path / "nowhere.json")


def test_a_folder(tmp_path):
    with pytest.raises(TraceError, match="it is a folder, not a file"):
        read_trace(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_one_may_not_read(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("[]")
    path.chmod(0)
    with pytest.raises(TraceError, match="Permission denied"):
        read_trace(path)


def test_what_the_system_refuses_to_open(tmp_path, monkeypatch):
    (tmp_path / "trace.json").write_text("[]")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(TraceError, match=r"trace\.json: Permission denied$"):
        read_trace(tmp_path / "trace.json")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="it is a pipe or a device, not a file"):
        read_trace(tmp_path / "pipe")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_a_device_is_not_read(device):
    with pytest.raises(TraceError):
        read_trace(Path(device))


def test_a_name_that_no_file_can_have():
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(TraceError):
            read_trace(Path(name))


def test_an_error_while_reading(tmp_path, monkeypatch):
    """GIVEN a disk that fails THEN the reader says what the system says."""
    path = tmp_path / "trace.json"
    path.write_text(text_of())

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(TraceError, match=r"trace\.json: Input/output error$"):
        read_trace(path, workers=1)


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "null", '"text"', "[1, {}]", "{}", "true"]
)
@pytest.mark.parametrize("key", ["pid", "tid", "name", "cat", "args", "id", "dur"])
def test_a_value_of_another_type_costs_no_other_event(tmp_path, key, value):
    trace = read(tmp_path, f'[{EVENT}, {{"ph": "X", "ts": 2, "{key}": {value}}}, {EVENT}]')

    assert trace.num_events == 3
    assert trace.host.filter(name="a").height == 2
    assert_sound(trace)


@pytest.mark.parametrize("value", ["NaN", "1e999", '"seven"', "[7]", "{}", "true", "9" * 5000, "-0.0", '"7"'])
def test_an_argument_of_another_type_costs_no_event(tmp_path, value):
    keys = ["External id", "correlation", "stream", "device", "bytes", "grid", "est. achieved occupancy %", "dtype"]
    args = ", ".join(f'"{key}": {value}' for key in [*keys, "Input Dims", "Call stack", "Collective name", "Addr"])
    categories = ["cpu_op", "kernel", "gpu_memcpy", "cuda_sync", "gpu_user_annotation", "cuda_runtime", "new"]
    events = [f'{{"ph": "X", "cat": "{cat}", "ts": 1, "args": {{{args}}}}}' for cat in categories]
    memory = f'{{"ph": "i", "name": "[memory]", "ts": 1, "args": {{{args}, "Bytes": {value}}}}}'
    trace = read(tmp_path, f"[{', '.join([*events, memory])}]")

    assert trace.num_events == 8 and trace.problems == ()
    assert (trace.host.height, trace.device.height, trace.memory.height) == (3, 2, 1)
    assert_sound(trace)


def test_everything_of_the_wrong_type_at_once(tmp_path):
    trace = read(
        tmp_path,
        '{"distributedInfo": 5, "deviceProperties": {"a": 1}, "baseTimeNanoseconds": "now", "record_shapes": [], '
        '"cuda_version": ' + "[" * 300 + "]" * 300 + ", "
        '"traceEvents": [{"ph": 1, "ts": [], "cat": {}, "name": [], "args": [1], "pid": {}, "tid": []}]}',
    )

    assert trace.counts.rows() == [("1", "{}", None, 1)]
    assert trace.facts.rank is None and trace.facts.base_time_ns == 0


@pytest.mark.parametrize("depth", [100, 400, 900, 1_500, 10_000, 100_000])
@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}")])
def test_deep_arguments_cost_at_most_their_event(tmp_path, depth, opening, closing):
    deep = opening * depth + "1" + closing * depth
    trace = read(tmp_path, f'[{EVENT}, {{"ph": "X", "ts": 2, "name": "deep", "args": {{"x": {deep}}}}}, {EVENT}]')

    names = in_file_order(trace.host)["name"].to_list()
    assert names == (["a", "deep", "a"] if not trace.problems else ["a", "a"])
    assert [p.what for p in trace.problems] in ([], ["nested too deeply"])
    assert bool(trace.warnings) == bool(trace.problems and len(deep) > 1 << 13)
    if depth == 100:
        assert trace.problems == ()
    if depth >= 10_000:
        assert [(p.what, p.offset) for p in trace.problems] == [("nested too deeply", len(EVENT) + 3)]


@pytest.mark.parametrize("key", ["Input Dims", "Call stack", "grid", "stream", "External id"])
@pytest.mark.parametrize("depth", [450, 950, 5_000])
def test_deep_values_in_known_places(tmp_path, key, depth):
    deep = "[" * depth + "]" * depth
    trace = read(
        tmp_path, f'[{EVENT}, {{"ph": "X", "cat": "kernel", "ts": 2, "args": {{"{key}": {deep}}}}}, {EVENT}]'
    )

    assert trace.host.height == 2
    assert_sound(trace)


@pytest.mark.parametrize("depth", [300, 900, 950, 990])
def test_deep_fields_are_read_or_told(tmp_path, depth):
    deep = "[" * depth + "]" * depth
    try:
        trace = read(
            tmp_path, f'{{"x_version": {deep}, "deviceProperties": [{{"name": {deep}}}], "traceEvents": [{EVENT}]}}'
        )
        assert trace.host.height == 1
    except TraceError as error:
        assert "nested too deeply" in str(error)


def test_invalid_utf8_is_replaced_and_the_place_told(tmp_path):
    trace = read(tmp_path, b'[{"ph": "X", "ts": 1, "name": "\xffa\xc3"}, {"ph": "X", "ts": 2, "name": "\xc3\xa9"}]')

    assert trace.host["name"].to_list() == ["\ufffda\ufffd", "é"]
    assert [(p.what, p.offset) for p in trace.problems] == [("invalid UTF-8 in a text (the bytes were replaced)", 1)]


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    trace = read(
        tmp_path,
        '{"deviceProperties": [{"name": "\\ud800!"}], "a\\udfff": 1, '
        '"traceEvents": [{"ph": "X", "ts": 1, "name": "\\ud83d", "cat": "\\udc00", "pid": "\\ud800"}]}',
    )

    assert trace.host["name"].to_list() == ["\ufffd"]
    assert trace.facts.devices == ("\ufffd!",)
    assert trace.threads["pid"].to_list() == ["\ufffd"]
    json.dumps(trace.counts.to_dicts()).encode()


def test_an_event_that_swallows_the_rest_of_the_file_costs_only_itself(tmp_path):
    """GIVEN a list in an event that is never closed, so that the list of events seems to be in it."""
    trace = read(
        tmp_path,
        '{"traceEvents": [{"ph": "X", "ts": 0, "args": {"x": [1, {"ph": "X", "ts": 1}, {"ph": "X", "ts": 2}], '
        '"baseTimeNanoseconds": 7}',
    )

    assert trace.host["start_ns"].to_list() == [1_000, 2_000]
    assert [(p.what, p.offset) for p in trace.problems] == [("cut off", 17)]
    assert trace.facts.base_time_ns == 7 and trace.warnings == ()


def test_json_lines_without_commas_are_read(tmp_path):
    trace = read(tmp_path, "[" + "\n".join(json.dumps(slice_of(f"op{i}", ts=i)) for i in range(50)) + "]")

    assert trace.host["name"].to_list() == [f"op{i}" for i in range(50)]
    assert trace.problems == ()


def test_commas_too_many_are_passed_over(tmp_path):
    assert read(tmp_path, f"[,{EVENT},, {EVENT},]").num_events == 2


def test_a_field_beyond_all_reason_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(fields, "LARGEST_HEADER", 1 << 20)
    with pytest.raises(TraceError, match=r"has more than 1 MiB in a field outside its events \(byte 6\)"):
        read(tmp_path, '{"a": "' + "x" * (10 << 20) + '", "traceEvents": []}')


@pytest.mark.long
def test_many_small_fields_are_no_field_beyond_reason(tmp_path):
    many = ", ".join(f'"key {i}": [{i}]' for i in range(50_000))
    trace = read(tmp_path, f'{{{many}, "traceEvents": [{EVENT}], "baseTimeNanoseconds": 7}}')

    assert trace.facts.base_time_ns == 7


def test_white_space_beyond_all_reason_is_only_white_space(tmp_path):
    blank = " \n" * (3 << 20)
    trace = read(tmp_path, f"{blank}[{blank}{EVENT}{blank},{blank}{EVENT}{blank}]{blank}")

    assert trace.num_events == 2 and trace.problems == () and trace.warnings == ()


# Compressed.


def compressed() -> bytes:
    text = text_of([slice_of(f"op{i * i % 1009}", ts=i * 1.001, dur=i % 13) for i in range(20_000)])
    return gzip.compress(text.encode())


@pytest.mark.parametrize("share", [0.3, 0.7, 0.999])
def test_damaged_in_the_middle_the_sound_part_is_read(tmp_path, share):
    """GIVEN a compressed trace with a stretch overwritten THEN what comes before is read, and the place told."""
    data = compressed()
    at = int(len(data) * share)
    trace = read(tmp_path, data[:at] + b"\xff" * 64 + data[at + 64 :])

    assert trace.num_events > (share - 0.1) * 20_000
    assert trace.warnings[0].startswith("the compressed data is damaged: reading stopped at byte ")


def test_how_much_of_a_damaged_file_was_not_read_is_told(tmp_path):
    """GIVEN compressed data that cannot be inflated any further THEN the bytes up to its end are counted."""
    text = gzip.decompress(compressed())
    at = len(first := gzip.compress(text[: len(text) // 2]))
    data = first + b"\x1f\x8b\xff" + gzip.compress(text[len(text) // 2 :])[3:]
    trace = read(tmp_path, data)

    said = re.fullmatch(r".*stopped at byte ([\d,]+) of the file, ([\d,]+) before its end", trace.warnings[0])
    assert said is not None
    stopped, num_left = (int(number.replace(",", "")) for number in said.groups())
    assert at <= stopped < at + 10 and stopped + num_left == len(data)


def test_how_much_of_a_broken_list_was_passed_over_is_told(tmp_path):
    """GIVEN a stretch in which no event can be read THEN its bytes are counted, be it one stretch or many."""
    events = [json.dumps(slice_of(f"op{i}", ts=i)) for i in range(2_000)]
    broken = ", ".join(text.replace('"ph"', "'ph'") for text in events)
    text = f"[{events[0]}, {broken}, {events[1]}, {broken}, {events[2]}]"
    trace = read(tmp_path, text)

    assert trace.num_events == 3
    (said,) = trace.warnings
    passed_over, whole = (int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", said))
    assert whole == len(text)
    assert 2 * len(broken) <= passed_over <= 2 * len(broken) + 10


@needs_traces
def test_a_real_trace_with_six_bytes_overwritten_says_how_much_is_gone(tmp_path):
    data = (TRACES / "h200" / "gpt2_eager.json.gz").read_bytes()
    trace = read(tmp_path, data[:200_000] + bytes(6) + data[200_006:])

    assert trace.num_events < 10_000
    said = next(warning for warning in trace.warnings if "skipped" in warning)
    passed_over, whole = (int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", said))
    assert 0.6 < passed_over / whole < 0.8 and whole > 9_000_000


def test_damaged_before_the_first_event_the_place_is_told(tmp_path):
    data = compressed()
    with pytest.raises(TraceError, match="the compressed data is damaged: reading stopped at byte "):
        read(tmp_path, data[:50] + b"\xff" * 64 + data[114:])


def test_a_wrong_checksum_costs_no_event(tmp_path):
    data = compressed()
    trace = read(tmp_path, data[:-8] + bytes(8))

    assert trace.num_events == 20_000
    assert trace.warnings[0].startswith("the compressed data is damaged")


def test_something_else_after_the_compressed_data_costs_no_event(tmp_path):
    data = compressed()
    trace = read(tmp_path, data + b"and a note")

    assert trace.num_events == 20_000 and len(trace.warnings) == 1


@pytest.mark.parametrize(
    "content", [b"\x1f\x8b", b"\x1f\x8b\x08\0\0\0\0\0\0\3", gzip.compress(b"", mtime=0), b"\x1f\x8b" * 50]
)
def test_compressed_nothing_is_one_line(tmp_path, content):
    with pytest.raises(TraceError) as caught:
        read(tmp_path, content)

    assert "\n" not in str(caught.value)


def test_the_recursion_limit_is_left_as_it_was(tmp_path):
    before = sys.getrecursionlimit()
    with pytest.raises(TraceError):
        read(tmp_path, "[" * 100_000)

    assert sys.getrecursionlimit() == before

"""The careful way: what is sound around something broken is read, and the place of the breakage told."""

from __future__ import annotations

import json

import pytest
from written_traces import slice_of

from stepscope.trace import scan
from stepscope.trace.decode import decode_slice
from stepscope.trace.scan import is_incomplete, scan_events, try_event, value_at

GOOD = [json.dumps(slice_of(f"op{i}", ts=i)) for i in range(6)]
BROKEN = {
    "no value": '{"ph": "X", "ts": }',
    "a bare word": '{"ph": "X", "ts": oops, "args": {"a": [1, {"b": 2}]}}',
    "a bad escape": '{"ph": "X", "name": "C:\\new\\quirk", "ts": 9}',
    "a missing quote": '{"ph": "X", "name": "half, "ts": 9}',
    "a missing brace": '{"ph": "X", "args": {"a": 1, "ts": 9',
    "a brace too many": '{"ph": "X", "ts": 9}}',
    "a comma too many": '{"ph": "X", "ts": 9,}',
    "words between": "and so on",
    "two numbers": '{"ph": "X", "ts": 1 2}',
    "hex": '{"ph": "X", "ts": 0x10}',
    "single quotes": "{'ph': 'X'}",
    "a comment": '/* later */ {"ph": "X", "ts": 9}',
    "too deep": '{"ph": "X", "args": ' + '{"a": ' * 10_000 + "1" + "}" * 10_000 + "}",
    "lists too deep": '{"ph": "X", "args": ' + "[" * 10_000 + "]" * 10_000 + "}",
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("place", [0, 1, 3, 6])
@pytest.mark.parametrize("separator", [", ", ",", ",\n\t"])
def test_every_event_around_a_broken_one_is_read(what, place, separator):
    """GIVEN six events and one broken one WHEN they are decoded THEN the six are there, and the end of the list."""
    texts = [*GOOD[:place], BROKEN[what], *GOOD[place:]]
    data = separator.join(texts) + '], "a": [{"b": 1}, {"b": 2}]}'
    decoded = decode_slice(data.encode(), 1000)

    starts = decoded.columns.frames["host"]["start_ns"].to_list()
    assert [ns for ns in starts if ns < 9_000] == [i * 1_000 for i in range(6)]
    (problem,) = decoded.problems.values()
    assert problem.num == 1
    assert 0 <= problem.offset - 1000 - data.index(BROKEN[what]) <= len(BROKEN[what])
    assert problem.what == ("nested too deeply" if "too deep" in what else "not valid JSON")
    assert decoded.is_closed or what == "a missing brace"


def test_values_that_are_no_events_are_told_once_for_all():
    scanned = scan_events(b'1, "two", null, [3], {"ph": "X"}, true]', 10)

    assert [event.ph for event in scanned.events] == ["X"]
    assert [(p.what, p.offset, p.num) for p in scanned.problems.values()] == [("not an event", 10, 5)]
    assert scanned.is_closed


@pytest.mark.parametrize("cut", range(1, len(GOOD[0])))
def test_an_event_that_goes_on_in_the_next_slice_waits_for_it(cut):
    data = f"{GOOD[1]}, {GOOD[0][:cut]}".encode()
    decoded = decode_slice(data, 0)

    assert decoded.columns.num_events == 1 and decoded.problems == {}
    assert decoded.end == len(GOOD[1]) + 2
    assert not decoded.is_lost and not decoded.is_closed


@pytest.mark.parametrize("cut", range(1, len(GOOD[0])))
def test_an_event_that_the_file_ends_in_is_cut_off(cut):
    data = f"{GOOD[1]}, {GOOD[0][:cut]}".encode()
    decoded = decode_slice(data, 0, is_last=True)

    assert decoded.columns.num_events == 1 and decoded.end == len(data)
    assert [(p.what, p.offset) for p in decoded.problems.values()] == [("cut off", len(GOOD[1]) + 2)]


TOKENS = (
    '{"a": "b\\u00e9\\ud83d\\ude00\\\\", "n": -1.5e+10, "t": true, "x": [NaN, -Infinity, null, {"q": []}], "e": {}}'
)


@pytest.mark.parametrize("cut", range(1, len(TOKENS)))
def test_a_text_that_ends_too_early_is_told_from_a_broken_one(cut):
    with pytest.raises(ValueError) as caught:
        value_at(TOKENS[:cut], 0)

    assert is_incomplete(caught.value, TOKENS[:cut])
    with pytest.raises(ValueError) as caught:
        value_at(TOKENS[:cut] + "§§ and much more text after it", 0)
    is_inside_text = caught.value.msg.startswith("Unterminated")
    assert is_inside_text or not is_incomplete(caught.value, TOKENS[:cut] + "§§ and much more text after it")


def test_what_looks_like_an_event():
    text = '{"ph": "X"} {} {"ph": 1} [{"ph": "X"}] {"ph": "X"'

    assert [try_event(text, text.index(part))[0] for part in ('{"ph": "X"}', "{}", '{"ph": 1}', "[")] == [
        True,
        False,
        False,
        False,
    ]
    assert not try_event(text, text.rindex("{"))[0]


@pytest.mark.parametrize(
    ("written", "field", "value"),
    [
        ('"ts": 1, "pid": [1, 2]', "pid", "[1, 2]"),
        ('"ts": 1, "pid": NaN', "pid", None),
        ('"ts": 1, "tid": {"a": 1.50}', "tid", '{"a": 1.50}'),
        ('"ts": 1, "name": 7', "name", "7"),
        ('"ts": 1, "name": null', "name", ""),
        ('"ts": 1, "name": "\\ud800 half"', "name", "\ufffd half"),
        ('"ts": 1, "name": "\\ud83d\\ude00 \x01 é"', "name", "\U0001f600 \x01 é"),
        ('"ts": 1, "cat": ["kernel"]', "cat", '["kernel"]'),
        ('"ts": 1, "args": 5', "cat", ""),
        ('"ts": 1, "args": null', "cat", ""),
        (f'"ts": 1, "pid": {"9" * 5000}', "pid", None),
    ],
)
def test_an_event_of_wrong_types_is_mended(written, field, value):
    scanned = scan_events(f'{{"ph": "X", {written}}}'.encode(), 0)

    (event,) = scanned.events
    found = getattr(event, field)
    assert found == value or (found != found and value is None)
    assert scanned.problems == {}


def test_mending_keeps_numbers_as_they_were_written():
    data = (
        '{"ph": "X", "ts": 1694128201545123.456, "dur": 1.50, "pid": NaN, '
        '"args": {"Input Dims": [[8, 3], []], "grid": [1, {"a": 2.50}], "stream": 7}}'
    )
    (event,) = scan_events(data.encode(), 0).events

    assert (bytes(event.ts), bytes(event.dur)) == (b"1694128201545123.456", b"1.50")
    assert (bytes(event.args.shapes), bytes(event.args.grid)) == (b"[[8, 3], []]", b'[1, {"a": 2.50}]')
    assert event.args.stream == 7


def test_invalid_utf8_is_replaced_and_told():
    scanned = scan_events(b'{"ph": "X", "name": "a\xffb"}, {"ph": "X", "name": "\xe4\xbd\xa0"}', 5)

    assert [event.name for event in scanned.events] == ["a\ufffdb", "你"]
    (problem,) = scanned.problems.values()
    assert (problem.what, problem.offset) == ("invalid UTF-8 in a text (the bytes were replaced)", 5)


def test_lost_means_that_the_next_event_is_searched():
    data = f'{{"ph": "X", "inside": 1}}], oops "}}, {GOOD[0]}, {GOOD[1]}'.encode()[5:]
    scanned = scan_events(data, 0, is_lost=True)

    assert [event.name for event in scanned.events] == ["op0", "op1"]
    assert not scanned.is_lost and not scanned.is_closed


def test_lost_to_the_end_keeps_what_may_be_the_beginning_of_an_event():
    data = f"oops, {GOOD[0]}".encode()
    lost = scan_events(data[: len(data) - 3], 0, is_lost=True)
    assert lost.is_lost and lost.events == []

    assert len(scan_events(data[lost.end :], lost.end, is_lost=True).events) == 1


def test_escaped_quotes_are_not_each_taken_for_a_beginning():
    """GIVEN a text that is never closed THEN it is read to its end once, and not from each quote in it again."""
    assert scan._TOKEN.findall('{oops "' + '\\"' * 9) == ["{"]
    assert scan._TOKEN.findall('{"a\\"b": "\\\\", "c"}') == ["{", '"a\\"b"', '"\\\\"', '"c"', "}"]


HOSTILE = [
    '{"ph": "X", "a": [',
    "{x[},",
    '{"ph": "X", "a": "',
    "oops}",
    "}, {",
    '{"a": {}, {',
    "[[[[[{",
    '{"ph":"X","ts":1}, {"ph": ',
    ", {}x",
    '{"a":[{"ph":"X"},',
    '{"ph":"X","ts":1},[',
    '{oops "' + '\\"' * 500_000,
]


@pytest.mark.long
@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_is_read_again_and_again(monkeypatch, hostile):
    """GIVEN hostile text THEN what is read of it, all attempts together, is a few times its length."""
    num_read = 0

    def counted(text: str, position: int):
        nonlocal num_read
        try:
            value, end = value_at(text, position)
        except ValueError as error:
            reached = len(text) if is_incomplete(error, text) else getattr(error, "pos", position + 1000)
            num_read += reached - position
            raise
        num_read += end - position
        return value, end

    monkeypatch.setattr(scan, "value_at", counted)
    text = hostile * ((1 << 20) // len(hostile))
    scan_events(text.encode(), 0, is_last=True)

    assert num_read < 10 * len(text)


def test_ten_thousand_broken_events_cost_none_of_the_others():
    """GIVEN three of four events broken THEN every fourth is read, and each stretch between them is one problem."""
    four = [GOOD[1], BROKEN["no value"], BROKEN["a bad escape"], BROKEN["a missing brace"]]
    data = ", ".join([*four * 10_000, GOOD[2]]).encode()
    decoded = decode_slice(data, 0)

    assert decoded.columns.num_events == 10_001
    assert [(p.what, p.num) for p in decoded.problems.values()] == [("not valid JSON", 10_000)]
    assert decoded.end == len(data)

"""Recorded values as columns: exact, and null where they are not of the column's type."""

from __future__ import annotations

import decimal
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.trace.values import floats, id_text, integers, json_texts, texts, times


@pytest.mark.parametrize(
    ("written", "nanoseconds"),
    [
        ("7", 7_000),
        ("0", 0),
        ("7.5", 7_500),
        ("7.25", 7_250),
        ("7.125", 7_125),
        ("0.001", 1),
        ("-3.002", -3_002),
        ("1694128201545123", 1_694_128_201_545_123_000),
        ("1694128201545123.456", 1_694_128_201_545_123_456),  # a float would say …123.5
        ("9007199254740993.001", 9_007_199_254_740_993_001),  # one more than a float can count to
        ("1.5e3", 1_500_000),
        ("1E3", 1_000_000),
        ("1e-3", 1),
        ("1.694128201545123456e15", 1_694_128_201_545_123_456),
        ('"42.001"', 42_001),
        ("1.0004", 1_000),
        ("1.0006", 1_001),
        ("99999999999999999999", None),
        ("1e400", None),
        ("NaN", None),
        ("Infinity", None),
        ("null", None),
        ("true", None),
        ("", None),
        ('""', None),
        ('"soon"', None),
        ("{}", None),
    ],
)
def test_a_time_becomes_whole_nanoseconds(written, nanoseconds):
    assert times(written.encode()).to_list() == [nanoseconds]


@given(st.lists(st.decimals(-(10**15), 10**15, places=3, allow_nan=False), min_size=1))
def test_no_time_loses_a_nanosecond(microseconds):
    written = ",".join(f"{value:f}" for value in microseconds)
    exact = [int(value.scaleb(3, decimal.Context(prec=40))) for value in microseconds]

    assert times(written.encode()).to_list() == exact


@pytest.mark.parametrize(
    ("values", "whole"),
    [
        ([1, None, -3], [1, None, -3]),
        (["7", 8, " 9 "], [7, 8, 9]),
        ([7.0, 7.9, 1e300], [7, 7, None]),
        ([2**63 - 1, 2**63, 2**70, -(2**63)], [2**63 - 1, None, None, -(2**63)]),
        (["stream 7", "0x7f", "", True], [None, None, None, 1]),
        ([math.nan, math.inf, None], [None, None, None]),
    ],
)
def test_a_whole_number_or_nothing(values, whole):
    assert integers(values).to_list() == whole


def test_a_finite_number_or_nothing():
    assert floats([1, 2.5, None, "3.5", "half", math.nan, math.inf]).to_list() == [
        1,
        2.5,
        None,
        3.5,
        None,
        None,
        None,
    ]
    assert floats([2**70, 1.5, math.nan]).to_list() == [2.0**70, 1.5, None]


def test_texts_and_what_is_none():
    assert texts(["a", None, "", 7, True]).to_list() == ["a", None, None, "7", "True"]


def test_json_is_the_same_in_every_layout():
    layouts = [b'[[8,3],["a  b"]]', b'[[8, 3], ["a  b"]]', b'[\n  [\n    8,\n    3\n  ],\n  ["a  b"]\n]']

    assert set(json_texts(layouts)) == {'[[8, 3], ["a  b"]]'}
    assert json_texts([b"", b"null", b"[NaN, 1]", b'["\xff"]', b"[" * 5000]) == [
        None,
        None,
        "[NaN, 1]",
        '["\ufffd"]',
        "[" * 5000,
    ]


def test_one_thread_has_one_name_however_it_is_written():
    assert {id_text(25738), id_text(25738.0), id_text("25738")} == {"25738"}
    assert [id_text(None), id_text(True), id_text(0.5), id_text(math.inf), id_text("")] == [
        None,
        "1",
        "0.5",
        "inf",
        "",
    ]

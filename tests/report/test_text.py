"""Numbers and names as text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.formatting import average, count, duration, flops, milliseconds, percent, safe, significant, size


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0, 3, "0"),
        (1, 3, "1.00"),
        (12.345, 3, "12.3"),
        (123.45, 3, "123"),
        (1234.5, 3, "1,230"),
        (1234567, 3, "1,230,000"),
        (0.00123456, 3, "0.00123"),
        (-12.345, 3, "-12.3"),
        (9.9999, 2, "10.0"),
        (math.inf, 3, "inf"),
        (math.nan, 3, "nan"),
    ],
)
def test_significant_digits(value, digits, text):
    assert significant(value, digits) == text


@pytest.mark.parametrize(
    ("ns", "noise_ns", "text"),
    [
        (57_631_400, 0, "57.63 ms"),
        (57_631_400, 900_000, "57.6 ms"),
        (57_631_400, 9_000_000, "58 ms"),
        (57_631_400, 90_000_000, "58 ms"),
        (57_631_400, 1, "57.63 ms"),
        (0, 5, "0 ms"),
        (1_500, 0, "0.001500 ms"),
        (12_000_000_000, 0, "12,000 ms"),
    ],
)
def test_milliseconds_have_the_digits_the_noise_allows(ns, noise_ns, text):
    assert milliseconds(ns, noise_ns) == text


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (percent, 0.1234, "12.3 %"),
        (percent, 0, "0.0 %"),
        (percent, 1.5, "150.0 %"),
        (size, 0, "0 B"),
        (size, 1023, "1023 B"),
        (size, 1024, "1.00 KiB"),
        (size, 3 << 20, "3.00 MiB"),
        (size, 80 << 30, "80.0 GiB"),
        (size, 2 << 40, "2.00 TiB"),
        (count, 0, "0"),
        (count, 9_999, "9,999"),
        (count, 10_000, "10.0 k"),
        (count, 124_439_808, "124 M"),
        (count, 7_000_000_000, "7.00 B"),
        (count, 1_200_000_000_000, "1.20 T"),
        (flops, 999, "999 FLOP"),
        (flops, 3_072_000, "3.07 MFLOP"),
        (flops, 5e15, "5.00 PFLOP"),
    ],
)
def test_units(function, value, text):
    assert function(value) == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ms"),
        (1, "1 ns"),
        (760, "760 ns"),
        (999.4, "999 ns"),
        (999.6, "1.000 µs"),
        (52_910, "52.91 µs"),
        (999_940, "999.9 µs"),
        (999_960, "1.000 ms"),
        (18_760_880, "18.76 ms"),
        (999_999_999, "1.000 s"),
        (13_340_000_000, "13.34 s"),
        (7_200_000_000_000, "7,200 s"),
        (-1_500_000, "-1.500 ms"),
    ],
)
def test_a_duration_is_in_the_unit_that_suits_it(ns, text):
    assert duration(ns) == text


@given(st.integers(1, 10**12))
def test_a_duration_is_short_and_right(ns):
    number, unit = duration(ns).split()

    assert len(number) <= 5
    unit_ns = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}[unit]
    assert float(number.replace(",", "")) * unit_ns == pytest.approx(ns, rel=0.0006)


@pytest.mark.parametrize(("value", "text"), [(7.0, "7"), (25.2, "25.2"), (0.04, "0"), (1053, "1,053"), (0.5, "0.5")])
def test_an_average_is_whole_or_has_one_decimal(value, text):
    assert average(value) == text


def test_rates_are_in_tflops_from_a_tenth_on():
    assert flops(1.2e15, "/s") == "1,200 TFLOP/s"
    assert flops(3e11, "/s") == "0.300 TFLOP/s"
    assert flops(3e9, "/s") == "3.00 GFLOP/s"


@given(st.floats(min_value=1e-9, max_value=1e18), st.integers(1, 6))
def test_significant_text_is_the_number_to_that_many_digits(value, digits):
    text = significant(value, digits)

    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.5 * 10 ** (1 - digits) * 1.0001)


EVIL = "\x1b[31m\x00\x07\r\n\t\u202e\u2066\u200f\u200b\ufeff\x7f\x9b\ud800\u2028"


def test_safe_leaves_nothing_that_a_terminal_obeys():
    assert safe(f"a{EVIL}b") == "a?[31m" + "?" * (len(EVIL) - 5) + "b"


@given(st.text())
def test_safe_text_is_printable_and_bounded(text):
    cleaned = safe(text, most=50)

    assert len(cleaned) <= 50 and (cleaned.isprintable() or cleaned == "")
    if len(text) <= 50 and text.isprintable():
        assert cleaned == text


@pytest.mark.parametrize("value", [None, 3, 2.5, ["a"], {"a": 1}])
def test_safe_takes_anything(value):
    assert safe(value) == str(value)


def test_safe_says_that_it_cut():
    assert safe("x" * 300) == "x" * 199 + "…"

"""`key=value`: what is right is read, what is wrong is answered with the nearest right one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import UsageError
from stepscope.workloads.users_code import check_key, nearest, parse_value
from stepscope.workloads.workload import Knob


def knob(kind, default, values=None, name="size"):
    return Knob(name=name, kind=kind, default=default, values=values, about="")


BOOL = knob(bool, False, (True, False))
CHOICE = knob(str, "sdpa", ("naive", "builtin", "sdpa"), name="attention")


@pytest.mark.parametrize(
    ("which", "text", "value"),
    [
        (knob(int, 1), "4096", 4096),
        (knob(int, 1), "16_384", 16384),
        (knob(int, 1), "-3", -3),
        (knob(int, 1), " 7 ", 7),
        (knob(float, 1.0), "1.25", 1.25),
        (knob(float, 1.0), "2", 2.0),
        (knob(float, 1.0), "1e-3", 1e-3),
        (knob(str, "a"), "any thing", "any thing"),
        (BOOL, "true", True),
        (BOOL, "off", False),
        (BOOL, "On", True),
        (CHOICE, "naive", "naive"),
        (knob(int, 0, (0, 1)), "1", 1),
        (knob(float, 1.0, (1.0, 2.5)), "1", 1.0),
    ],
)
def test_a_right_text_is_its_value(which, text, value):
    found = parse_value(which, text)

    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("which", "text", "message"),
    [
        (knob(int, 1), "4k", "size=4k: must be an integer"),
        (knob(int, 1), "1.0", "size=1.0: must be an integer"),
        (knob(int, 1), "", "size=: must be an integer"),
        (knob(float, 1.0), "x", "size=x: must be a number"),
        (knob(float, 1.0), "nan", "size=nan: must be a number"),
        (knob(float, 1.0), "inf", "size=inf: must be a number"),
        (BOOL, "1", "size=1: must be true or false (on, off)"),
        (CHOICE, "naiv", "attention=naiv: did you mean naive?"),
        (CHOICE, "SDPA", "attention=SDPA: did you mean sdpa?"),
        (CHOICE, "zzz", "attention=zzz: one of: naive, builtin, sdpa"),
        (knob(int, 0, (0, 1)), "2", "size=2: one of: 0, 1"),
        (knob(int, 0, (0, 1)), "x", "size=x: one of: 0, 1"),
    ],
)
def test_a_wrong_text_is_answered(which, text, message):
    with pytest.raises(UsageError) as caught:
        parse_value(which, text)

    assert str(caught.value) == message


def test_keys():
    assert check_key([BOOL, CHOICE], "attention") is CHOICE
    with pytest.raises(UsageError, match=r"'atention': did you mean attention\?"):
        check_key([BOOL, CHOICE], "atention")
    with pytest.raises(UsageError, match="one of: size, attention"):
        check_key([BOOL, CHOICE], "q")
    with pytest.raises(UsageError, match="none exist"):
        check_key([], "q")


@given(st.text(), st.sampled_from([knob(int, 1), knob(float, 1.0), BOOL, CHOICE, knob(str, "")]))
def test_any_text_is_a_value_of_the_kind_or_a_usage_error(text, which):
    try:
        value = parse_value(which, text)
    except UsageError:
        return
    assert type(value) is which.kind and (which.values is None or value in which.values)


def test_a_long_list_is_cut():
    assert nearest("?", map(str, range(21))).endswith("18, 19, … (21)")
    assert nearest("?", map(str, range(20))).endswith("18, 19")


@given(st.text(), st.lists(st.text(min_size=1)))
def test_the_nearest_is_always_a_sentence(word, words):
    assert nearest(word, words)

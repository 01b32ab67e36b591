"""Reads `key=value` as typed by a user, with suggestions for mistakes."""

import difflib
import math
from collections.abc import Iterable, Sequence

from stepscope.errors import UsageError
from stepscope.workloads.workload import Knob, Value

MOST_SHOWN = 20
BOOLS = {"true": True, "on": True, "false": False, "off": False}


def nearest(word: str, right: Iterable[str]) -> str:
    """Return a suggestion: the most similar valid word, or a list of valid words if none is similar.

    >>> nearest("seq_length", ["batch", "seq_len"]), nearest("x", ["batch", "seq_len"])
    ('did you mean seq_len?', 'one of: batch, seq_len')
    """
    words = list(dict.fromkeys(right))
    whole = next((known for known in words if word.lower() in known.lower().split("_")), None)
    if whole is not None:  # fp16 is more like autocast_fp16 than like bf16
        return f"did you mean {whole}?"
    lowered = {known.lower(): known for known in reversed(words)}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    if close:
        return f"did you mean {lowered[close[0]]}?"
    shown = ", ".join(words[:MOST_SHOWN]) + (f", … ({len(words)})" if len(words) > MOST_SHOWN else "")
    return f"one of: {shown}" if words else "none exist"


def check_key(knobs: Sequence[Knob], key: str) -> Knob:
    """Return the knob of that name; UsageError with a suggestion if there is none."""
    for knob in knobs:
        if knob.name == key:
            return knob
    raise UsageError(f"Unknown knob {key!r}: {nearest(key, (knob.name for knob in knobs))}")


def parse_value(knob: Knob, text: str) -> Value:
    """Return the value of a knob from text; UsageError with the allowed values.

    >>> parse_value(Knob(name="seq_len", kind=int, default=128, values=None, about=""), "16_384")
    16384
    """
    text = text.strip()
    if knob.kind is bool:
        if text.lower() not in BOOLS:
            raise UsageError(f"{knob.name}={text}: must be true or false (on, off)")
        return BOOLS[text.lower()]
    if knob.values is not None:
        given = _number(knob.kind, text) if knob.kind in (int, float) else text
        for value in knob.values:
            if given == value and given is not None:
                return value
        raise UsageError(f"{knob.name}={text}: {nearest(text, map(str, knob.values))}")
    if knob.kind is str:
        return text
    number = _number(knob.kind, text)
    if number is None:
        raise UsageError(f"{knob.name}={text}: must be {'an integer' if knob.kind is int else 'a number'}")
    return number


def _number(kind: type, text: str) -> int | float | None:
    try:
        number: int | float = int(text) if kind is int else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None

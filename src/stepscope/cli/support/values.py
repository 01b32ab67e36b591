"""Values as people type them after an option; argparse shows the message of a wrong one."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable


def positive(text: str) -> int:
    """Return a positive integer.

    >>> positive("8")
    8
    """
    return int(_above_zero(text, int, "integer"))


def seconds(text: str) -> float:
    """Return a positive number, such as seconds or minutes.

    >>> seconds("1.5")
    1.5
    """
    return _above_zero(text, float, "number")


def _above_zero(text: str, kind: type[int] | type[float], noun: str) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = 0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive {noun}")
    return number


def share(text: str) -> float:
    """Return a percentage as a share.

    >>> share("2%")
    0.02
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be a percentage, such as 2%")
    return float(found.group(1)) / 100


def words(texts: Iterable[str]) -> list[str]:
    """Return the values of an option that may be repeated or separated by commas.

    >>> words(["device,dtype", "ranks"])
    ['device', 'dtype', 'ranks']
    """
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]

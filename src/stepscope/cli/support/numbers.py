"""Numbers as people type them after an option; argparse shows the message of a wrong one."""

from __future__ import annotations

import argparse
import re


def positive(text: str) -> int:
    """Return a positive integer.

    >>> positive("8")
    8
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer")
    return number


def seconds(text: str) -> float:
    """Return a positive number, such as seconds or minutes.

    >>> seconds("1.5")
    1.5
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number")
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

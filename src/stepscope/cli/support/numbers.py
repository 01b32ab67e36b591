"""Numbers as people type them after an option."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number from 1 on; what argparse shows when it is none.

    >>> positive("8")
    8
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return number

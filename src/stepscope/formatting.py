"""Numbers and names as text: the only place where a number becomes a string for people."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, no exponent, thousands separated.

    >>> significant(57.6314), significant(1234567.0), significant(0.00123456)
    ('57.6', '1,230,000', '0.00123')
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, decimals):,.{max(0, decimals)}f}"


def milliseconds(ns: float, noise_ns: float = 0.0) -> str:
    """Milliseconds, whatever their number, with no more digits than the noise allows: for figures to be compared.

    >>> milliseconds(57_631_400, noise_ns=900_000), milliseconds(57_631_400)
    ('57.6 ms', '57.63 ms')
    """
    digits = 4
    if noise_ns > 0 and ns > 0:
        digits = min(4, max(2, math.floor(math.log10(ns / noise_ns)) + 2))
    return f"{significant(ns / 1e6, digits)} ms"


def duration(ns: float, digits: int = 4) -> str:
    """A time in the unit in which it is a number of one to three places before the point.

    >>> duration(760), duration(52_910), duration(18_760_880), duration(13_340_000_000)
    ('760 ns', '52.91 µs', '18.76 ms', '13.34 s')
    """
    ns = float(f"{round(ns):.{digits}g}")  # what rounds up to a thousand of a unit is one of the next
    if abs(ns) < 1000:
        return f"{ns:.0f} ns" if ns else "0 ms"
    for nanoseconds, unit in ((1e3, "µs"), (1e6, "ms")):
        text = significant(ns / nanoseconds, digits)
        if "," not in text:
            return f"{text} {unit}"
    return f"{significant(ns / 1e9, digits)} s"


def percent(share: float) -> str:
    """A share in per cent.

    >>> percent(0.1234)
    '12.3 %'
    """
    return f"{100 * share:.1f} %"


def size(num_bytes: float) -> str:
    """Bytes in binary units.

    >>> size(13_145_000_000), size(512)
    ('12.2 GiB', '512 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{significant(num_bytes)} {unit}"
        num_bytes /= 1024
    raise AssertionError


def count(value: float) -> str:
    """A count in thousands, millions or billions.

    >>> count(124_439_808), count(950)
    ('124 M', '950')
    """
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{significant(value / (1e3 if unit == 'k' else limit))} {unit}"
    return f"{value:,.0f}"


def average(value: float) -> str:
    """A mean of counts: whole where it is, else with one decimal.

    >>> average(7.0), average(25.2), average(1053.04)
    ('7', '25.2', '1,053')
    """
    text = f"{value:,.1f}"
    return text.removesuffix(".0")


def plural(number: int, noun: str) -> str:
    """A number with its noun.

    >>> plural(1, "recompile"), plural(3, "recompile")
    ('1 recompile', '3 recompiles')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(values: Iterable[Any]) -> str:
    """Values in a row.

    >>> listed([512, 2048, 8192]), listed(["width"])
    ('512, 2048 and 8192', 'width')
    """
    texts = list(map(str, values))
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def flops(value: float, per: str = "") -> str:
    """Floating-point operations in decimal units.

    >>> flops(6.98e12), flops(1.2e14, "/s")
    ('6.98 TFLOP', '120 TFLOP/s')
    """
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        # Rates from 0.1 TFLOP/s on are said in TFLOP/s: that is how limits are quoted.
        if abs(value) >= (limit / 10 if per and unit == "T" else limit) and not (per and unit == "P"):
            return f"{significant(value / limit)} {unit}FLOP{per}"
    return f"{value:,.0f} FLOP{per}"


def safe(text: object, most: int = 200) -> str:
    r"""Somebody else's text for a terminal: no control characters, no direction marks, bounded.

    >>> safe("evil\x1b[31m\nname")
    'evil?[31m?name'
    """
    cleaned = "".join(c if c.isprintable() else "?" for c in str(text))
    return cleaned if len(cleaned) <= most else cleaned[: most - 1] + "…"

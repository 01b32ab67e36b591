"""Numbers and names as text: the only place where a number becomes a string for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


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


def elapsed(seconds: float) -> str:
    """A time that people live in, in its two largest units.

    >>> elapsed(7), elapsed(95), elapsed(7_890), elapsed(266_400), elapsed(0.4)
    ('7 s', '1 min 35 s', '2 h 11 min', '3 d 2 h', '0 s')
    """
    whole = max(0, int(seconds))
    for size, unit, part, name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size:,} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{whole} s"


def span(ns: float) -> str:
    """Return a time that may be days long, with three digits.

    >>> span(4.25e9), span(5.4e12), span(2.6e14)
    ('4.25 s', '1.50 h', '3.01 days')
    """
    for unit, length_ns in (("days", 86_400e9), ("h", 3_600e9), ("min", 60e9)):
        if ns >= 1.5 * length_ns or (unit == "h" and ns >= length_ns):
            return f"{significant(ns / length_ns)} {unit}"
    return duration(ns, 3)


def duration_range(low_ns: float, high_ns: float) -> str:
    """A range of times, with one unit if both have the same.

    >>> duration_range(9_650_000, 14_480_000), duration_range(800_000, 2_000_000)
    ('9.65 to 14.5 ms', '800 µs to 2.00 ms')
    """
    low, high = duration(low_ns, 3), duration(high_ns, 3)
    number, unit = low.split()
    return f"{number} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"


def percent(share: float) -> str:
    """A share in per cent.

    >>> percent(0.1234)
    '12.3 %'
    """
    return f"{100 * share:.1f} %"


def whole_percent(share: float) -> str:
    """Return a share in whole percent, for sentences.

    >>> whole_percent(0.814)
    '81 %'
    """
    return f"{100 * share:.0f} %"


def size(num_bytes: float) -> str:
    """Bytes in binary units.

    >>> size(13_145_000_000), size(512), size(1 << 40)
    ('12.2 GiB', '512 B', '1.00 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
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


def plural(number: float, noun: str, nouns: str = "") -> str:
    """Return a count with its noun, or with `nouns` for every other number than 1.

    >>> plural(1, "recompile"), plural(1204, "kernel"), plural(4, "stretch")
    ('1 recompile', '1,204 kernels', '4 stretches')
    >>> plural(1, "cast takes", "casts take"), plural(2, "cast takes", "casts take")
    ('1 cast takes', '2 casts take')
    """
    text = f"{number:,.0f}"
    many = nouns or f"{noun}{'es' if noun.endswith('ch') else 's'}"
    return f"{text} {noun if text == '1' else many}"


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
    cleaned = str(text)
    if not cleaned.isprintable():
        cleaned = "".join(c if c.isprintable() else "?" for c in cleaned)
    return cleaned if len(cleaned) <= most else cleaned[: most - 1] + "…"


def fit_names(names: Sequence[str], room: int, head: float = 0.5) -> list[str]:
    """Return the names in at most `room` characters, cut so that different names stay different.

    >>> fit_names(["model.layers.attention.query", "model.layers.attention.key"], 14, head=1.0)
    ['model.…n.query', 'model.…ion.key']
    """
    texts = [shortened(name, room, head) for name in names]
    for share in (0.5, 0.25, 0.75):
        for places in alike(texts, names):
            for place in places:
                texts[place] = shortened(names[place], room, share)
    for places in alike(texts, names):
        differ = num_common([names[place] for place in places])
        for place in places:
            begin = names[place][: room // 3]
            rest = names[place][max(len(begin), differ - 3) :]
            texts[place] = f"{begin}…{shortened(rest, room - len(begin) - 1, 1.0)}"
    return texts


def alike(texts: Sequence[str], names: Sequence[str]) -> list[list[int]]:
    """Return the places of texts that are the same for different names."""
    places: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        places.setdefault(text, []).append(place)
    return [same for same in places.values() if len({names[place] for place in same}) > 1]


def num_common(texts: Sequence[str]) -> int:
    """Return how many leading characters all texts share."""
    lowest, highest = min(texts), max(texts)
    return next((i for i, (one, other) in enumerate(zip(lowest, highest)) if one != other), len(lowest))


def shortened(text: str, room: int, share: float = 0.5) -> str:
    """Return a text in at most `room` characters; `share` of what is kept is its beginning, the rest its end.

    >>> shortened("a_very_long_name", 9), shortened("a_very_long_name", 9, 1.0)
    ('a_ve…name', 'a_very_l…')
    """
    if len(text) <= room:
        return text
    head = round(share * (room - 1))
    tail = room - 1 - head
    return f"{text[:head]}…{text[len(text) - tail :]}" if room > 0 else ""


def title_of(name: str) -> str:
    """A column's name for people, without its unit.

    >>> title_of("num_calls"), title_of("device_total_ns"), title_of("flops_per_s"), title_of("peak_bytes")
    ('calls', 'device total', 'FLOP/s', 'peak')
    >>> title_of("bus_bandwidth_bytes_per_s"), title_of("power_watts")
    ('bus bandwidth', 'power')
    """
    if name in _WHOLE:
        return _WHOLE[name]
    if name.endswith("bandwidth_bytes_per_s"):
        name = name.removesuffix("_bytes_per_s")
    for suffix in ("_ns", "_bytes", *_SMALL_UNITS):
        name = name.removesuffix(suffix)
    return name.removeprefix("num_").replace("_", " ").replace("gpu", "GPU")


def heading(title: str) -> str:
    """Return a title with a capital first letter; identifiers stay as they are.

    >>> heading("why it was idle"), heading("fp32_matmul   faster")
    ('Why it was idle', 'fp32_matmul   faster')
    """
    first = title.partition(" ")[0]
    return title if "_" in first or "=" in first else title[:1].upper() + title[1:]


def cell(name: str, value: Any) -> str:
    """A value of a column for people.

    >>> cell("total_ns", 18_760_880), cell("share", 0.123), cell("peak_bytes", 512), cell("num_calls", 80)
    ('18.8 ms', '12.3 %', '512 B', '80')
    >>> cell("power_watts", 575.83), cell("sm_clock_mhz", 1980)
    ('576 W', '1,980 MHz')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return safe(value, 1000)
    if name.endswith("_ns"):
        return duration(value, 3)
    if name.endswith("bytes_per_s"):
        return f"{significant(value / 1e9)} GB/s"
    if name.endswith("flops_per_s"):
        return flops(value, "/s")
    if name.endswith("bytes"):
        return size(value)
    if name.endswith("share"):
        return percent(value)
    if name.endswith("flops"):
        return flops(value)
    for suffix, (unit, digits) in _SMALL_UNITS.items():
        if name.endswith(suffix):
            return f"{significant(value, digits)} {unit}"
    if name.startswith("num_"):
        return average(value)
    return f"{value:,}" if isinstance(value, int) else significant(value)


def is_numeric(values: Sequence[Any]) -> bool:
    """Whether a column is one of figures: all that is known of it are numbers.

    >>> is_numeric([1, None, 2.5]), is_numeric([1, "a"]), is_numeric([True]), is_numeric([None])
    (True, False, False, False)
    """
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known)


class Scale(NamedTuple):
    """How the figures of an axis are written: divided by `divisor`, under `unit`."""

    divisor: float
    unit: str


def scale(name: str, largest: float) -> Scale:
    """The unit in which the largest figure of an axis is easy to read.

    >>> scale("total_ns", 3.2e6), scale("peak_bytes", 5 << 30), scale("busy_share", 0.4), scale("num_calls", 9)
    (Scale(divisor=1000000.0, unit='ms'), Scale(divisor=1073741824, unit='GiB'), Scale(divisor=0.01, unit='%'), \
Scale(divisor=1.0, unit=''))
    """
    for suffix, steps in _SCALES.items():
        if name.endswith(suffix):
            return next((step for step in steps if abs(largest) >= step.divisor), steps[-1])
    return Scale(1.0, "")


_SMALL_UNITS = {"_watts": ("W", 3), "_mhz": ("MHz", 4), "_joules": ("J", 4)}
"""Of figures that are always of one size: the unit, and the digits that mean something."""
_WHOLE = {
    "flops_per_s": "FLOP/s", "flops_per_byte": "FLOPs per byte", "bytes_per_s": "bandwidth", "flops": "FLOP",
    "bytes": "size", "share": "share", "tokens_per_s": "tokens/s", "mfu_share": "MFU",
    "peak_flops_per_s": "peak FLOP/s", "back_end": "backend",
    "batch_heads_queries_keys_width": "sizes", "exposed_communication_share": "exposed comm.",
    "overlapped_communication_share": "hidden comm.",
}  # fmt: skip
_SCALES = {
    "_ns": [Scale(1e9, "s"), Scale(1e6, "ms"), Scale(1e3, "µs"), Scale(1.0, "ns")],
    "bytes_per_s": [Scale(1e12, "TB/s"), Scale(1e9, "GB/s"), Scale(1e6, "MB/s"), Scale(1.0, "B/s")],
    "flops_per_s": [Scale(1e12, "TFLOP/s"), Scale(1e9, "GFLOP/s"), Scale(1e6, "MFLOP/s"), Scale(1.0, "FLOP/s")],
    "bytes": [Scale(1 << 30, "GiB"), Scale(1 << 20, "MiB"), Scale(1 << 10, "KiB"), Scale(1.0, "B")],
    "share": [Scale(0.01, "%")],
    "flops": [Scale(1e12, "TFLOP"), Scale(1e9, "GFLOP"), Scale(1e6, "MFLOP"), Scale(1.0, "FLOP")],
    "watts": [Scale(1.0, "W")],
    "mhz": [Scale(1.0, "MHz")],
    "joules": [Scale(1.0, "J")],
    "tokens_per_s": [Scale(1e6, "M tokens/s"), Scale(1e3, "k tokens/s"), Scale(1.0, "tokens/s")],
}
"""By the end of a name; the first that fits, so longer ends come first."""

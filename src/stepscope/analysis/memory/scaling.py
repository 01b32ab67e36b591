"""How each allocation grows with sequence length or batch, from two recordings that differ in one of them."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stepscope.analysis.memory.module_tree import starred
from stepscope.analysis.memory.size_formulas import SYMBOLS, common_formula, find_symbols
from stepscope.analysis.memory.timeline import on_device
from stepscope.errors import UsageError

GROWTHS = ("constant", "linear", "quadratic", "other")  # the first three by power


@dataclass(frozen=True)
class Grown:
    """Allocations from one place with the same growth, in both recordings."""

    growth: str  # `constant`, `linear`, `quadratic`, or `other`
    exponent: float  # 1 is linear; a sum of terms lies in between
    op: str | None
    module: str | None  # `*` replaces every number
    phase: str | None
    owner: str | None
    num_allocations: int
    bytes: tuple[int, int]  # total of all of them, in each recording
    formula: str | None  # A formula for the bytes of the largest, valid in both


@dataclass(frozen=True)
class AtPeak:
    """Memory alive at the first recording's peak with the same growth, in each recording."""

    growth: str
    bytes: tuple[int, int]


@dataclass(frozen=True)
class Growth:
    """Two recordings of one model, side by side."""

    symbol: str  # what differs: `S` (sequence length) or `B` (batch)
    values: tuple[int, int]
    peak_bytes: tuple[int, int]  # peak of the tracked allocations
    at_peak: tuple[AtPeak, ...]
    rows: tuple[Grown, ...]  # the largest in the second recording first
    num_unmatched: tuple[int, int]  # allocations without a counterpart in the other recording

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        plain = asdict(self)
        return plain | {"rows": plain["rows"][:most]}


def growth(one: Mapping[str, Any], other: Mapping[str, Any]) -> Growth:
    """Return how memory grows between the two; UsageError unless they differ only in length or batch."""
    both = (one, other)
    symbols = [find_symbols(memory) for memory in both]
    symbol = _what_differs(symbols[0], symbols[1])
    values = (symbols[0][symbol], symbols[1][symbol])
    if not all(values):
        raise UsageError(f"{symbol} is 0 in one of the two, so memory cannot be followed as it grows")
    found = [on_device(memory) for memory in both]
    levels, places = [levels for _, levels in found], [_places(mine) for mine, _ in found]
    groups: dict[tuple[Any, ...], list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = defaultdict(list)
    at_peak: dict[str, Counter[int]] = defaultdict(Counter)
    num_matched = 0
    for place, allocations in places[0].items():
        for pair in zip(allocations, places[1].get(place, ())):
            num_matched += 1
            sizes = (pair[0]["bytes"], pair[1]["bytes"])
            fits = (sizes[0] * values[1] ** power == sizes[1] * values[0] ** power for power in range(3))
            kind = next((kind for kind, fit in zip(GROWTHS, fits) if fit), "other")
            op, module, phase, *_ = place
            groups[kind, op, starred(module), phase, pair[0].get("owner")].append(pair)
            if any(levels[0].alive_at_peak(pair[:1])):
                at_peak[kind].update(dict(enumerate(sizes)))
    rows = [_grown(key, pairs, symbols, values) for key, pairs in groups.items()]
    num_one, num_other = (len(mine) for mine, _ in found)
    return Growth(
        symbol=symbol,
        values=values,
        peak_bytes=(levels[0].peak_bytes, levels[1].peak_bytes),
        at_peak=tuple(AtPeak(kind, (at_peak[kind][0], at_peak[kind][1])) for kind in GROWTHS if kind in at_peak),
        rows=tuple(sorted(rows, key=lambda row: -row.bytes[1])),
        num_unmatched=(num_one - num_matched, num_other - num_matched),
    )


def _what_differs(one: Mapping[str, int], other: Mapping[str, int]) -> str:
    if "B" not in one or "B" not in other:
        raise UsageError("Memory growth is unknown: one of the recordings has no model input.")
    if ("S" in one) != ("S" in other):
        raise UsageError("Memory growth is unknown: only one of the recordings has an input with a length.")
    differ = [name for name in SYMBOLS if one.get(name) != other.get(name)]
    if differ not in (["S"], ["B"]):
        what = " and ".join(f"{SYMBOLS[name]} ({one.get(name)}, {other.get(name)})" for name in differ) or "nothing"
        raise UsageError(
            f"Memory growth needs two recordings that differ only in length or only in batch. These differ in {what}."
        )
    return differ[0]


def _places(allocations: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Return allocations by op, module, phase and dtype, in order; earlier ones also by owner."""
    places: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for each in sorted(allocations, key=lambda each: -1 if each.get("born") is None else each["born"]):
        owner = each.get("owner") if each.get("born") is None else None
        place = (*(each.get(name) for name in ("op", "module", "phase", "dtype")), owner)
        places[place].append(each)
    return places


def _grown(
    key: tuple[Any, ...],
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]],
    symbols: list[dict[str, int]],
    values: tuple[int, int],
) -> Grown:
    kind, op, module, phase, owner = key
    sums = (sum(one["bytes"] for one, _ in pairs), sum(other["bytes"] for _, other in pairs))
    exponent = math.log(sums[1] / sums[0]) / math.log(values[1] / values[0]) if all(sums) else 0.0
    largest = max(pairs, key=lambda pair: pair[1]["bytes"])
    formula = common_formula(list(zip(largest, symbols)))
    return Grown(kind, round(exponent, 3), op, module, phase, owner, len(pairs), sums, formula)

"""Why an allocation has its size: the product of batch, length, heads and widths that gives its bytes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

SYMBOLS = {
    "B": "batch",
    "S": "length",
    "H": "heads",
    "d": "model width",
    "ff": "feed-forward width",
    "V": "vocabulary",
    "E": "experts",
}
ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "complex128": 16,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
WEIGHTS = ("parameter", "buffer", "gradient", "optimizer_state", "autocast_weight_cast")
"""Owners whose sizes do not depend on batch and length."""
MOST_FACTOR = 8  # the largest factor that may remain unexplained by symbols

_INTEGERS = ("int64", "int32", "uint8")
_VOCABULARY = re.compile(r"emb|wte|tok|vocab|head|lm_", re.IGNORECASE)
_POWERS = {2: "²", 3: "³"}


def find_symbols(memory: Mapping[str, Any]) -> dict[str, int]:
    """Return the values of `SYMBOLS`, as far as shapes of inputs, parameters and activations show them."""
    device = memory["device"]
    shaped = [each for each in memory["allocations"] if each.get("shape")]
    mine = [each for each in shaped if each["device"] == device]
    weights = [(tuple(each["shape"]), each.get("module") or "") for each in mine if each.get("owner") == "parameter"]
    made = [tuple(each["shape"]) for each in mine if each.get("owner") in ("activation", "temporary")]
    inputs = [each for each in shaped if each.get("owner") == "input"]
    found = _batch_and_length(inputs, made) | _widths(weights)
    return found | _heads(made, found)


def _batch_and_length(inputs: Sequence[Mapping[str, Any]], made: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Return batch and length: an input's first and second dimension.

    Swapped if there are scores (…, first, first) but none (…, second, second).
    """

    def rank(each: Mapping[str, Any]) -> tuple[bool, int, int]:
        return (each.get("dtype") in _INTEGERS and len(each["shape"]) == 2, len(each["shape"]), each["bytes"])

    if not inputs:
        return {}
    best = max(inputs, key=rank)
    shape = best["shape"]
    has_length = len(shape) == 3 or (len(shape) == 2 and best.get("dtype") in _INTEGERS)
    if not has_length:
        return {"B": shape[0]}
    if _has_scores(made, shape[0], shape[1]) and not _has_scores(made, shape[1], shape[0]):
        return {"B": shape[1], "S": shape[0]}
    # Loops that shift targets by one keep one token more than the model sees.
    seen = Counter(size for dimensions in made for size in set(dimensions))
    at_once = Counter(size for dimensions in made for size in set(dimensions) if len(dimensions) == 2)
    lengths = [length for length in (shape[1], shape[1] - 1) if length]
    return {"B": shape[0], "S": max(lengths, key=lambda s: (seen[s] + at_once[shape[0] * s], s))}


def _has_scores(made: Iterable[tuple[int, ...]], length: int, batch: int) -> bool:
    return any(
        len(shape) > 2 and shape[-1] == shape[-2] == length > 1 and not math.prod(shape[:-2]) % batch
        for shape in made
    )


def _widths(weights: Sequence[tuple[tuple[int, ...], str]]) -> dict[str, int]:
    # Convolutions have kernel sizes in the last dimensions.
    matrices = [
        (shape[-2:], name)
        for shape, name in weights
        if len(shape) == 2 or (len(shape) == 3 and shape[-1] >= MOST_FACTOR)
    ]
    sizes = Counter(size for shape, _ in matrices for size in shape)
    width = max(sizes, key=lambda size: (sizes[size], -size), default=0)
    if sizes[width] < 2:  # a model of constant width
        return {}
    found = {"d": width}
    # The output matrix of the feed-forward has its width last; a gated one has two input matrices.
    led_to = {first for (first, last), _ in matrices if last == width}
    inner = Counter(last for (first, last), _ in matrices if first == width != last and {last, 2 * last} & led_to)
    if inner:
        found["ff"] = max(inner, key=lambda size: (inner[size], size))
    known = {width, found.get("ff", width), 2 * found.get("ff", width)}
    rows = [(bool(_VOCABULARY.search(name)), n) for (n, last), name in matrices if last == width and n not in known]
    named = [size for is_named, size in rows if is_named] or [size for _, size in rows if size > 4 * width]
    if named:
        found["V"] = max(named)
    experts = Counter(shape[0] for shape, _ in weights if len(shape) == 3 and shape[-1] >= MOST_FACTOR)
    if experts:
        found["E"] = experts.most_common(1)[0][0]
    return found


def _heads(made: Iterable[tuple[int, ...]], found: Mapping[str, int]) -> dict[str, int]:
    """Return the heads from scores (batch, heads, length, length) or (batch · heads, length, length), or from a split
    width."""
    batch, length, width = (found.get(name) for name in ("B", "S", "d"))
    votes: Counter[int] = Counter()
    for shape in made:
        if batch and width and len(shape) == 3 and shape[0] > batch and shape[0] % batch == 0:
            heads = shape[0] // batch
            if width % heads == 0 and shape[1] == shape[2] == length:
                votes[heads] += 2
            elif width % heads == 0 and sorted(shape[1:]) == sorted((length or 0, width // heads)):
                votes[heads] += 1
        if len(shape) != 4 or shape[0] != batch or shape[1] == 1:
            continue
        if shape[2] == shape[3] == length:
            votes[shape[1]] += 2
        elif width and shape[1] == length and shape[2] * shape[3] == width:
            votes[shape[2]] += 1
        elif width and shape[2] == length and shape[1] * shape[3] == width:
            votes[shape[1]] += 1
    return {"H": votes.most_common(1)[0][0]} if votes else {}


def formula(allocation: Mapping[str, Any], symbols: Mapping[str, int]) -> str | None:
    """Return the product of symbols, numbers and bytes per element that gives an allocation's bytes; None if none
    does.

    >>> tensor = {"shape": [8, 12, 64, 64], "dtype": "float32", "bytes": 8 * 12 * 64 * 64 * 4}
    >>> formula(tensor, {"B": 8, "H": 12, "S": 64, "d": 768})
    'B·H·S²·4'
    """
    return common_formula([(allocation, symbols)])


def common_formula(allocations: Sequence[tuple[Mapping[str, Any], Mapping[str, int]]]) -> str | None:
    """Return the one product that gives the bytes of all, each with its own values of the symbols."""
    first = allocations[0][0]
    shapes = [each.get("shape") for each, _ in allocations]
    item_bytes = ITEM_BYTES.get(str(first.get("dtype")))
    if item_bytes is None or any(shape is None or len(shape) != len(shapes[0] or ()) for shape in shapes):
        return None
    is_weight = first.get("owner") in WEIGHTS
    factors: Counter[str] = Counter()
    number = unnamed = 1
    for place, sizes in enumerate(zip(*(shape or () for shape in shapes))):
        position = "first" if place == 0 else "last" if place == len(shapes[0] or ()) - 1 else "middle"
        named = _explained(sizes, [symbols for _, symbols in allocations], position, is_weight)
        if named is None:
            return None
        factor, names = named
        number *= factor
        unnamed *= 1 if names else factor
        factors.update(names)
    # Heads appear where the width is split, or in scores; next to the whole width, it is a batch of equal size.
    if (
        factors["H"]
        and not factors["B"] + factors["d/H"]
        and factors["S"] < 2
        and all(_is_alike(s) for _, s in allocations)
    ):
        factors["B"], factors["H"] = factors["H"], 0
    # A storage can be larger than the first tensor seen in it: one of three chunks.
    wholes = {divmod(each["bytes"], item_bytes * max(1, math.prod(each["shape"]))) for each, _ in allocations}
    (whole, rest), *others = wholes
    if others or rest or not 1 <= whole <= MOST_FACTOR or unnamed > MOST_FACTOR or not factors:
        return None
    return _written(number * whole, factors, item_bytes)


def _is_alike(symbols: Mapping[str, int]) -> bool:
    return symbols.get("B") == symbols.get("H")


def _explained(
    sizes: Sequence[int], symbols: Sequence[Mapping[str, int]], position: str, is_weight: bool
) -> tuple[int, tuple[str, ...]] | None:
    """Return a number and names whose product is the dimension in every allocation."""
    if all(size == 1 for size in sizes):
        return 1, ()
    for factor, names in _candidates(symbols[0], position, is_weight):
        if all(_value(factor, names, values) == size for size, values in zip(sizes, symbols)):
            return factor, names
    return (sizes[0], ()) if len(set(sizes)) == 1 and sizes[0] <= MOST_FACTOR else None


def _candidates(symbols: Mapping[str, int], position: str, is_weight: bool) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Return products of symbols, the most likely at a position of a shape first."""
    orders = {
        "first": ("B", "BS", "BH", "E", "S", "V", "ff", "d", "H"),
        "middle": ("S", "H", "E", "d", "ff", "B", "d/H"),
        "last": ("d", "S", "V", "ff", "d/H", "H", "E"),
    }
    order = ("d", "ff", "V", "E", "H", "d/H") if is_weight else orders[position]
    products = [tuple(name) if name in ("BS", "BH") else (name,) for name in order]
    known = [names for names in products if all(part in symbols for name in names for part in name.split("/"))]
    yield from ((1, names) for names in known)
    yield from ((factor, names) for factor in (2, 3, 4) for names in known if names in (("d",), ("ff",), ("B", "S")))


def _value(factor: int, names: Iterable[str], symbols: Mapping[str, int]) -> int | None:
    product = factor
    for name in names:
        if name == "d/H":
            if not symbols.get("H") or not symbols.get("d") or symbols["d"] % symbols["H"]:
                return None
            product *= symbols["d"] // symbols["H"]
        elif name not in symbols:
            return None
        else:
            product *= symbols[name]
    return product


def _written(number: int, factors: Counter[str], item_bytes: int) -> str:
    both = min(factors["H"], factors["d/H"])
    counts = factors + Counter({"d": both})
    counts.subtract({"H": both, "d/H": both})
    parts = [str(number)] if number > 1 else []
    for name in ("B", "E", "H", "S", "d", "d/H", "ff", "V"):
        if counts[name]:
            shown = f"({name})" if "/" in name else name
            parts.append(shown + (_POWERS.get(counts[name], f"^{counts[name]}") if counts[name] > 1 else ""))
    return "·".join([*parts, str(item_bytes)])

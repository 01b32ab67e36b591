"""Why an allocation has its size: its shape, with batch, length, heads and widths by their names.

Every dimension of the shape is named by itself. A size that several names fit equally well stays a number.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from stepscope.analysis.costs.op_calls import ITEM_BYTES

SYMBOLS = {
    "B": "batch", "S": "length", "H": "heads", "d": "model width", "ff": "feed-forward width", "V": "vocabulary",
    "E": "experts",
}  # fmt: skip
WEIGHTS = ("parameter", "buffer", "gradient", "optimizer_state", "autocast_weight_cast")
"""Owners whose sizes do not depend on batch and length."""
MOST_FACTOR = 8  # the most chunks that one storage is taken to hold; smaller dimensions are kernel sizes
MOST_CHOICES = 10_000  # of names for the dimensions of one shape: real ones have dozens

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
    ranks = [(each.get("dtype") in _INTEGERS and len(each["shape"]) == 2, len(each["shape"])) for each in inputs]
    if not inputs:
        return {}
    (is_tokens, num_dimensions), best = max(zip(ranks, inputs), key=lambda pair: (pair[0], pair[1]["bytes"]))
    shape = best["shape"]
    if not is_tokens and num_dimensions != 3:
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
    # A vocabulary may be as large as the feed-forward is wide: then only the name of its own module tells them apart.
    rows = [
        (is_named, n)
        for (n, last), name in matrices
        for is_named in [bool(_VOCABULARY.search(name if n not in known else name.rpartition(".")[2]))]
        if last == width != n and (is_named or n not in known)
    ]
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


class _Naming(NamedTuple):
    """A dimension as a product: a number and names."""

    doubt: int
    """How unusual it is: 0 for what belongs at this position."""
    factor: int
    names: tuple[str, ...]


_UNNAMED = _Naming(4, 1, ())
_DOUBTS = {
    "first": {"B": 0, "BS": 0, "BH": 0, "E": 1, "S": 1, "V": 2, "ff": 2, "d": 2, "H": 2},
    "middle": {"S": 0, "H": 0, "E": 0, "B": 1, "d": 1, "ff": 1, "d/H": 1},
    "last": {"d": 0, "V": 0, "ff": 0, "S": 0, "d/H": 0, "H": 1, "E": 1},
    "weight": {"d": 0, "ff": 0, "V": 0, "E": 0, "H": 1, "d/H": 1},
}
"""How unusual a size is at a position of a shape, and among the dimensions of a weight."""
_MULTIPLES = {(3, "d"): 0, (2, "ff"): 0, (2, "d"): 1, (4, "d"): 1, (3, "ff"): 1, (4, "ff"): 1} | {
    (factor, "BS"): 1 for factor in (2, 3, 4)
}
"""Multiples that models make: three projections in one, two halves of a gated layer, the gates of a recurrent one."""


def formula(allocation: Mapping[str, Any], symbols: Mapping[str, int]) -> str | None:
    """Return an allocation's bytes as the product of its shape, by names and numbers, and the bytes per element; None
    if no dimension has a name.

    >>> tensor = {"shape": [8, 12, 128, 128], "dtype": "float32", "bytes": 8 * 12 * 128 * 128 * 4}
    >>> formula(tensor, {"B": 8, "H": 12, "S": 128, "d": 768})
    'B·H·S²·4'
    """
    return common_formula([(allocation, symbols)])


def common_formula(allocations: Sequence[tuple[Mapping[str, Any], Mapping[str, int]]]) -> str | None:
    """Return the one product that gives the bytes of all, each with its own values of the symbols."""
    first = allocations[0][0]
    shapes = [tuple(each.get("shape") or ()) for each, _ in allocations]
    item_bytes = ITEM_BYTES.get(str(first.get("dtype")))
    if item_bytes is None or len(set(map(len, shapes))) > 1:
        return None
    # A storage can be larger than the first tensor seen in it: one of three chunks.
    wholes = {
        divmod(each["bytes"], item_bytes * max(1, math.prod(shape))) for (each, _), shape in zip(allocations, shapes)
    }
    (whole, rest), *others = wholes
    named = _named(list(zip(*shapes)), [symbols for _, symbols in allocations], first)
    if others or rest or not 1 <= whole <= MOST_FACTOR or named is None:
        return None
    number, factors = named
    return _written(number * whole, factors, item_bytes) if factors else None


def _named(
    dimensions: Sequence[Sequence[int]], symbols: Sequence[Mapping[str, int]], allocation: Mapping[str, Any]
) -> tuple[int, Counter[str]] | None:
    """Return the number and the names whose product every shape is; None if a size without a name differs."""
    places = ["first", *["middle"] * (len(dimensions) - 2), "last"][: len(dimensions)]
    options = [
        [
            naming
            for naming in _candidates(symbols[0], place, allocation)
            if all(_value(naming, values) == size for size, values in zip(sizes, symbols))
        ]
        if set(sizes) != {1}
        else []
        for sizes, place in zip(dimensions, places)
    ]
    if math.prod(len(each) + 1 for each in options) > MOST_CHOICES:
        return None
    choices: dict[tuple[_Naming, ...], int] = {}
    for choice in product(*([*each, _UNNAMED] for each in options)):
        strain = _strain(Counter(name for naming in choice for name in naming.names))
        if strain is not None:
            choices[choice] = strain + sum(naming.doubt for naming in choice)
    least = min(choices.values())
    best = [choice for choice, doubt in choices.items() if doubt == least]
    products = [(math.prod(n.factor for n in each), Counter(x for n in each for x in n.names)) for each in best]
    is_sure = all(each == products[0] for each in products)
    number, factors = 1, Counter[str]()
    for sizes, namings in zip(dimensions, zip(*best)):
        naming = namings[0]
        if naming.names and (is_sure or all(each[1:] == naming[1:] for each in namings)):
            number *= naming.factor
            factors.update(naming.names)
        elif len(set(sizes)) > 1:
            return None
        else:
            number *= sizes[0]
    return number, factors


def _candidates(symbols: Mapping[str, int], place: str, allocation: Mapping[str, Any]) -> Iterator[_Naming]:
    """Yield the products of symbols that a dimension may be, with the doubt about each."""
    doubts = _DOUBTS["weight" if allocation.get("owner") in WEIGHTS else place]
    # The vocabulary is a dimension of embeddings, logits and the loss; the feed-forward is a module inside a model.
    module = (allocation.get("module") or "").rpartition(".")[2]
    is_outside = not module or bool(_VOCABULARY.search(module))
    is_index = allocation.get("dtype") in _INTEGERS
    plain = {(1, name): 0 for name in doubts}
    for (factor, name), extra in (plain | _MULTIPLES).items():
        names = tuple(name) if name in ("BS", "BH") else (name,)
        if name not in doubts or not all(part in symbols for each in names for part in each.split("/")):
            continue
        if name == "V":
            extra += not is_outside
        elif name == "ff" or factor > 1:
            extra += is_outside
        if is_index and name in ("d", "ff", "V", "d/H"):
            extra += 2
        yield _Naming(doubts[name] + extra, factor, names)


def _strain(names: Counter[str]) -> int | None:
    """Return how unusual names are in one shape; None for those that no shape has together."""
    if max(names["B"], names["H"], names["E"], names["V"], names["S"] - 1, names["d"] - 1) > 1:
        return None
    if not names["H"]:  # scores and split widths have heads
        return int(names["S"] > 1) + int(names["d/H"] > 0)
    if names["d/H"] or names["S"] > 1:
        return 0
    return 2 if names["d"] or names["ff"] else 1


def _value(naming: _Naming, symbols: Mapping[str, int]) -> int | None:
    result = naming.factor
    for name in naming.names:
        if name == "d/H":
            if not symbols.get("H") or not symbols.get("d") or symbols["d"] % symbols["H"]:
                return None
            result *= symbols["d"] // symbols["H"]
        elif name not in symbols:
            return None
        else:
            result *= symbols[name]
    return result


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

"""Bytes by module, added up along the module tree."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

_NUMBER = re.compile(r"(^|[._])\d+(?=\.|$)")


@dataclass(frozen=True)
class ModuleBytes:
    """Memory of one module."""

    module: str | None  # fully qualified; empty is the model itself, None is outside every module
    bytes: int  # its own
    total_bytes: int  # including inner modules
    num_tensors: int  # its own


@lru_cache(1 << 16)
def starred(name: str | None) -> str | None:
    """Return a module's name with `*` for every number.

    >>> starred("blocks.11.mlp.0"), starred("Net_0.Linear_12"), starred("conv2d")
    ('blocks.*.mlp.*', 'Net_*.Linear_*', 'conv2d')
    """
    return None if name is None else _NUMBER.sub(r"\1*", name)


def alike(names: Iterable[str | None]) -> dict[str | None, str | None]:
    """Return each name with `*` for every number, except the last of a list: consecutive layers differ.

    >>> list(alike(["blocks.0.mlp.2", "blocks.0", "blocks.11.mlp.2", "blocks.11", "0"]).values())
    ['blocks.*.mlp.2', 'blocks.*', 'blocks.*.mlp.2', 'blocks.*', '0']
    """
    known = list(names)
    outer = {name for each in known for name in ancestors(each)[1:]}
    found = {}
    for name in known:
        around, dot, last = (name or "").rpartition(".")
        found[name] = starred(name) if name in outer or not last.isdigit() else f"{starred(around)}{dot}{last}"
    return found


@lru_cache(1 << 16)
def ancestors(name: str | None) -> tuple[str | None, ...]:
    """Return a module and all modules around it, the innermost first.

    >>> ancestors("blocks.0.mlp"), ancestors(None)
    (('blocks.0.mlp', 'blocks.0', 'blocks', ''), (None,))
    """
    if not name:
        return (name,)
    words = name.split(".")
    return (*(".".join(words[:end]) for end in range(len(words), 0, -1)), "")


def rolled_up(rows: Iterable[tuple[str | None, int, int]]) -> tuple[ModuleBytes, ...]:
    """Return totals by module from names, bytes and tensor counts, the largest first."""
    own: Counter[str | None] = Counter()
    total: Counter[str | None] = Counter()
    counts: Counter[str | None] = Counter()
    for module, num_bytes, num_tensors in rows:
        own[module] += num_bytes
        counts[module] += num_tensors
        for name in ancestors(module):
            total[name] += num_bytes
    return tuple(ModuleBytes(name, own[name], whole, counts[name]) for name, whole in total.most_common())


def activations_of(allocations: Iterable[tuple[Mapping[str, Any], int]]) -> tuple[ModuleBytes, ...]:
    """Return activations by module, each at its own maximum, so that micro-batches are not added."""
    changes = []
    for each, size in allocations:
        if each.get("owner") == "activation":
            born, died = each.get("born"), each.get("died")
            changes.append((-1 if born is None else born, 1, size, each.get("module")))
            if died is not None:
                changes.append((died, -1, size, each.get("module")))
    now: Counter[tuple[str, str | None]] = Counter()
    most: Counter[tuple[str, str | None]] = Counter()
    for _, sign, size, module in sorted(changes, key=itemgetter(0, 1)):
        own = [(("num", module), sign), (("own", module), sign * size)]
        for key, change in [*own, *((("total", name), sign * size) for name in ancestors(module))]:
            now[key] += change
            most[key] = max(most[key], now[key])
    return tuple(
        ModuleBytes(name, most["own", name], whole, most["num", name])
        for (what, name), whole in most.most_common()
        if what == "total"
    )


def frontier(sizes: Mapping[str | None, int], most: int) -> list[tuple[str | None, int]]:
    """Return about so many modules that together hold all bytes, by expanding the largest.

    Names that are `alike` are merged; a module's own memory keeps its name.

    >>> frontier({"blocks.0.mlp": 4, "blocks.1.mlp": 4, "blocks.0.attn": 3, "head": 2, None: 1}, 4)
    [('blocks.*.mlp', 8), ('blocks.*.attn', 3), ('head', 2), (None, 1)]
    """
    own: Counter[str | None] = Counter()
    total: Counter[str | None] = Counter()
    inside: dict[str | None, dict[str | None, None]] = {}
    together = alike(sizes)
    for name, num_bytes in sizes.items():
        own[together[name]] += num_bytes
        names = ancestors(together[name])
        for inner, outer in zip([None, *names], names):
            total[outer] += num_bytes
            if inner is not None:
                inside.setdefault(outer, {})[inner] = None
    rows: dict[str | None, int] = {name: total[name] for name in ("", None) if name in total}
    closed: set[str | None] = set()
    while opened := [name for name in rows if name not in closed and name in inside]:
        name = max(opened, key=rows.__getitem__)
        num_more = len(inside[name]) - (0 if own[name] else 1)
        if name and len(rows) + num_more > most:
            closed.add(name)
            continue
        del rows[name]
        rows |= {inner: total[inner] for inner in inside[name]}
        if own[name]:
            rows[name] = own[name]
            closed.add(name)
    return sorted(rows.items(), key=lambda row: -row[1])

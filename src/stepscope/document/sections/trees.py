"""Trees of parts by name; parts that are too small to see are merged with their siblings, and nothing is lost."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from stepscope.document.model import Node

LEAST_SHARE = 0.002  # parts with a smaller share of the whole are merged with their siblings
MAX_DEPTH = 24  # levels of a module name; deeper ones keep their dots
_NUMBER = re.compile(r"\d{1,9}$")


class Branch:
    def __init__(self, is_ordered: bool = False) -> None:
        self.is_ordered = is_ordered  # whether the parts inside stay in the order in which they were added
        self.own = 0  # what is in none of the parts inside
        self.total = 0
        self.color: str | None = None
        self.inner: dict[str, Branch] = {}

    def add(self, path: Sequence[str], value: int, color: str | None = None) -> None:
        branch = self
        branch.total += value
        for name in path:
            branch = branch.inner.setdefault(name, Branch())
            branch.total += value
            branch.color = branch.color or color
        branch.own += value

    def nodes(self, name: str, least_share: float = LEAST_SHARE) -> tuple[Node, ...]:
        """Return the nodes of a chart, parents first; siblings below a share of the whole are one node."""
        return tuple(self._nodes(name, "", "0", least_share * self.total))

    def _nodes(self, name: str, parent: str, id: str, least: float) -> Iterator[Node]:
        yield Node(id, parent, name, self.total, self.color)
        inside = {word: branch for word, branch in self.inner.items() if branch.total}
        small = {word: branch for word, branch in inside.items() if branch.total < least}
        small = small if len(small) > 1 else {}
        sizes = {word: branch.total for word, branch in inside.items() if word not in small}
        for number, word in enumerate(sizes if self.is_ordered else _in_order(sizes)):
            yield from inside[word]._nodes(word, id, f"{id}.{number}", least)
        if small:
            total = sum(branch.total for branch in small.values())
            yield Node(f"{id}.others", id, f"{len(small):,} others", total, self.color)


def module_path(module: str) -> list[str]:
    """Return the parts of a module name, outermost first.

    >>> module_path("blocks.0.mlp"), module_path("")
    (['blocks', '0', 'mlp'], ['the model itself'])
    """
    return module.split(".", MAX_DEPTH - 1) if module else ["the model itself"]


def own_of(totals: dict[str, int]) -> dict[str, int]:
    """Return what each module has without the modules inside it, from totals that include them.

    >>> own_of({"blocks.0": 10, "blocks.0.mlp": 7, "head": 2})
    {'blocks.0': 3, 'blocks.0.mlp': 7, 'head': 2}
    """
    own = dict(totals)
    for name, total in totals.items():
        around = name.rpartition(".")[0]
        while around and around not in totals:
            around = around.rpartition(".")[0]
        if around:
            own[around] -= total
    return own


def _in_order(sizes: dict[str, int]) -> list[str]:
    """Return the names, largest first; names that differ only in a number, as layers do, are together in its order.

    >>> _in_order({"10": 5, "9": 6, "head": 2, "norm": 4})
    ['9', '10', 'norm', 'head']
    """
    stems = {name: _NUMBER.sub("", name) for name in sizes}
    sums: Counter[str] = Counter()
    for name, value in sizes.items():
        sums[stems[name]] += value
    numbers = {name: int(found[0]) if (found := _NUMBER.search(name)) else -1 for name in sizes}
    return sorted(sizes, key=lambda name: (-sums[stems[name]], stems[name], numbers[name]))

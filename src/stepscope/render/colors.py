"""The colors of series and of nodes of a tree."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.document.colors import GREY, NAMED, PALETTE
from stepscope.document.model import Node, Series


def colors_of(series: tuple[Series, ...]) -> list[str]:
    """One a series: a name's own, and of the others none that is taken already."""
    taken = {NAMED[one.color] for one in series if one.color in NAMED}
    free = iter([color for color in PALETTE if color not in taken] + list(PALETTE) * len(series))
    return [NAMED[one.color] if one.color in NAMED else next(free) for one in series]


def colors_of_nodes(nodes: Sequence[Node]) -> dict[str, str]:
    """Of a tree, by id: a node's own, else its parent's; the parts of the whole take one after the other."""
    found: dict[str, str] = {}
    given = 0
    for node in nodes:
        if node.color in NAMED:
            found[node.id] = NAMED[node.color]
        elif node.parent == nodes[0].id and node is not nodes[0]:
            found[node.id], given = PALETTE[given % len(PALETTE)], given + 1
        else:
            found[node.id] = found.get(node.parent, GREY)
    return found

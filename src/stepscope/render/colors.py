"""The colors of series and trees, and how a tree hangs together."""

from collections.abc import Sequence

from stepscope.document.colors import GREY, NAMED, PALETTE
from stepscope.document.model import Node, Series


def colors_of(series: tuple[Series, ...]) -> list[str]:
    """Return one color per series: named ones first, then free ones."""
    taken = {NAMED[one.color] for one in series if one.color in NAMED}
    free = iter([color for color in PALETTE if color not in taken] + list(PALETTE) * len(series))
    return [NAMED[one.color] if one.color in NAMED else next(free) for one in series]


def colors_of_nodes(nodes: Sequence[Node]) -> dict[str, str]:
    """Return a color per node id: its own, or its parent's; top-level nodes take one after the other."""
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


def ink_on(color: str) -> str:
    """Return black or white, whichever is easier to read on a color (the relative luminance of WCAG 2).

    >>> ink_on("#000000"), ink_on("#ffffff")
    ('#ffffff', '#111111')
    """
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return "#111111" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.19 else "#ffffff"


def children_of(nodes: Sequence[Node]) -> dict[str, list[Node]]:
    """Return the children of every node that has some, by its id."""
    found: dict[str, list[Node]] = {}
    for node in nodes[1:]:
        found.setdefault(node.parent, []).append(node)
    return found


def depth_of(nodes: Sequence[Node]) -> int:
    """Return how many levels a tree has; a parent comes before its children."""
    depths: dict[str, int] = {"": 0}
    for node in nodes:
        depths[node.id] = depths.get(node.parent, 0) + 1
    return max(depths.values())

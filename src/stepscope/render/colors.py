"""Colors that eyes with and without red and green tell apart, the same thing in the same one everywhere.

The first six are Okabe and Ito's. A test holds how far the others are from them and from one another, also to eyes
that lack one kind of cone.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.document.model import Node, Series

GREY = "#c4c4c4"
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#400000", GREY)
"""In the order in which they are given away."""
PHASES = {
    "data": "#e69f00", "forward": "#0072b2", "backward": "#009e73", "optimizer": "#cc79a7", "other": GREY,
    "idle": "#e0e0c0", "unattributed": "#406060",
}  # fmt: skip
OWNERS = {
    "parameter": "#0072b2", "gradient": "#009e73", "optimizer_state": "#cc79a7", "activation": "#e69f00",
    "autocast_weight_cast": "#56b4e9", "temporary": "#d55e00", "input": "#e0e080", "buffer": "#204060",
    "workspace": "#406060", "left_alive": "#400000", "before the window": "#0000c0", "other": GREY,
}  # fmt: skip
CLASSES = {
    "gemm": "#0072b2", "attention_forward": "#009e73", "attention_backward": "#406040", "softmax": "#60c080",
    "norm": "#e0e080", "elementwise": "#e69f00", "reduction": "#d55e00", "copy_cast": "#56b4e9",
    "embedding_index": "#0000c0", "optimizer": "#cc79a7", "communication": "#400000", "convolution": "#204060",
    "fft": "#000040", "sort_scan": "#a02000", "memset_memcpy": "#e0e0c0", "triton_fused": "#406060", "other": GREY,
}  # fmt: skip
NAMED = PHASES | OWNERS | CLASSES


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

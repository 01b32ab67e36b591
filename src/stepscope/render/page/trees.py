"""Renders a tree as a Plotly figure: an icicle from the top down, or a treemap."""

import html
from typing import Any

from stepscope.document.model import Node, Tree
from stepscope.formatting import cell, percent, safe
from stepscope.render.colors import colors_of_nodes, depth_of, ink_on

MOST_NODES = 1200  # Plotly draws each as an element, so the smallest are left out and counted in the caption
_DEPTH = 7
_LETTERS = {"icicle": 150, "treemap": 80}
"""Characters across an icicle, and across a square tile that fills a treemap."""


def tree_figure(chart: Tree) -> dict[str, Any]:
    """Return the figure, with `left_out`: how many parts were too small to draw."""
    nodes, is_icicle = _largest(chart.nodes), chart.shape == "icicle"
    values = _whole(nodes)
    total = values[nodes[0].id] if nodes else 0.0
    shares = [values[node.id] / total if total else 0.0 for node in nodes]
    texts = [cell(chart.unit, node.value) for node in nodes]
    by_id = colors_of_nodes(nodes)
    colors = [by_id[node.id] for node in nodes]
    trace: dict[str, Any] = {
        "type": chart.shape,
        "ids": [_key(node.id) for node in nodes],
        "parents": [_key(node.parent) if node.parent else "" for node in nodes],
        "labels": [html.escape(safe(node.name, 80), quote=False) for node in nodes],
        "values": [values[node.id] for node in nodes],
        "branchvalues": "total",
        "marker": {"colors": colors},
        "textfont": {"color": [ink_on(color) for color in colors]},
        "text": [_inside(node.name, text, share, chart.shape) for node, text, share in zip(nodes, texts, shares)],
        "textinfo": "text",
        "hoverinfo": "text",
        "hovertext": [
            f"{html.escape(safe(node.name, 200), quote=False)}<br><b>{text}</b> · {percent(share)} of all"
            for node, text, share in zip(nodes, texts, shares)
        ],
        "maxdepth": _DEPTH,
        "sort": not is_icicle,  # an icicle keeps its order: forward before backward, layers as they run
    }
    if is_icicle:
        trace |= {"tiling": {"orientation": "v"}, "pathbar": {"visible": False}, "leaf": {"opacity": 1}}
        height = max(200, 54 * min(_DEPTH, depth_of(nodes)) + 20)
    else:
        trace |= {"tiling": {"pad": 1}, "pathbar": {"visible": True}}
        height = 460
    layout = {"margin": {"t": 8, "l": 4, "r": 4, "b": 4}, "uniformtext": {"minsize": 10, "mode": "hide"}}
    figure = {"data": [trace], "layout": layout, "narrow": {}, "height": height}
    return figure | {"min_width": 700 if is_icicle else 0, "left_out": len(chart.nodes) - len(nodes)}


def _inside(name: str, text: str, share: float, shape: str) -> str:
    """Return the text inside a part: as much of its name as fits, and its value if there is room."""
    room = int((share if shape == "icicle" else share**0.5) * _LETTERS[shape])
    if room < 3:
        return ""
    label = html.escape(safe(name, max(room, 4)), quote=False)
    return f"{label}<br>{text} · {percent(share)}" if room >= 18 else label


def _key(name: str) -> str:
    return html.escape(name.encode("utf-8", "backslashreplace").decode())


def _largest(nodes: tuple[Node, ...]) -> list[Node]:
    """Return the largest nodes in order, none without its parent."""
    if len(nodes) <= MOST_NODES:
        return list(nodes)
    places = sorted(range(len(nodes)), key=lambda place: (-nodes[place].value, place))
    kept = set(places[:MOST_NODES]) | {0}
    names = {nodes[place].id for place in kept}
    return [node for place, node in enumerate(nodes) if place in kept and (not node.parent or node.parent in names)]


def _whole(nodes: list[Node]) -> dict[str, float]:
    """Return each node's value, at least the exact sum of its children: Plotly draws nothing otherwise."""
    inside: dict[str, float] = {}
    values: dict[str, float] = {}
    for node in reversed(nodes):
        values[node.id] = max(float(node.value), inside.get(node.id, 0.0))
        inside[node.parent] = inside.get(node.parent, 0.0) + values[node.id]
    return values

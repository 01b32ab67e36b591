"""The points of a sweep as the page's script takes them: every figure in one unit, every text written already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.document.colors import PALETTE
from stepscope.document.model import Axis, Explorer, Figure
from stepscope.formatting import Scale, cell, safe, scale, title_of
from stepscope.render.page.axes import axis_title, scaled


def explorer_data(part: Explorer) -> dict[str, Any]:
    """Plain JSON. `texts` and `values` have one entry a point."""
    return {
        "id": part.id,
        "axes": [_axis(axis) for axis in part.axes],
        "places": [list(places) for places in part.places],
        "figures": [_figure(part, figure) for figure in part.shown],
        "statuses": [safe(status) for status in part.statuses],
        "reasons": [safe(reason) for reason in part.reasons],
        "names": [safe(name) for name in part.names],
        "marks": list(part.marks),
        "noisy": list(part.is_noisy),
        "x": part.x,
        "series": part.series,
        "palette": list(PALETTE),
    }


def _axis(axis: Axis) -> dict[str, Any]:
    return {
        "title": safe(axis.name.replace("_", " ")),
        "labels": [
            safe(cell(axis.name, value), 60) if not isinstance(value, int) else str(value) for value in axis.values
        ],
        "values": list(axis.values) if axis.is_numeric else None,
        "is_log": axis.is_log,
    }


def _figure(part: Explorer, figure: Figure) -> dict[str, Any]:
    """`units`: those in which its points are easy to read; `unit`: which of them a point has. An axis takes that of
    the largest point on it."""
    values = part.figures[figure.name]
    ends = [part.figures[name] for name in (figure.low, figure.high) if name is not None]
    cells = texts = [cell(figure.name, value) for value in values]
    if len(ends) == 2:
        texts = [
            f"{text} ({cell(figure.name, low)} – {cell(figure.name, high)})" if low is not None else text
            for text, low, high in zip(cells, *ends)
        ]
    scales = [scale(figure.name, value or 0.0) for value in values]
    units = list(dict.fromkeys(scales))
    return {
        "title": title_of(figure.name),
        "units": [{"divisor": unit.divisor, "axis": axis_title(figure.name, unit.unit)} for unit in units],
        "unit": [units.index(one) for one in scales],
        "is_log": figure.is_log,
        "values": _plain(values),
        "low": _plain(ends[0]) if len(ends) == 2 else None,
        "high": _plain(ends[1]) if len(ends) == 2 else None,
        "cells": cells,
        "texts": texts,
    }


def _plain(values: Sequence[float | None]) -> list[float | None]:
    return scaled(values, Scale(1.0, ""))

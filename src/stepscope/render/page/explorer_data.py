"""The points of a sweep as the page's script takes them: every figure in one unit, every text written already."""

from __future__ import annotations

from typing import Any

from stepscope.document.colors import PALETTE
from stepscope.document.model import Axis, Explorer, Figure, Series
from stepscope.formatting import cell, safe, scale, title_of
from stepscope.render.axes import axis_title, texts_of
from stepscope.render.page.axes import rounded, words


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
        "labels": [str(v) if isinstance(v, int) else safe(cell(axis.name, v), 60) for v in axis.values],
        "values": list(axis.values) if axis.is_numeric else None,
        "is_log": axis.is_log,
    }


def _figure(part: Explorer, figure: Figure) -> dict[str, Any]:
    """`units`: those in which its points are easy to read; `unit`: which of them a point has. An axis takes that of
    the largest point on it."""
    values = part.figures[figure.name]
    low, high = (part.figures[name] if name is not None else () for name in (figure.low, figure.high))
    scales = [scale(figure.name, value or 0.0) for value in values]
    units = list(dict.fromkeys(scales))
    titles = [words(axis_title(figure.name, unit.unit), 80) for unit in units]
    return {
        "title": title_of(figure.name),
        "units": [{"divisor": unit.divisor, "axis": title} for unit, title in zip(units, titles)],
        "unit": [units.index(one) for one in scales],
        "is_log": figure.is_log,
        "values": rounded(values),
        "low": rounded(low) if low else None,
        "high": rounded(high) if high else None,
        "cells": [cell(figure.name, value) for value in values],
        "texts": texts_of(figure.name, Series("", values, low=low, high=high)),
    }

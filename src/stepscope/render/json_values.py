"""Renders a report as plain values for JSON (docs/report.md has the structure)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from stepscope.document.model import Chart, Document, Findings, Part, Table, Timeline

SCHEMA_VERSION = 1
_SURROGATE = re.compile("[\ud800-\udfff]")


def plain_of(report: Document) -> dict[str, Any]:
    """Return the report as JSON values; NaN and infinity become null."""
    return {"schema_version": SCHEMA_VERSION, **_fields(report)}


def _part(part: Part) -> dict[str, Any]:
    kind = type(part).__name__.lower()
    if isinstance(part, Findings):
        return {"kind": kind, "diagnosis": _plain(part.values)}
    if isinstance(part, Timeline):
        return {"kind": kind, "text": "only on the page; stepscope export writes its events"}
    if isinstance(part, Table):
        return {"kind": kind, **_fields(part), "num_rows": part.num_rows}
    return {"kind": kind, "is_chart": isinstance(part, Chart), **_fields(part)}


def _fields(value: Any) -> dict[str, Any]:
    return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)  # JSON readers reject surrogates
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return _part(value) if isinstance(value, Part) else _fields(value)
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(one) for key, one in value.items()}
    if hasattr(value, "__iter__"):
        return [_plain(one) for one in value]
    return _plain(str(value))

"""What rules are written with: the case, findings with their evidence, and changes to replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.what_if import stretches
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural, size, whole_percent
from stepscope.session.case import LENGTH, Case

__all__ = [
    "LENGTH", "Case", "Change", "Evidence", "Finding", "Unavailable", "duration", "one_finding", "plural", "size",
    "stretches", "whole_percent",
]  # fmt: skip

P = ParamSpec("P")


def _listed(make: Callable[P, Finding]) -> Callable[P, list[Finding]]:
    return lambda *fields, **named: [make(*fields, **named)]


one_finding = _listed(Finding)  # makes a list of one finding, from its fields

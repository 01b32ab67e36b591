"""The section `compiler` of a report."""

from __future__ import annotations

from typing import Any

from stepscope.findings.finding import CannotCheck
from stepscope.report.source import Source


def parts(source: Source) -> tuple[Any, ...]:
    """To be written."""
    raise CannotCheck("not written yet")

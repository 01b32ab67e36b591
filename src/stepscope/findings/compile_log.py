"""What a recording says of torch.compile, read with care: shared by the rules about it."""

from __future__ import annotations

from typing import Any

from stepscope.findings.case import Case
from stepscope.findings.finding import CannotCheck


def compile_entries(case: Case, what: str) -> list[dict[str, Any]]:
    """One of the lists of `compile.json`; empty where nothing was compiled, or where there is a trace alone."""
    report = compile_report(case)
    entries = report.get(what)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def compile_report(case: Case) -> dict[str, Any]:
    """`compile.json`; empty where there is none."""
    try:
        return dict(case.recording.compiler or {})
    except CannotCheck:
        return {}


def count_of(entry: dict[str, Any]) -> int:
    """How often an entry was seen."""
    count = entry.get("count", 1)
    return count if isinstance(count, int) else 1

"""What a recording says of torch.compile, read with care: shared by the rules about it."""

from __future__ import annotations

from typing import Any

from stepscope.errors import Unavailable
from stepscope.session.case import Case
from stepscope.trace.compile_file import count_of, entries

__all__ = ["compile_entries", "compile_report", "count_of"]


def compile_entries(case: Case, what: str) -> list[dict[str, Any]]:
    """One of the lists of `compile.json`; empty where nothing was compiled, or where there is a trace alone."""
    return entries(compile_report(case), what)


def compile_report(case: Case) -> dict[str, Any]:
    """`compile.json`; empty where there is none."""
    try:
        return dict(case.recording.compiler or {})
    except Unavailable:
        return {}

"""What a recording's `compile.json` contains; empty if nothing was compiled or there is only a trace."""

from __future__ import annotations

from typing import Any

from stepscope.session.case import Case
from stepscope.trace.compile_file import count_of, entries

__all__ = ["compile_entries", "compile_report", "count_of"]


def compile_entries(case: Case, what: str) -> list[dict[str, Any]]:
    return entries(compile_report(case), what)


def compile_report(case: Case) -> dict[str, Any]:
    return dict(case.recording.compiler or {}) if case.has_recording else {}

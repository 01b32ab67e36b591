"""From a path to a report: every section of a recording or a trace, or those of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path

from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Missing, Report, Section
from stepscope.report.source import Source
from stepscope.report.text import safe
from stepscope.report.trace_verdict import trace_verdict
from stepscope.trace.sweep_file import is_sweep, read_sweep
from stepscope.version import __version__

SECTIONS = {
    "overview": "Overview",
    "timeline": "Timeline",
    "modules": "Modules",
    "kernels": "Kernels",
    "roofline": "Roofline",
    "memory": "Memory",
    "steps": "Steps",
    "compiler": "Compiler",
    "precision": "Precision",
    "counters": "Counters",
    "ranks": "Ranks",
}
"""Files of `report/sections`, in the order of the page, with their titles."""


def report_of(
    path: Path,
    rank: int | None = None,
    ignored: Collection[str] = (),
    use_cache: bool = True,
    progress: Callable[[float], None] | None = None,
) -> Report:
    """The report of a recording, a trace, a folder of ranks, or a sweep (its folder, or its file of rows)."""
    if is_sweep(path):
        from stepscope.report.sections.sweep import sweep_report

        return sweep_report(read_sweep(path))
    source = Source(path, rank, ignored, use_cache, progress)
    sections = tuple(_section(source, name, title) for name, title in SECTIONS.items())
    facts = {"source": str(path), "stepscope": __version__}
    return Report(title=safe(path.name), verdict=_verdict(source), sections=sections, facts=facts)


def _section(source: Source, name: str, title: str) -> Section:
    try:
        parts = import_module(f"stepscope.report.sections.{name}").parts(source)
    except CannotCheck as reason:
        parts = (Missing(str(reason)),)
    return Section(name, title, parts)


def _verdict(source: Source) -> str:
    return source.card.verdict if source.is_recording else trace_verdict(source.analysis.ranks[0])

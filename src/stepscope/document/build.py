"""From a path to a report: every section of a recording or a trace, or those of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path, PurePath

from stepscope.document.model import Document, Missing, Section
from stepscope.document.sections.shared import mapping
from stepscope.document.trace_verdict import trace_verdict
from stepscope.errors import WRONG_KIND, RecordingError, TraceError, Unavailable, wrong_kind
from stepscope.formatting import safe
from stepscope.session.source import Source
from stepscope.trace.sweep_file import is_sweep, read_sweep
from stepscope.version import __version__

SECTIONS = {
    "overview": "Overview",
    "timeline": "Timeline",
    "modules": "Modules",
    "kernels": "Kernels",
    "attention": "Attention",
    "copies": "Copies",
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
) -> Document:
    """The report of a recording, a trace, a folder of ranks, or a sweep (its folder, or its file of rows)."""
    if is_sweep(path):
        from stepscope.document.sections.sweep import sweep_report

        try:
            return sweep_report(read_sweep(path))
        except WRONG_KIND as error:
            raise RecordingError(f"{path} has a row with {wrong_kind(error)}") from None
    source = Source(path, rank, ignored, use_cache, progress)
    # These two first: a recording that has no card is refused before any work is done.
    title, verdict = title_of(source), verdict_of(source)
    sections = tuple(section_of(source, name, section) for name, section in SECTIONS.items())
    return Document(title, verdict, sections, {"source": str(path), "stepscope": __version__})


def title_of(source: Source) -> str:
    """What a colleague knows it by: the script and its device, or the trace's name."""
    name, device = source.path.resolve().name, None
    if source.is_recording:
        facts = source.card.recording.facts
        argv = mapping(facts.get("command")).get("argv")
        name = PurePath(str(argv[0])).name if isinstance(argv, list) and argv else name
        device = mapping(facts.get("environment")).get("device_name")
    else:
        device = source.analysis.ranks[0].device_name
        if (num := len(source.analysis.ranks)) > 1:
            name = f"{name}, {num} ranks"
    return safe(f"{name} on {device}" if device else name)


def section_of(source: Source, name: str, title: str) -> Section:
    """One section; where the source has nothing for it, why, and what to run."""
    try:
        parts = import_module(f"stepscope.document.sections.{name}").parts(source)
    except (Unavailable, RecordingError, TraceError) as reason:
        parts = (Missing(str(reason)),)
    except WRONG_KIND as error:
        if not source.is_recording:
            raise
        parts = (Missing(f"the recording has {wrong_kind(error)}"),)
    return Section(name, title, parts)


def verdict_of(source: Source) -> str:
    """The card's, or that of the trace's first rank."""
    return source.card.verdict if source.is_recording else trace_verdict(source.analysis.ranks[0])

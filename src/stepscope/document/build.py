"""The report of a session: every section of a recording or a trace, or those of a sweep."""

from collections.abc import Collection
from importlib import import_module
from pathlib import PurePath

import polars as pl

from stepscope.document.card import Card
from stepscope.document.model import Document, Missing, Section
from stepscope.document.tables import mapping
from stepscope.document.verdict import trace_verdict
from stepscope.errors import StepscopeError, failure
from stepscope.findings.diagnose import diagnose
from stepscope.formatting import safe
from stepscope.session import Kind, Session
from stepscope.version import __version__

SECTIONS = ("overview", "timeline", "modules", "kernels", "attention", "copies", "roofline", "memory", "steps",
            "run", "compiler", "precision", "counters", "ranks")  # fmt: skip
"""Files of `document/sections`, in the order of the page."""


def report_of(session: Session, ignored: Collection[str] = (), price_per_hour: float | None = None) -> Document:
    """Return the report of a recording, a trace, a folder of ranks or a sweep, without the findings of some rules."""
    if session.kind is Kind.SWEEP:
        from stepscope.document.sections.sweep import sweep_report

        return sweep_report(session.sweep)
    # These two first: a recording that has no card is refused before any work is done.
    title, verdict = title_of(session), verdict_of(session)
    sections = tuple(section_of(session, name, ignored, price_per_hour) for name in SECTIONS)
    return Document(title, verdict, sections, {"source": str(session.path), "stepscope": __version__})


def title_of(session: Session) -> str:
    """Return the script and its device, or the name of the trace."""
    name = session.path.resolve().name
    if session.is_recording:
        facts = session.recording.facts
        command = mapping(facts.get("command"))
        script = next(iter(command.get("argv") or ()), None)
        name = PurePath(str(command.get("script") or script or name)).name
        device = mapping(facts.get("environment")).get("device_name")
    else:
        device = session.analysis.ranks[0].device_name
        if (num := len(session.analysis.ranks)) > 1:
            name = f"{name}, {num} ranks"
    return safe(f"{name} on {device}" if device else name)


def section_of(
    session: Session, name: str, ignored: Collection[str] = (), price_per_hour: float | None = None
) -> Section:
    try:
        build = import_module(f"stepscope.document.sections.{name}").parts
        more = {"overview": lambda: (diagnose(session.case, ignored),), "run": lambda: (price_per_hour,)}
        parts = build(session, *more.get(name, tuple)())
    except StepscopeError as reason:
        parts = (Missing(str(reason)),)
    except (Exception, pl.exceptions.PanicException) as error:  # a section that fails costs only itself
        parts = (Missing(f"This section failed ({failure(error)}). The others are not affected."),)
    return Section(name, name.capitalize(), parts)


def verdict_of(session: Session) -> str:
    """Return the verdict of the card, or of the trace's first rank."""
    return Card.of(session).verdict if session.is_recording else trace_verdict(session.analysis.ranks[0])

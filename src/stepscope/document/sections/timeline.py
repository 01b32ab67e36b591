"""The section `timeline` of a report: host threads, GPU streams, phases, modules and memory on one canvas."""

from __future__ import annotations

from typing import Any

from stepscope.document.timeline.timeline import timeline_of
from stepscope.session import Session


def parts(session: Session) -> tuple[Any, ...]:
    """One timeline, of the rank that the report looks into."""
    return (timeline_of(session.linked),)

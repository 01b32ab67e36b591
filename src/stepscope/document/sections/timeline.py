"""The section `timeline`: host threads, GPU streams, phases, modules and memory."""

from __future__ import annotations

from stepscope.document.model import Timeline
from stepscope.document.timeline.timeline import timeline_of
from stepscope.session import Session


def parts(session: Session) -> tuple[Timeline]:
    """Return the timeline of the first rank."""
    return (timeline_of(session.linked),)

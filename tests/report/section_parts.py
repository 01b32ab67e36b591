"""Finding one part among those of a section."""

from __future__ import annotations

from stepscope.document.model import Facts

EVIL = "<script>alert('1')</script>\u202e\n\x1b[2J\"=1+1"


def of(parts, kind, id=None):
    """The only part of a kind, or the one with an id."""
    found = [part for part in parts if isinstance(part, kind) and id in (None, getattr(part, "id", None))]
    assert len(found) == 1, found
    return found[0]


def facts_in(parts) -> dict[str, str]:
    return {fact.title: fact.value for part in parts if isinstance(part, Facts) for fact in part.rows}

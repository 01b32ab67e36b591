"""How results show themselves in a notebook, with `print` and with `repr`.

Results live below documents and renderers and know nothing of them. `stepscope.api`, which is above both, registers
how each type becomes a document and how documents are rendered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Display(NamedTuple):
    """How results of one type are shown."""

    verdict: Callable[[Any], str]
    text: Callable[[Any], str]
    html: Callable[[Any], str]


_displays: dict[str, Display] = {}


def register(type_name: str, display: Display) -> None:
    """Set how results of a type, named by its class name, are shown."""
    _displays[type_name] = display


class Shown:
    """A result that a notebook shows as tables, `print` as text and `repr` in one line."""

    def _repr_html_(self) -> str | None:
        display = _displays.get(type(self).__name__)
        return None if display is None else display.html(self)

    def __str__(self) -> str:
        display = _displays.get(type(self).__name__)
        return repr(self) if display is None else display.text(self)

    def __repr__(self) -> str:
        display = _displays.get(type(self).__name__)
        return f"<{type(self).__name__}{'' if display is None else f': {display.verdict(self)}'}>"

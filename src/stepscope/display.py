"""How results show themselves in a notebook, with `print` and with `repr`.

Results live below documents and renderers and do not import them. The top of the package sets `renderer`, the name of
the module that turns a result into a document.
"""

from __future__ import annotations

from importlib import import_module

renderer = ""
"""A module with `verdict_of(result)`, `text_of(result)` and `html_of(result)`."""


class Shown:
    """A result that a notebook shows as tables, `print` as text and `repr` as one line."""

    def _repr_html_(self) -> str:
        return str(import_module(renderer).html_of(self))

    def __str__(self) -> str:
        return str(import_module(renderer).text_of(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {import_module(renderer).verdict_of(self)}>"

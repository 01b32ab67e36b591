"""Registers how each result shows itself: which builder makes its document. Imported by the API."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepscope.display import Display, register

if TYPE_CHECKING:
    from stepscope.document.model import Document

BUILDERS = {
    "Analysis": "stepscope.document.analysis:analysis_document",
    "Card": "stepscope.document.card:card_document",
    "Comparison": "stepscope.document.comparison:comparison_document",
    "DtypeAudit": "stepscope.document.audit:audit_document",
    "Diagnosis": "stepscope.document.findings:diagnosis_document",
    "MemoryAnalysis": "stepscope.document.sections.memory:memory_document",
    "SweepSummary": "stepscope.document.sweep_table:sweep_document",
    "Tuning": "stepscope.document.tuning:tuning_document",
    "Verification": "stepscope.document.verification:verification_document",
    "WhatIf": "stepscope.document.what_if:what_if_document",
    "Document": "stepscope.document.model:itself",
}
"""Class name → the function that makes its document."""


def document_of(result: Any) -> Document:
    """Return the document of a result."""
    module, _, function = BUILDERS[type(result).__name__].partition(":")
    build: Callable[[Any], Document] = getattr(import_module(module), function)
    return build(result)


def register_displays() -> None:
    """Register every result type; nothing is imported until a result is shown."""

    def text(result: Any) -> str:
        from stepscope.render.terminal import terminal_text

        return terminal_text(document_of(result))

    def html(result: Any) -> str:
        from stepscope.render.notebook import html_of

        return html_of(document_of(result))

    for name in BUILDERS:
        register(name, Display(lambda result: document_of(result).verdict, text, html))

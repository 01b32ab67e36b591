"""Shows results: which builder makes the document of each type, and how it is rendered."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepscope.formatting import safe
from stepscope.render.terminal import terminal_text

if TYPE_CHECKING:
    from stepscope.document.model import Document

BUILDERS = {
    "Analysis": "sections.time:analysis_document",
    "AttentionReport": "sections.attention:attention_document",
    "Card": "card:card_document",
    "Comparison": "comparison:comparison_document",
    "CompilerReport": "sections.compiler:compiler_document",
    "CopiesReport": "sections.copies:copies_document",
    "Document": "model:itself",
    "DtypeAudit": "precision:audit_document",
    "Diagnosis": "findings:diagnosis_document",
    "Hang": "hang:hang_document",
    "Improvement": "improvement:improvement_document",
    "MemoryAnalysis": "sections.memory:memory_document",
    "Plan": "plan:plan_document",
    "RunStatus": "run_status:run_document",
    "SweepSummary": "sweep_table:sweep_document",
    "Tuning": "tuning:tuning_document",
    "Verification": "verification:verification_document",
    "WhatIf": "findings:what_if_document",
}  # class name → the function in `document/` that makes its document
_LONGEST = 160


def document_of(result: Any, *options: Any) -> "Document":
    """Return the document of a result; `options` are further arguments of its builder."""
    name = type(result).__name__
    module, _, function = BUILDERS[name].partition(":")
    build: Callable[..., Document] = getattr(import_module(f"stepscope.document.{module}"), function)
    return build(result.rows if name == "Plan" else result, *options)


def verdict_of(result: Any) -> str:
    return safe(document_of(result).verdict, _LONGEST)


def text_of(result: Any) -> str:
    """Return a result as a terminal shows it."""
    return terminal_text(document_of(result))


def html_of(result: Any) -> str:
    """Return a result as a notebook shows it."""
    from stepscope.render.notebook import html_of as html_of_document

    return html_of_document(document_of(result))

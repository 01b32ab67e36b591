"""Print a one-screen summary of a run, trace, sweep or memory snapshot.

For a recording, this is its card; for a trace or a folder of ranks, where the time goes; for a sweep, its table; for
a memory snapshot, what fills the memory. Without PATH, shows the latest run under runs/.

examples:
  stepscope show
  stepscope show runs/train-20260101-120000
  stepscope show runs/train-20260101-120000 --json
  stepscope show runs/bench-cs336-20260101-120000
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.document.model import Document
    from stepscope.session import Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    parser.add_argument(
        "path", type=Path, nargs="?", metavar="PATH", help="recording, trace, sweep or memory snapshot"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text (docs/card.md)")


def main(arguments: argparse.Namespace) -> int:
    """Open the path and print its view."""
    from stepscope.cli.support.output import print_document
    from stepscope.cli.support.progress import Progress
    from stepscope.session import open_session

    with Progress("reading") as progress:
        document, to_json = _view(open_session(arguments.path, progress=progress))
    print_document(document, to_json, arguments.json, is_wide=True)
    return 0


def _view(session: Session) -> tuple[Callable[[], Document], Callable[[], Any]]:
    """Return the document and the JSON values that fit what the path is."""
    from stepscope.errors import UsageError
    from stepscope.trace.kind import Kind

    if session.kind is Kind.RECORDING:
        from stepscope.document.card import Card, card_document

        card = Card.of(session)
        return lambda: card_document(card), card.to_json
    if session.kind is Kind.SWEEP:
        from stepscope.analysis.comparison.sweep_records import sweep_json
        from stepscope.document.sweep_table import sweep_document

        sweep = session.sweep_summary
        return lambda: sweep_document(sweep), lambda: sweep_json(sweep)
    if session.kind in (Kind.SNAPSHOT, Kind.MEMORY):
        from stepscope.document.sections.memory import memory_document
        from stepscope.session.memory_growth import analyze_memory

        memory = analyze_memory([session])
        return lambda: memory_document(memory), memory.to_json
    if session.kind is Kind.STUDY:
        raise UsageError(
            f"{session.path} is a study: its report is report/report.md, `stepscope report` makes it again"
        )
    from stepscope.document.analysis import analysis_document

    analysis = session.analyze()
    return lambda: analysis_document(analysis), analysis.to_json

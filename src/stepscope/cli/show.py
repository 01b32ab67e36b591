"""Print a one-screen summary of a run, trace, sweep or memory snapshot.

For a recording, this is its card, with the ledger of a step; for a trace or a folder of ranks, where the time
goes; for a sweep, its table; for a memory snapshot, what fills the memory. Without PATH, shows the latest run under
runs/.

examples:
  stepscope show
  stepscope show runs/train-20260101-120000
  stepscope show runs/train-20260101-120000 --json
  stepscope show runs/bench-cs336-20260101-120000
"""

import argparse
from pathlib import Path
from typing import Any

from stepscope.cli.support.options import add_price_argument
from stepscope.cli.support.output import Progress, print_answer, print_document
from stepscope.errors import UsageError
from stepscope.session import Kind, Session, open_session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "recording, trace, sweep or memory snapshot"
    parser.add_argument("path", type=Path, nargs="?", metavar="PATH", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text (docs/card.md)")
    add_price_argument(parser)


def main(arguments: argparse.Namespace) -> int:
    with Progress("reading") as progress:
        session = open_session(arguments.path, progress=progress)
        result = _result(session, arguments.price_per_hour)
    if session.kind is Kind.SWEEP:
        from stepscope.analysis.comparison.sweeps import sweep_json
        from stepscope.document.sweep_table import sweep_document

        print_document(lambda: sweep_document(result), lambda: sweep_json(result), arguments.json, is_wide=True)
    else:
        print_answer(result, arguments.json, is_wide=True)
    return 0


def _result(session: Session, price_per_hour: float | None) -> Any:
    if session.kind is Kind.RECORDING:
        from stepscope.document.card import Card

        return Card.of(session, with_ledger=True, price_per_hour=price_per_hour)
    if session.kind is Kind.SWEEP:
        return session.sweep_summary
    if session.kind in (Kind.SNAPSHOT, Kind.MEMORY):
        from stepscope.session.memory_scaling import analyze_memory

        return analyze_memory([session])
    if session.kind is Kind.STUDY:
        raise UsageError(
            f"{session.path} is a study: its report is report/report.md, `stepscope report` makes it again"
        )
    return session.analyze()

"""What is wrong with a step: causes with evidence, what each costs, and what to change.

Reads a recording of stepscope run, a trace of PyTorch's profiler (.json, .json.gz) or a folder with one a rank. Needs
neither torch nor a GPU. Savings are found by playing the step again without the cause (stepscope whatif does the same
by hand). What was checked and clean is said, and what could not be checked, with what to run to check it.

Rules are suppressed in pyproject.toml:
  [tool.stepscope.diagnose]
  ignore = ["launch_bound"]

examples:
  stepscope diagnose runs/train-20260101-120000
  stepscope diagnose trace.json.gz
  stepscope diagnose trace.json.gz --json | jq '.findings[0]'
  stepscope list rules
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.document.model import Document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    parser.add_argument("path", type=Path, nargs="?", metavar="PATH", help="recording or trace (default: latest run)")
    parser.add_argument("--rank", type=int, metavar="R", help="this rank (default: the first)")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="ID", help="a rule not to ask; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object (docs/diagnose.md)")
    parser.add_argument("--no-cache", action="store_true", help="read the trace itself and keep nothing")


def main(arguments: argparse.Namespace) -> int:
    """Diagnose and print."""
    from stepscope.cli.support.output import print_document
    from stepscope.cli.support.progress import Progress
    from stepscope.cli.support.settings import ignored_rules
    from stepscope.session import open_session

    named = [name for names in arguments.ignore for name in names.split(",") if name]
    ignored = {*ignored_rules(Path.cwd()), *named}
    with Progress("reading") as progress:
        session = open_session(
            arguments.path, rank=arguments.rank, use_cache=not arguments.no_cache, progress=progress
        )
        case = session.case
        from stepscope.findings.diagnose import diagnose

        diagnosis = diagnose(case, ignored)

    def document() -> Document:
        from stepscope.document.findings import diagnosis_document

        return diagnosis_document(diagnosis, str(session.path) if session.is_recording else None)

    print_document(document, diagnosis.to_json, arguments.json)
    return 0

"""One page that shows where a step and its memory went, or what a sweep found; no network, nothing to install.

Reads a recording of stepscope run, a trace of PyTorch's profiler (.json, .json.gz), a folder with one a rank, or what
stepscope bench left (its folder, or its results.jsonl). The ending of -o says what is made: .html (the page), .md
(for a pull request), .json, or a folder with all of them, every table as CSV and every chart as PNG. Without -o it is
report.html inside a recording or a sweep, and NAME.report.html here for a trace.

examples:
  stepscope report runs/train-20260101-120000 --open
  stepscope report trace.json.gz -o step.html
  stepscope report runs/sizes -o paper/sizes/
  stepscope report --from results.jsonl -o sizes.md
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.session import Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    parser.add_argument("path", type=Path, nargs="?", metavar="PATH", help="a recording, a trace, ranks, a sweep")
    parser.add_argument("--from", dest="rows", type=Path, metavar="FILE", help="a sweep's rows: results.jsonl")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="report.html, .md, .json or a folder (default: see above)"
    )
    parser.add_argument("--force", action="store_true", help="write over what is there")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    parser.add_argument("--rank", type=int, metavar="R", help="look into this rank (default: the first)")
    parser.add_argument("--no-cache", action="store_true", help="read the trace itself and keep nothing")


def main(arguments: argparse.Namespace) -> int:
    """Make the report and say where it is."""
    from stepscope.cli.support.output import tell
    from stepscope.cli.support.progress import Progress
    from stepscope.cli.support.settings import ignored_rules
    from stepscope.session import Kind, need_read_side, open_session

    if arguments.path is not None and arguments.rows is not None:
        raise UsageError("PATH and --from both say what to report on: leave one of them out")
    need_read_side()
    from stepscope.document.build import report_of
    from stepscope.render.write import check_target, write_report

    with Progress("reading") as progress:
        session = open_session(
            arguments.path or arguments.rows,
            rank=arguments.rank,
            use_cache=not arguments.no_cache,
            progress=progress,
        )
        if arguments.output is None and session.kind is Kind.STUDY:
            return _study(session.path)
        target = check_target(arguments.output or default_target(session), arguments.force)
        report = report_of(session, ignored_rules(Path.cwd()))
    written = write_report(report, target)
    tell(f"stepscope: {written}")
    if arguments.open:
        import webbrowser

        if not webbrowser.open(written.resolve().as_uri()):
            tell("stepscope: no browser was found to open it with")
    return 0


def _study(folder: Path) -> int:
    """Make a study's report and files again, inside its folder."""
    from stepscope.cli.support.output import tell
    from stepscope.studies.write import study_of, write_study

    tell(f"stepscope: {write_study(study_of(folder), folder)}")
    return 0


def default_target(session: Session) -> Path:
    """Return where a report goes by default: inside a recording or a sweep, a trace's into the working folder."""
    from stepscope.render.files import stem_of
    from stepscope.session import Kind

    path = session.path
    if session.kind in (Kind.RECORDING, Kind.SWEEP):
        folder = path if path.is_dir() else path.parent
        if os.access(folder, os.W_OK):
            return folder / "report.html"
    return Path(f"{stem_of(path)}.report.html")

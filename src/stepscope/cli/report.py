"""Write a self-contained HTML page that shows where a step's time and memory go, or the results of a sweep.

PATH is a recording, a PyTorch profiler trace (.json, .json.gz), a folder with one trace per rank, or the folder or
results.jsonl of stepscope bench. The extension of -o selects the format: .html (the page), .md (for a pull request)
or .json. If -o is a folder, it gets all three, every table as CSV and every chart as PNG. Without -o, the report is
written to report.html inside a recording or sweep or, for a trace, to NAME.report.html in the current folder.

examples:
  stepscope report runs/train-20260101-120000 --open
  stepscope report trace.json.gz -o step.html
  stepscope report runs/sizes -o paper/sizes/
  stepscope report --from results.jsonl -o sizes.md
"""

import argparse
import webbrowser
from pathlib import Path

from stepscope.api.reading import report_target
from stepscope.cli.support.options import (
    add_price_argument,
    add_source_arguments,
    add_spread_argument,
    keep_queries_in_one_thread,
    opened,
)
from stepscope.cli.support.output import tell
from stepscope.cli.support.settings import ignored_rules
from stepscope.errors import UsageError
from stepscope.session import Kind, latest_run, need_read_side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", type=Path, nargs="?", metavar="PATH", help="recording, trace, folder of ranks or sweep")
    add("--from", dest="rows", type=Path, metavar="FILE", help="results.jsonl of a sweep")
    add("-o", "--output", type=Path, metavar="FILE", help="output file (.html, .md or .json) or folder")
    add("--force", action="store_true", help="overwrite existing files")
    add_price_argument(parser)
    add("--open", action="store_true", help="open the page in the browser")
    add_source_arguments(parser)
    add_spread_argument(parser)


def main(arguments: argparse.Namespace) -> int:
    if arguments.path is not None and arguments.rows is not None:
        raise UsageError("PATH and --from both name what to report on: leave one out")
    need_read_side()
    path = arguments.path or arguments.rows or latest_run()
    keep_queries_in_one_thread(path)
    from stepscope.document.build import report_of
    from stepscope.render.write import check_target, write_report

    note = ""
    with opened(arguments, path) as session:
        if session.kind is Kind.STUDY:
            from stepscope.studies.write import study_of, without_pictures, write_study

            if arguments.output is not None:
                raise UsageError(f"{session.path} is a study: its report is written into its folder, leave -o out")
            written = write_study(study_of(session.path), session.path)
            note = without_pictures(session.path)
        else:
            target = check_target(arguments.output or report_target(session), arguments.force)
            written = write_report(report_of(session, ignored_rules(Path.cwd()), arguments.price_per_hour), target)
    tell(f"stepscope: {written}{note}")
    if arguments.open and not webbrowser.open(written.resolve().as_uri()):
        tell("stepscope: no browser was found")
    return 0

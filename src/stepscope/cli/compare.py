"""Decide whether two runs really differ, and show where the difference comes from.

BASE and NEW are two recordings, two results of stepscope bench (the folder, or its results.jsonl) or two traces (a
file, or a folder of ranks). A change counts if a Mann–Whitney test and the bootstrap interval of the change in median
both show it and it exceeds --threshold. Runs that differ in device, dtype, or the number of tokens, parameters,
ranks or FLOPs are not compared, unless --allow lists that difference.

Repeated runs of the same code differ too. To account for this, pass at least three runs each to --base and --new.
Each run is then one sample, and the interval includes the variation between runs.

The exit code is 0 if all --fail-on gates pass, 3 if one fails, 4 if the two are not comparable or there are too few
samples, and 2 for a usage error. A gate never passes on missing data.

examples:
  stepscope compare runs/main runs/mine
  stepscope compare runs/main runs/mine --fail-on step_time:3% --fail-on peak_memory:1%
  stepscope compare --base runs/main-* --new runs/mine-* --fail-on step_time:3%
  stepscope compare runs/h100 runs/h200 --allow device
  stepscope compare before.json.gz after.json.gz --top 20
  stepscope compare runs/main runs/mine --fail-on tokens_per_second:3% --github-summary
"""

import argparse
import os
from pathlib import Path

from stepscope.api.reading import compare
from stepscope.cli.support.options import positive, share, words
from stepscope.cli.support.output import Progress, print_answer, tell, write
from stepscope.errors import NotComparableError, StepscopeError, UsageError
from stepscope.formatting import safe

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="*", type=Path, metavar="BASE NEW", help="two recordings, sweeps or traces")
    add("--base", nargs="+", type=Path, metavar="PATH", help="at least three runs instead of BASE")
    add("--new", nargs="+", type=Path, metavar="PATH", help="at least three runs instead of NEW")
    worse = "exit with code 3 if METRIC worsens by more than P%%"
    add("--fail-on", action="append", default=[], metavar="METRIC:P%", help=worse)
    add("--allow", action="append", default=[], metavar="WHAT", help="differences to accept, e.g. device,dtype")
    noise = "treat changes below this as noise (default 2%%)"
    add("--threshold", type=share, default=0.02, metavar="P%", help=noise)
    add("--json", action="store_true", help="print JSON instead of text (docs/compare.md)")
    add("--markdown", action="store_true", help="print Markdown for a pull request")
    add("--github-summary", action="store_true", help=f"also append Markdown to ${SUMMARY_VARIABLE}")
    add("--top", type=positive, default=8, metavar="N", help="rows in lists of names (default 8)")
    add("--no-cache", action="store_true", help="do not read or write the cache")


def main(arguments: argparse.Namespace) -> int:
    from stepscope.analysis.comparison.compare import EXIT_NOT_COMPARABLE

    if arguments.json and arguments.markdown:
        raise UsageError("--json and --markdown exclude each other: name one")
    base, new = _sides(arguments)
    gates = words(arguments.fail_on)
    if arguments.fail_on and not gates:
        raise UsageError("--fail-on needs METRIC:P%, such as step_time:3%")
    summary = os.environ.get(SUMMARY_VARIABLE) if arguments.github_summary else None
    if arguments.github_summary and not summary:
        raise UsageError(
            f"--github-summary needs {SUMMARY_VARIABLE}, which GitHub Actions sets. --markdown prints the same"
        )
    try:
        with Progress("reading") as progress:
            comparison = compare(
                base,
                new,
                threshold=arguments.threshold,
                allow=words(arguments.allow),
                fail_on=gates,
                use_cache=not arguments.no_cache,
                progress=progress,
            )
    except NotComparableError as error:
        tell(f"stepscope compare: {safe(error, 1000)}")
        return EXIT_NOT_COMPARABLE
    markdown = ""
    if summary or arguments.markdown:
        from stepscope.document.comparison import comparison_document
        from stepscope.render.markdown.markdown import markdown_of

        markdown = markdown_of(comparison_document(comparison, arguments.top))
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as stream:
                stream.write(markdown + "\n")
        except OSError as error:
            reason = error.strerror or error
            raise StepscopeError(f"{summary} ({SUMMARY_VARIABLE}) cannot be written: {reason}") from None
    if arguments.markdown:
        write([markdown])
    else:
        print_answer(comparison, arguments.json, arguments.top)
    return comparison.exit_code


def _sides(arguments: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    paths, base, new = arguments.paths, arguments.base, arguments.new
    if base and new and not paths:
        return base, new
    if base or new:
        raise UsageError("--base and --new belong together and replace BASE NEW")
    if len(paths) != 2:
        raise UsageError(
            "name BASE and NEW, or several runs of each: --base runs/a1 runs/a2 … --new runs/b1 runs/b2 …"
        )
    return paths[:1], paths[1:]

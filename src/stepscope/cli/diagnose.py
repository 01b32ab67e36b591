"""Find what is wrong with a step: each problem with its evidence, its cost and a fix.

Reads a recording, a PyTorch profiler trace (.json, .json.gz), an SQLite export of Nsight Systems or a folder with one
trace per rank. Needs neither torch nor a GPU. Savings come from replaying the step without the problem. Also lists
the rules that passed, and those that could not run, each with the command that provides the missing data.

What-if: with --scale, --drop-launches, --host or --no-waits, the step is instead replayed with a change that you
specify. WORK is FIELD=PATTERN, or several separated by commas. FIELD is class, kernel, op, called (the outermost op),
module or phase. * matches anything. See docs/whatif.md.

To ignore rules, list them in pyproject.toml:
  [tool.stepscope.diagnose]
  ignore = ["launch_bound"]

examples:
  stepscope diagnose
  stepscope diagnose trace.json.gz
  stepscope diagnose runs/baseline --json | jq '.findings[0]'
  stepscope diagnose trace.json.gz --scale 'class=attention:0.5'
  stepscope diagnose trace.json.gz --drop-launches 'called=aten::contiguous'
  stepscope diagnose runs/baseline --host 0.1 --no-waits
"""

import argparse
from pathlib import Path

from stepscope.cli.support.ahead import import_beside
from stepscope.cli.support.answers import answer
from stepscope.cli.support.options import (
    add_source_arguments,
    add_spread_argument,
    keep_queries_in_one_thread,
    opened,
    words,
)
from stepscope.cli.support.output import print_answer
from stepscope.errors import UsageError
from stepscope.session import latest_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, nargs="?", metavar="PATH", help="recording or trace (default: latest run)")
    parser.add_argument("--ignore", action="append", default=[], metavar="ID", help="skip this rule; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text (docs/diagnose.md)")
    add_source_arguments(parser)
    add_spread_argument(parser)
    add = parser.add_argument_group("what-if").add_argument
    scaled, dropped = "multiply the time of this GPU work by FACTOR", "drop this GPU work and its launches"
    add("--scale", action="append", default=[], metavar="WORK:FACTOR", help=scaled)
    add("--drop-launches", action="append", default=[], metavar="WORK", help=dropped)
    add("--host", type=float, metavar="FACTOR", help="multiply the host's own time by FACTOR")
    add("--no-waits", action="store_true", help="remove the host's waits for the GPU within a step")
    add("--clean", action="store_true", help="subtract the profiler's overhead first")


def main(arguments: argparse.Namespace) -> int:
    path = arguments.path or latest_run()
    keep_queries_in_one_thread(path)
    return answer("diagnose", arguments, [path], lambda: _diagnose(arguments))


def _diagnose(arguments: argparse.Namespace) -> None:
    with opened(arguments, arguments.path) as session:
        import_beside("stepscope.session.case", "stepscope.findings.diagnose")
        case = session.case
    scale, dropped, host = [_scale(word) for word in arguments.scale], arguments.drop_launches, arguments.host
    if scale or dropped or host is not None or arguments.no_waits or arguments.clean:
        from stepscope.findings.what_if import what_if

        replayed = what_if(case, scale, dropped, host, not arguments.no_waits, arguments.clean)
        print_answer(replayed, arguments.json)
        return
    from stepscope.api.reading import need_steps
    from stepscope.findings.diagnose import diagnose

    need_steps(session)
    if not arguments.json:  # Polars' queries release the interpreter too
        import_beside("stepscope.document.findings", "stepscope.render.terminal")
    diagnosis = diagnose(case, set(words(arguments.ignore)))
    print_answer(diagnosis, arguments.json, str(session.path) if session.is_recording else None)


def _scale(word: str) -> tuple[str, float]:
    work, is_there, factor = word.rpartition(":")
    try:
        value = float(factor)
    except ValueError:
        value = -1.0
    if not is_there or not 0 <= value < float("inf"):
        raise UsageError(f"--scale {word!r} must be WORK:FACTOR, such as 'class=attention:0.5'")
    return work, value
